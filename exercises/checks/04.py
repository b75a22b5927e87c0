"""Exercise 4: the ring, from the index of a chunk to an all-reduce of any shape."""

import torch
import torch.distributed as dist

from ddp_course.grading.attempt import COLLECTIVES, RING, tensors, worlds
from ddp_course.grading.checks import require, task
from ddp_course.running import wire

LOOP = {"ranks": 4, "forbidden": RING + COLLECTIVES}
LEFT = "you send to the left, to rank - 1; this ring goes to the right, to rank + 1, and receives from the left"
OWN_EVERY_TIME = "every message was your own chunk: after the first step, send on what has just come in"


@task("4.1", "chunk_to_send", {"down to chunk 0": 0.5, "past chunk 0": 0.5})
class ChunkToSend:
    """Which chunk a rank sends in a step of reduce-scatter: rank - step, and K more where that is less than 0."""

    def draw(random, hidden):
        sizes = random.sample(range(2, 9), 4)
        drawn = [(random.randrange(k), random.randrange(k - 1), k) for k in sizes for _ in range(3)]
        return {"cases": [*drawn, (0, 1, 3), (2, 1, 3), (1, 3, 5), (4, 2, 5)]}

    def probe(chunk_to_send, cases):
        """The index in each case."""
        for rank, step, size in cases:
            part = "down to chunk 0" if step <= rank else "past chunk 0"
            yield part, f"rank {rank}, step {step}, {size} ranks", chunk_to_send(rank, step, size)


def draw_chunks(random, hidden):
    """Lengths of uneven chunks for 2, 3 and 4 ranks, longer ones first, and whole numbers to fill them with."""
    odd = 12 * random.randrange(1, 3) + random.choice((5, 7))
    lengths = {size: [len(chunk) for chunk in torch.arange(odd).tensor_split(size)] for size in (3, 4, 2)}
    return {"lengths": lengths, "values": [tensors(random, 4, 16, whole=True) for _ in range(4)]}


def probe_chunks(function, lengths, values):
    """Every rank's chunks after `function(chunks, group)` in worlds of 3, 4 and 2, and the bytes that it sent."""
    for size, group in worlds(3, 4, 2):
        own = values[dist.get_rank()]
        if size == 3:
            try_equal_chunks(function, [chunk[:4].clone() for chunk in own[:3]], group)
        chunks = [own[index][:length].clone() for index, length in enumerate(lengths[size])]
        with wire.counting() as traffic:
            function(list(chunks), group)
        yield "chunks", size, chunks
        yield "sent", size, ((traffic.bytes_sent, traffic.messages_sent))


def try_equal_chunks(function, chunks, group):
    """Wrong for what shows with equal chunks alone: with others all that is seen may be a message that does not fit."""
    rank, size, left, _ = wire.neighbours(group)
    events = []
    with wire.observing(events.append):
        function(chunks, group)
    require({event.peer for event in events if event.kind == "send"} != {left}, LEFT)
    others = [chunk for index, chunk in enumerate(chunks) if index != (rank + 1) % size]
    require(not others[0].equal(others[1]), OWN_EVERY_TIME)


@task("4.2", "reduce_scatter", {"sums": 2, "bytes": 1}, **LOOP)
class ReduceScatter:
    """After K-1 steps rank r holds the sum of chunk r+1, and has sent K-1 chunks."""

    draw = draw_chunks
    probe = probe_chunks

    def together(ranks, lengths, values):
        """Only chunk r+1 of rank r must be right."""
        return halves(ranks, "sums", "chunk (rank + 1) mod K", lambda rank, size: [(rank + 1) % size])


@task("4.3", "allgather", {"chunks": 1, "bytes": 1}, **LOOP)
class AllGather:
    """From rank r's finished chunk r+1 to all chunks everywhere."""

    draw = draw_chunks
    probe = probe_chunks

    def together(ranks, lengths, values):
        """All chunks must be right."""
        return halves(ranks, "chunks", "all chunks after allgather", lambda rank, size: range(size))


def halves(ranks, part, what, chosen):
    """By rank the chunks that must be right as one tensor, and the bytes and messages that were sent."""
    made = {part: {}, "bytes": {}, "the other chunks": {}}
    for size in (3, 4, 2):
        case, chunks = f"with {size} ranks", {rank: ranks[rank]["chunks"][size] for rank in range(size)}
        made[part][f"{case}, {what}"] = {
            rank: torch.cat([of[i] for i in chosen(rank, size)]) for rank, of in chunks.items()
        }
        made["the other chunks"][case] = {rank: torch.cat(of) for rank, of in chunks.items()}
        for place, unit in enumerate(("bytes sent", "messages sent")):
            made["bytes"][f"{case}, {unit}"] = {rank: ranks[rank]["sent"][size][place] for rank in range(size)}
    return made


SHAPES = {"in one row": (23,), "a matrix": (5, 7), "not contiguous": (6, 4), "fewer elements than ranks": (2,)}


@task("4.4", "ring_all_reduce", {"sums": 1, "any shape": 1, "bytes": 1}, **LOOP)
class RingAllReduce:
    """Any shape, in place, uneven chunks, 1 to 4 ranks, and no rank sends more than 2 (K-1) chunks."""

    def draw(random, hidden):
        shapes = {**SHAPES, "of no elements": (0,)} if hidden else SHAPES
        dtype = torch.float64 if hidden else torch.float32
        return {"values": {name: tensors(random, 4, *shape, dtype=dtype, whole=True) for name, shape in shapes.items()}}

    def probe(ring_all_reduce, values):
        """Every rank's tensor afterwards, and what it sent, in worlds of 1 to 4 ranks."""
        for size, group in worlds(3, 4, 2, 1):
            for name, of_ranks in values.items():
                tensor = of_ranks[dist.get_rank()].clone()
                tensor = tensor.t() if name == "not contiguous" else tensor
                with wire.counting() as traffic:
                    ring_all_reduce(tensor, group)
                part = "sums" if name == "in one row" else "any shape"
                yield part, f"{size} ranks, a tensor {name}", tensor
                yield "bytes", f"{size} ranks, a tensor {name}", traffic.bytes_sent

    def together(ranks, values):
        """Sums by rank; of the bytes how many there are in all, and how many chunks the busiest rank sends."""
        made = {"sums": {}, "any shape": {}, "bytes": {}}
        for rank, parts in enumerate(ranks):
            for part in ("sums", "any shape"):
                for case, tensor in parts[part].items():
                    made[part].setdefault(case, {})[rank] = tensor
        for size in (3, 4, 2):
            for name, (tensor, *_) in values.items():
                case = f"{size} ranks, a tensor {name}"
                sent = [ranks[rank]["bytes"][case] for rank in range(size)]
                chunk = -(-tensor.numel() // size) * tensor.element_size()
                made["bytes"][f"{case}, bytes sent in all"] = sum(sent)
                made["bytes"][f"{case}, no rank sends more than 2 (K-1) chunks"] = max(sent) <= 2 * (size - 1) * chunk
        return made


@task("4.5", "step_seconds", {"equal cables": 1, "a slow cable": 1})
class StepSeconds:
    """The least over K of c/K + 2(K-1) (latency + p/(K b)), with the K fastest cables, of which b is the slowest."""

    def draw(random, hidden):
        cases = []
        for ranks, slow, share in [(4, 1, 2), (8, 1, 9), (1, 1, 1), (6, 0.7, 9), (5, 0.05, 2), (8, 0.4, 1)]:
            bits, parameters = random.randrange(1, 90) * 10**8, random.randrange(1, 400) * 10**6
            cables = [slow * bits] * (1 + (ranks > 5)) + [bits] * (ranks - 1 - (ranks > 5))
            random.shuffle(cables)
            cases.append((cables, parameters, random.randrange(1, 90) * 1e-3, share * 64 * parameters / bits))
        return {"cases": cases}

    def probe(step_seconds, cases):
        """The seconds of the shortest step."""
        for cables, parameters, latency, computing in cases:
            bits = ", ".join(f"{cable:.3g}" for cable in cables)
            about = f"cables of {bits} bit/s, {parameters:,} parameters, {1000 * latency:.0f} ms of latency"
            part = "equal cables" if len(set(cables)) == 1 else "a slow cable"
            yield part, f"{about}, seconds", step_seconds(list(cables), parameters, latency, computing)


@task("4.6", ("the_bug", "mended_ring"), {"the line": 1, "mended": 1}, secret=("the line",), **LOOP)
class FindTheBugInTheRing:
    """A ring that loses the remainder: line 3 cuts the tensor into chunks, and drops what is left over."""

    def draw(random, hidden):
        lengths = {"even": 24, "odd": 12 * random.randrange(1, 3) + random.choice((5, 7, 11)), "short": 3}
        dtype = torch.float64 if hidden else torch.float32
        return {"values": {name: tensors(random, 4, n, dtype=dtype, whole=True) for name, n in lengths.items()}}

    def probe(the_bug, mended_ring, values):
        """The line that is named, and every rank's tensors afterwards, in worlds of 2 to 4 ranks."""
        yield "the line", "the faulty line", the_bug()
        for size, group in worlds(3, 4, 2):
            for of_ranks in values.values():
                tensor = of_ranks[dist.get_rank()].clone()
                mended_ring(tensor, group)
                yield "mended", f"{size} ranks, {len(tensor)} numbers", tensor
