"""Exercise 4: the ring, from the index of a chunk to an all-reduce of any shape.

A task's `draw`, `probe` and `read` are what `ddp_exercises.tasks.Task` says.
"""

import math
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ddp_course import ring_backend, wire
from ddp_exercises.attempt import COLLECTIVES
from ddp_exercises.errors import Wrong
from ddp_exercises.tasks import load_tasks, task
from manyranks.torch_inside import around, backward_pass

from .shared import (
    ASKS_ALL_RANKS,
    NO_TENSOR,
    RING,
    addresses,
    as_sum,
    fault_of_group,
    in_words,
    moved,
    noted_messages,
    noted_questions,
    noted_ring,
    require,
    tensors,
    unequal_lengths,
    worlds,
)

ONE = load_tasks(1)  # Exercise 1 has a little net.
TorchDDP = torch.nn.parallel.DistributedDataParallel
LOOP = {
    "ranks": 4,
    "forbidden": RING + COLLECTIVES,
    "hang": "does every rank, in every step, send to its right neighbour and receive from its left"
    " one?",
}
LEFT = (
    "you send to the left, to rank - 1; this ring goes to the right, to rank + 1, and receives from"
    " the left"
)
OWN_EVERY_TIME = (
    "every message was your own chunk: after the first step, send on what has just come in"
)
OTHER_LENGTH = (
    "two chunks of different length meet: a buffer is as long as the chunk that comes in, and goes to"
    " the chunk of that number"
)
NO_SUCH_CHUNK = "a chunk is asked for that is not there: is its index taken modulo K?"
TOO_FEW = (
    "there are fewer chunks than ranks: torch.chunk cuts fewer where numbers are few, tensor_split cuts"
    " as many as it is asked for"
)


@task("4.1", "chunk_to_send", {"down to chunk 0": 0.5, "past chunk 0": 0.5})
class ChunkToSend:
    """Which chunk a rank sends in a step of reduce-scatter: rank - step, and K more where that is
    less than 0.
    """

    def draw(random):
        cases = []
        for size in random.sample(range(2, 9), 4):
            for _ in range(3):
                cases.append((random.randrange(size), random.randrange(size - 1), size))
        cases += [(0, 1, 3), (2, 1, 3), (1, 3, 5), (4, 2, 5)]  # Both parts are in every draw.
        for rank, step, size in cases:
            part = "down to chunk 0" if step <= rank else "past chunk 0"
            yield part, f"rank {rank}, step {step}, {size} ranks", (rank, step, size)


@contextmanager
def naming_chunks(group):
    """Raise Wrong, in words, for chunks that do not fit or are not there. Its cause shows the line
    that failed, unless another line is at fault: one that asks for the rank or the number of all
    ranks, not of the `group`, or one that cuts fewer chunks than it has ranks. Yields what asks for
    those of all ranks.
    """
    with noted_questions(group) as asked:
        try:
            with in_words({"must match the size": OTHER_LENGTH, **NO_TENSOR}):
                yield asked
        except IndexError as error:
            if asked:
                raise Wrong(ASKS_ALL_RANKS) from None
            if fewest_chunks(error) < dist.get_world_size(group):
                raise Wrong(TOO_FEW) from None
            raise Wrong(NO_SUCH_CHUNK) from error


def fewest_chunks(error):
    """Return the length of the shortest list of tensors in the function that raised an error;
    infinity if it has none.
    """
    innermost = error.__traceback__
    while innermost.tb_next:
        innermost = innermost.tb_next
    fewest = math.inf
    for value in innermost.tb_frame.f_locals.values():
        if isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
            fewest = min(fewest, len(value))
    return fewest


def draw_chunks(random):
    """Return the lengths of uneven chunks for 3, 4 and 2 ranks, longer ones first, and for each rank
    four rows of whole numbers, whose beginnings fill its chunks.
    """
    length = 12 * random.randrange(1, 3) + random.choice((5, 7))  # No world divides it evenly.
    lengths = {}
    for size in (3, 4, 2):
        chunks = torch.arange(length).tensor_split(size)
        lengths[size] = [len(chunk) for chunk in chunks]
    longest = 16  # Two ranks share at most 31 elements.
    values = [tensors(random, 4, longest, whole=True) for _ in range(4)]
    return {"lengths": lengths, "values": values}


def probe_chunks(function, lengths, values, part, about_finished):
    """Yield what `function(chunks, group)` leaves in the chunks that it finishes and in all
    chunks, and what it sends. One chunk is finished if the `part` is "sums", all of them if it
    is "chunks".
    """
    rank = dist.get_rank()
    rows = values[rank]
    for size, group in worlds(3, 4, 2):
        case = f"with {size} ranks"
        if size == 3:
            try_equal_chunks(function, group)
        chunks = [rows[index][:length].clone() for index, length in enumerate(lengths[size])]
        before = addresses(chunks)
        with noted_messages(group) as (events, astray), naming_chunks(group):
            function(list(chunks), group)
        sent = [event.bytes for event in events if event.kind == "send"]
        finished = torch.cat(chunks)
        if part == "sums":
            index = (rank + 1) % size
            finished = chunks[index]
            of_ranks = [of_rank[index][: len(finished)] for of_rank in values[:size]]
            yield part, f"{case}, {about_finished} as a sum", as_sum(finished, of_ranks)
        yield part, f"{case}, {about_finished}", finished
        yield part, f"{case}, where the chunks are", moved(before, chunks)
        yield "bytes", f"{case}, messages sent", len(sent)
        yield "bytes", f"{case}, bytes sent", sum(sent)
        yield "bytes", f"{case}, messages", fault_of_group(astray)
        yield "bytes", f"{case}, where they go", strangers(events, group)
        yield "bytes", f"{case}, lengths of messages", unequal_lengths(events, group)
        yield "the other chunks", case, torch.cat(chunks)


def try_equal_chunks(function, group):
    """Raise Wrong for faults that three equal chunks on three ranks show: with uneven chunks,
    messages that do not fit may hide them.
    """
    rank, size, left, _ = wire.neighbours(group)
    chunks = []
    for index in range(size):
        chunk = torch.zeros(size, size)
        chunk[rank, index] = 1  # So each number says of which rank and which chunk it was.
        chunks.append(chunk.view(-1))
    events = []
    with wire.observing(events.append), naming_chunks(group):
        function(list(chunks), group)
    require({event.peer for event in events if event.kind == "send"} != {left}, LEFT)
    # An allgather that sends its own chunk twice leaves that of the left neighbour in both others.
    first, second = (chunk for index, chunk in enumerate(chunks) if index != (rank + 1) % size)
    require(not first.equal(second), OWN_EVERY_TIME)
    if len({event.bytes for event in events if event.kind != "span"}) > 1:
        return  # A buffer has another dtype than what comes in: the uneven chunks tell that.
    for index, chunk in enumerate(chunks):
        of_chunks = chunk.view(size, size).sum(0)
        of_chunks[index] = 0
        require(not of_chunks.any(), other_chunk(rank, index, int(of_chunks.argmax())))


def other_chunk(rank, index, other):
    """Return in words that numbers of another chunk have come into a rank's chunk of this index."""
    return (
        f"with three ranks and three equal chunks, numbers of chunk {other} come into rank {rank}'s chunk"
        f" {index}: in each step a rank sends on the chunk that came in before, so its index falls by one,"
        " and what comes in has the index that the left neighbour sends, one less than this rank's"
    )


def strangers(events, group):
    """Return in words that a rank sends to others than its right neighbour; "" if it does not."""
    *_, right = wire.neighbours(group)
    others = {event.peer for event in events if event.kind == "send"} - {right}
    if not others:
        return ""
    return (
        f"it sends to rank {', '.join(map(str, sorted(others)))}: in a ring each rank sends to its right"
        f" neighbour alone, here rank {right}, or links are shared"
    )


@task("4.2", "reduce_scatter", {"sums": 2, "bytes": 1}, every_order="sums", **LOOP)
class ReduceScatter:
    """After K-1 steps rank r holds the sum of chunk r+1, and has sent K-1 chunks."""

    draw = draw_chunks

    def probe(reduce_scatter, lengths, values):
        return probe_chunks(reduce_scatter, lengths, values, "sums", "chunk (rank + 1) mod K")


@task("4.3", "allgather", {"chunks": 1, "bytes": 1}, every_order="chunks", **LOOP)
class AllGather:
    """From rank r's finished chunk r+1 to all chunks everywhere."""

    draw = draw_chunks

    def probe(allgather, lengths, values):
        return probe_chunks(allgather, lengths, values, "chunks", "all chunks after allgather")


SHAPES = {
    "in one row": (23,),
    "a matrix": (5, 7),
    "not contiguous": (6, 4),
    "fewer elements than ranks": (2,),
}


@task("4.4", "ring_all_reduce", {"sums": 1, "any shape": 1, "bytes": 1}, every_order="sums", **LOOP)
class RingAllReduce:
    """Any shape, in place, uneven chunks, 1 to 4 ranks, and no rank sends more than 2 (K-1)
    chunks.
    """

    def draw(random):
        values = {name: tensors(random, 4, *shape, whole=True) for name, shape in SHAPES.items()}
        values["of no elements"] = tensors(random, 4, 0)
        values["in float64"] = tensors(random, 4, 9, dtype=torch.float64, whole=True)
        # No floating-point number has so many digits.
        digits = tensors(random, 4, 9, dtype=torch.int64, whole=True)
        values["of large int64"] = [tensor * 2**50 + tensor for tensor in digits]
        return {"values": values}

    def probe(ring_all_reduce, values):
        for size, group in worlds(3, 4, 2, 1):
            all_events = []
            all_astray = []
            for name, of_all_ranks in values.items():
                tensor = of_all_ranks[dist.get_rank()].clone()
                of_ranks = of_all_ranks[:size]
                if name == "not contiguous":
                    tensor = tensor.t()
                    of_ranks = [of_rank.t() for of_rank in of_ranks]
                before = addresses([tensor])
                with noted_messages(group) as (events, astray), naming_chunks(group) as asked:
                    ring_all_reduce(tensor, group)
                if asked:
                    require(tensor.equal(sum(of_ranks)), ASKS_ALL_RANKS)
                all_events += events
                all_astray += astray
                case = f"{size} ranks, a tensor {name}"
                part = "sums" if name == "in one row" else "any shape"
                if tensor.numel() > size:
                    yield part, f"{case}, as a sum", as_sum(tensor, of_ranks)
                yield part, f"{case}, where it is", moved(before, [tensor])
                yield part, case, tensor
                fault = fault_of_traffic(events, tensor, size)
                yield "bytes", f"{case}, a rank sends", fault
                yield "bytes", f"{case}, where its messages go", strangers(events, group)
            lengths = unequal_lengths(all_events, group)
            yield "bytes", f"{size} ranks, lengths of messages", lengths
            yield "bytes", f"{size} ranks, messages", fault_of_group(all_astray)


def fault_of_traffic(events, tensor, size, left_over=0):
    """Return in words that one of `size` ranks has sent too many bytes or none for a tensor;
    else "". The longest chunk may have `left_over` more numbers than others.
    """
    sent = sum(event.bytes for event in events if event.kind == "send")
    longest_chunk = (math.ceil(tensor.numel() / size) + left_over) * tensor.element_size()
    most = 2 * (size - 1) * longest_chunk
    if sent > most:
        return f"{sent} bytes; 2 (K-1) chunks have at most {most}"
    if sent == 0 and most > 0:
        return "nothing"
    return ""


@task(
    "4.5",
    "step_seconds",
    {"equal cables": 1, "a slow cable": 1},
    forbidden=("ddp_course.lab.measuring.theory.ring", "ddp_course.lab.measuring.theory.seconds"),
)
class StepSeconds:
    """The least over K of c/K + 2(K-1) (latency + p/(K b)), with the K fastest cables, of which b
    is the slowest.
    """

    def draw(random):
        # A row says how many ranks there are, how fast slow cables are beside the others, how long
        # computing takes (in units of 64 p/b, what a ring of many ranks needs), in which order the
        # cables are, and of which unit of seconds the latency is.
        rows = [
            (4, 1, 2, "any", 1e-3),
            (8, 1, 9, "any", 1e-3),
            (1, 1, 1, "any", 1e-3),
            (6, 0.7, 9, "any", 1e-3),
            # Neither the first ranks nor the last ones may be the best in all draws.
            (5, 0.05, 2, "slow first", 1e-3),
            (6, 0.05, 2, "slow last", 1e-3),
            (8, 0.4, 1, "any", 1e-3),
            # Here the slow cables join, whatever else is drawn.
            (6, 0.9, 60, "any", 1e-5),
        ]
        for ranks, speed_of_slow, share, order, unit in rows:
            bits = random.randrange(1, 90) * 10**8
            parameters = random.randrange(1, 400) * 10**6
            slow_ones = 2 if ranks > 5 else 1
            cables = [speed_of_slow * bits] * slow_ones + [bits] * (ranks - slow_ones)
            if order == "any":
                random.shuffle(cables)
            elif order == "slow last":
                cables.reverse()
            latency = random.randrange(1, 90) * unit
            computing = share * 64 * parameters / bits
            rates = ", ".join(f"{cable:.3g}" for cable in cables)
            about = (
                f"cables of {rates} bit/s, {parameters:,} parameters, {1000 * latency:.3g} ms of"
                " latency, seconds"
            )
            part = "equal cables" if len(set(cables)) == 1 else "a slow cable"
            yield part, about, (cables, parameters, latency, computing)


@task(
    "4.6",
    ("the_bug", "mended_ring"),
    {"the line": 1, "mended": 1},
    secret=("the line",),
    every_order="mended",
    **LOOP,
)
class FindTheBugInTheRing:
    """A ring that loses the remainder: line 3 cuts the tensor into chunks, and drops what is left
    over.
    """

    def draw(random):
        uneven = 12 * random.randrange(1, 3) + random.choice((5, 7, 11))  # No world divides it.
        return {
            "values": {
                "even": tensors(random, 4, 24, dtype=torch.float64, whole=True),
                "odd": tensors(random, 4, uneven, whole=True),
                "short": tensors(random, 4, 3, whole=True),
            }
        }

    def probe(the_bug, mended_ring, values):
        yield "the line", "the faulty line", the_bug()
        for size, group in worlds(3, 4, 2):
            for of_ranks in values.values():
                tensor = of_ranks[dist.get_rank()].clone()
                before = addresses([tensor])
                with noted_messages(group) as (events, astray), naming_chunks(group):
                    mended_ring(tensor, group)
                case = f"{size} ranks, {len(tensor)} numbers"
                # The last chunk may have taken all that is left over.
                fault = fault_of_traffic(events, tensor, size, left_over=len(tensor) % size)
                yield "mended", f"{case}, a rank sends", fault
                yield "mended", f"{case}, where its messages go", strangers(events, group)
                yield "mended", f"{case}, lengths of messages", unequal_lengths(events, group)
                yield "mended", f"{case}, messages", fault_of_group(astray)
                yield "mended", f"{case}, where the tensor is", moved(before, [tensor])
                if len(tensor) > size:
                    yield "mended", f"{case}, as a sum", as_sum(tensor, of_ranks[:size])
                yield "mended", case, tensor


NO_TORCH = "torch's own DistributedDataParallel was never called: wrap the model in it, and call what you get"
NOT_CALLED = (
    "all_reduce was never called: torch's class adds up by other means; hand it a group of your backend,"
    " as process_group"
)
NO_BACKEND = (
    "there is no backend of this name yet: ring_backend.register(...) comes before"
    " dist.new_group(backend=...), and both have the same name"
)
BY_HAND = (
    "all_reduce was called outside of a backward pass, so by you: torch's class calls it, if its group is"
    " one of your backend"
)


@contextmanager
def backend_before_group():
    """Raise Wrong, in words, where a group is made in this block before its backend is registered.
    torch refuses that only once: another answer may have registered the name before.
    """
    backends = []

    def new_group(make, *arguments, **named):
        backends.append(named.get("backend"))
        return make(*arguments, **named)

    def register(run, *arguments, **named):
        name, *_ = [*arguments, named.get("name")]
        require(name not in backends, NO_BACKEND)
        return run(*arguments, **named)

    with around(dist, "new_group", new_group), around(ring_backend, "register", register):
        with in_words({"backend": NO_BACKEND}):
            yield


@task(
    "4.7",
    "train_over",
    {"weights": 1, "the ring": 1},
    ranks=4,
    bound=1e-9,
    hang="does every rank make the group, and go through all of its batches?",
)
class TrainOver:
    """torch's DDP over a group of a learner's own: the weights, and who added up."""

    def draw(random):
        count = random.randrange(3, 5)
        return {
            "seed": random.randrange(10**6),
            "batches": [ONE.batches_of(random, count, 4) for _ in range(4)],
            "lr": random.randrange(1, 5) / 10,
        }

    def probe(train_over, seed, batches, lr):
        model, _ = ONE.small_model(seed)
        added, calls = noted_ring(None)
        by_hand = []
        forward_passes = []

        def all_reduce(tensor, group=None):
            if backward_pass() == -1:
                by_hand.append(tensor)
            return added(tensor, group)

        def noted(forward, *arguments, **named):
            forward_passes.append(None)
            return forward(*arguments, **named)

        with around(TorchDDP, "forward", noted), backend_before_group():
            train_over(all_reduce, model, batches[dist.get_rank()], lr)
        require(forward_passes, NO_TORCH)
        require(calls, NOT_CALLED)
        require(not by_hand, BY_HAND)
        yield "weights", "the weights after all steps", ONE.weights(model)
        numbers = sum(numbers for _, numbers in calls)
        yield "the ring", "numbers that all_reduce has added up, in all steps", numbers
