"""Exercise 4: the ring, from the index of a chunk to an all-reduce of any shape."""

import torch

from ...running import wire
from ..probing import traffic_of, worlds
from . import Wrong, require, task
from .diagnose import check_line, compare_numbers, compare_ranks, number, tensors
from .forbidden import COLLECTIVES, RING


@task("4.1", "chunk_to_send")
class ChunkToSend:
    """Which chunk a rank sends in a step of reduce-scatter."""

    def draw(random, hidden):
        """(rank, step, world size) for four world sizes up to 8, and some that pass chunk 0 or stay above it."""
        sizes = random.sample(range(2, 9), 4)
        drawn = [(random.randrange(k), random.randrange(k - 1), k) for k in sizes for _ in range(3)]
        return {"cases": [*drawn, (0, 1, 3), (2, 1, 3), (1, 3, 5), (4, 2, 5)]}

    def probe(chunk_to_send, cases):
        """The answer in each case."""
        return [chunk_to_send(*case) for case in cases]

    def judge_falling(evidence, cases):
        """rank - step, a plain int, as long as that is a chunk."""
        check_indices(evidence, cases, [step <= rank for rank, step, _ in cases])

    def judge_round(evidence, cases):
        """K more, where rank - step is less than 0."""
        check_indices(evidence, cases, [step > rank for rank, step, _ in cases])

    parts = {"down to chunk 0": (0.5, judge_falling), "past chunk 0": (0.5, judge_round)}


def check_indices(evidence, cases, chosen):
    """(rank - step) mod K in the `chosen` cases."""
    for (rank, step, size), found, counts in zip(cases, evidence, chosen, strict=True):
        number(found, int, "the index")
        inside = f"rank {rank}, step {step}: {found}, but chunks go from 0 to {size - 1}: take it modulo the world size"
        require(0 <= found < size or not counts, inside)
    faults = {
        "what came from the left is sent on, so the index falls with every step": [(r + s) % k for r, s, k in cases],
        "that is allgather; in reduce-scatter rank r starts with chunk r": [(r + 1 - s) % k for r, s, k in cases],
        "a rank does not always send its own chunk: it passes on what came in": [r for r, _, _ in cases],
    }
    about = [f"rank {rank}, step {step}, {size} ranks" for rank, step, size in cases]
    expected = [(r - s) % k for r, s, k in cases]
    compare_numbers(evidence, expected, about, faults, "as the chunk's index", chosen)


def probe_chunks(function, lengths, values):
    """Run a function on every rank's chunks, in worlds of 2 to 4 ranks: chunks after it, and the traffic."""
    evidence = {}
    for size, group in worlds(*lengths):
        rank = torch.distributed.get_rank()
        if size == 3:
            evidence["equal chunks"] = goes_to_the_right(function, [one[:4].clone() for one in values[rank][:3]], group)
        chunks = [values[rank][index][:length].clone() for index, length in enumerate(lengths[size])]
        with wire.counting() as traffic:
            returned = function(chunks, group)
        evidence[size] = {"chunks": chunks, "returned": type(returned).__name__, "traffic": traffic_of(traffic)}
    return evidence


def goes_to_the_right(function, chunks, group):
    """The traffic of a function with three equal chunks; Wrong if it all goes to the left.

    With unequal ones all that is seen of a ring that turns the other way may be a message that does not fit.
    """
    _, _, left, _ = wire.neighbours(group)
    events = []
    with wire.counting() as traffic, wire.observing(events.append):
        function(chunks, group)
    if {event.peer for event in events if event.kind == "send"} == {left}:
        raise Wrong(
            "you send to the left, to rank - 1; this ring goes to the right, to rank + 1, and receives from the left"
        )
    return {"traffic": traffic_of(traffic)}


def chunk_lengths(random):
    """For 2, 3 and 4 ranks the lengths of the chunks of a tensor that they cannot share equally, longer ones first."""
    odd = 12 * random.randrange(1, 3) + random.choice((5, 7))
    return {size: [len(chunk) for chunk in torch.arange(odd).tensor_split(size)] for size in (3, 4, 2)}


@task("4.2", "reduce_scatter", ranks=4, forbidden=RING + COLLECTIVES, private=("values",))
class ReduceScatter:
    """After K-1 steps rank r holds the sum of chunk r+1."""

    def draw(random, hidden):
        """Lengths of uneven chunks for 2, 3 and 4 ranks, and whole numbers to fill them with."""
        return {"lengths": chunk_lengths(random), "values": [tensors(random, 4, 16, whole=True) for _ in range(4)]}

    def probe(reduce_scatter, lengths, values):
        """Every rank's chunks after it, and what it sent."""
        return probe_chunks(reduce_scatter, lengths, values)

    def judge_sums(evidence, lengths, values):
        """Chunk r+1 is finished on rank r."""
        for size, of in lengths.items():
            finished = [(rank + 1) % size for rank in range(size)]
            sums = [sum(values[peer][i][: of[i]] for peer in range(size)) for i in range(size)]
            found = [evidence[rank][size]["chunks"] for rank in range(size)]
            about = f"with {size} ranks, chunk (rank + 1) mod K"
            own = [values[rank][i][: of[i]] for rank, i in enumerate(finished)]
            came_in = [values[i][i][: of[i]] for i in finished]
            missing = [partial(values, of, i, rank, size) for rank, i in enumerate(finished)]
            cut = [torch.cat([sums[i][: min(of)], values[rank][i][min(of) : of[i]]]) for rank, i in enumerate(finished)]
            guesses = [
                ("the last number of a longer chunk is still the rank's own: chunks differ in length", cut),
                ("it is still the rank's own: in each of K-1 steps, add what comes in to the chunk itself", own),
                ("it was overwritten with what came in: add to it", came_in),
                ("one rank's part is missing: are there K-1 steps?", missing),
            ]
            wrong = {rank for rank, i in enumerate(finished) if not torch.equal(found[rank][i], sums[i])}
            turned = wrong and wrong <= {
                rank for rank in range(size) if finished_elsewhere(found[rank], sums, finished[rank])
            }
            other_way = "the chunks go round from another start or the other way"
            require(not turned, f"{about} is not finished, but another one is: {other_way}")
            mine = [chunks[i] for chunks, i in zip(found, finished, strict=True)]
            compare_ranks(mine, [sums[i] for i in finished], about, guesses, oracle="the sum")

    def judge_bytes(evidence, lengths, values):
        """K-1 messages of a chunk each."""
        for size, of in lengths.items():
            check_ring_traffic(evidence, size, of, start=0, what="reduce-scatter")

    parts = {"sums": (2, judge_sums), "bytes": (1, judge_bytes)}


def finished_elsewhere(chunks, sums, index):
    """Whether another chunk than `index` has become the sum."""
    return any(i != index and torch.equal(chunks[i], one) for i, one in enumerate(sums))


def partial(values, of, index, rank, size):
    """The sum of a chunk after one step too few."""
    return sum(values[(rank - back) % size][index][: of[index]] for back in range(size - 1))


def check_ring_traffic(evidence, size, of, start, what):
    """K-1 messages a rank, a chunk each: chunk (rank + start - step) in step 0, 1, …"""
    for rank in range(size):
        sent = evidence[rank][size]["traffic"]
        expected = sum(4 * of[(rank + start - step) % size] for step in range(size - 1))
        whole = 4 * sum(of) * (size - 1)
        require(
            sent["bytes"] > 0, f"{what} sent nothing over the wire: use wire.exchange, so that the bytes are counted"
        )
        require(sent["bytes"] != whole, f"{what} sends whole tensors: in each step only one chunk travels")
        require(
            sent["bytes"] == expected,
            f"{what} with {size} ranks: rank {rank} sent {sent['bytes']} bytes in {sent['messages']} messages; {expected} bytes in {size - 1} were expected",
        )


@task("4.3", "allgather", ranks=4, forbidden=RING + COLLECTIVES, private=("values",))
class AllGather:
    """From rank r's finished chunk r+1 to all chunks everywhere."""

    def draw(random, hidden):
        """Lengths of uneven chunks for 2, 3 and 4 ranks, and whole numbers to fill them with."""
        return {"lengths": chunk_lengths(random), "values": [tensors(random, 4, 16, whole=True) for _ in range(4)]}

    def probe(allgather, lengths, values):
        """Every rank's chunks after it, and what it sent."""
        return probe_chunks(allgather, lengths, values)

    def judge_chunks(evidence, lengths, values):
        """Every chunk everywhere is that of the rank that had finished it."""
        for size, of in lengths.items():
            about = f"with {size} ranks, all chunks after allgather"
            finished = [values[(i - 1) % size][i][: of[i]] for i in range(size)]
            own = [flat(values[rank], of) for rank in range(size)]
            added = [torch.cat([passed_on(values, of, i, rank, size) for i in range(size)]) for rank in range(size)]
            late = [
                torch.cat([values[r][i][: of[i]] if i == (r + 2) % size else finished[i] for i in range(size)])
                for r in range(size)
            ]
            from_rank = [torch.cat([values[i][i][: of[i]] for i in range(size)])] * size
            guesses = [
                ("nothing has changed: what comes in must be kept, in place", own),
                ("they were added up: what comes in is finished, so keep it as it is", added),
                ("one chunk is still the rank's own: are there K-1 steps?", late),
                ("chunk r was taken from rank r, but rank r has finished chunk r+1", from_rank),
            ]
            found = [torch.cat(evidence[rank][size]["chunks"]) for rank in range(size)]
            compare_ranks(found, [torch.cat(finished)] * size, about, guesses, oracle="the finished chunks")

    def judge_bytes(evidence, lengths, values):
        """K-1 messages, each a chunk that was finished already."""
        for size, of in lengths.items():
            check_ring_traffic(evidence, size, of, start=1, what="allgather")

    parts = {"chunks": (1, judge_chunks), "bytes": (1, judge_bytes)}


def passed_on(values, of, index, rank, size):
    """A chunk on a rank when everyone adds what comes in from its owner on."""
    owner = (index - 1) % size
    return sum(values[(owner + back) % size][index][: of[index]] for back in range((rank - owner) % size + 1))


def flat(chunks, of):
    """The chunks of one rank as one tensor."""
    return torch.cat([chunk[:length] for chunk, length in zip(chunks, of, strict=False)])


SHAPES = {"in one row": (23,), "a matrix": (5, 7), "not contiguous": (6, 4), "fewer elements than ranks": (2,)}


@task("4.4", "ring_all_reduce", ranks=4, forbidden=RING + COLLECTIVES, private=("values",))
class RingAllReduce:
    """Any shape, in place, uneven chunks, 1 to 4 ranks."""

    def draw(random, hidden):
        """Tensors of several shapes; if `hidden` in float64, and one of no elements."""
        shapes = {**SHAPES, "of no elements": (0,)} if hidden else SHAPES
        dtype = torch.float64 if hidden else torch.float32
        return {"values": {name: tensors(random, 4, *shape, dtype=dtype, whole=True) for name, shape in shapes.items()}}

    def probe(ring_all_reduce, values):
        """Every rank's tensor afterwards, and what it sent, in worlds of 1 to 4 ranks."""
        evidence = {}
        for size, group in worlds(3, 4, 2, 1):
            for name, of_ranks in values.items():
                tensor = of_ranks[torch.distributed.get_rank()].clone()
                tensor = tensor.t() if name == "not contiguous" else tensor
                with wire.counting() as traffic:
                    ring_all_reduce(tensor, group)
                evidence[size, name] = {"tensor": tensor, "traffic": traffic_of(traffic)}
        return evidence

    def judge_sums(evidence, values):
        """The sum of tensors that K ranks share without effort, on every rank, in place."""
        check_sums(evidence, values, {"in one row"})

    def judge_shapes(evidence, values):
        """The sum, in place, of tensors of other shapes, strides and sizes."""
        check_sums(evidence, values, set(values) - {"in one row"})

    def judge_bytes(evidence, values):
        """2 (K-1) p bytes in all."""
        for size in (3, 4, 2):
            for name, of_ranks in values.items():
                check_all_reduce_traffic(evidence, size, name, of_ranks[0])

    parts = {"sums": (1, judge_sums), "any shape": (1, judge_shapes), "bytes": (1, judge_bytes)}


def check_sums(evidence, values, names):
    """The sum on all ranks, of the tensors with these names, in worlds of 1 to 4 ranks."""
    for size in (3, 4, 2, 1):
        for name in (name for name in values if name in names):
            turned = [one.t() if name == "not contiguous" else one for one in values[name][:size]]
            found = [evidence[rank][size, name]["tensor"] for rank in range(size)]
            guesses = [
                ("the tensor has not changed: the sum must end up in the tensor itself, in place", turned),
                ("you have the mean: this one is a sum, the division comes later", [sum(turned) / size] * size),
                ("each rank has one finished chunk: allgather gives it to the others", half_way(turned)),
                (
                    "the last numbers are still the rank's own: cut the tensor so that none is left over",
                    cut_short(turned),
                ),
            ]
            about = f"{size} ranks, a tensor {name}"
            compare_ranks(found, [sum(turned)] * size, about, guesses, oracle="the sum")


def half_way(tensors):
    """What K tensors are after reduce-scatter: of chunk c, rank r has the sum from rank c to rank r."""
    size, chunks = len(tensors), [one.contiguous().view(-1).tensor_split(len(tensors)) for one in tensors]
    sums = [
        [sum(chunks[(c + step) % size][c] for step in range((rank - c) % size + 1)) for c in range(size)]
        for rank in range(size)
    ]
    return [torch.cat(of_rank).view(tensors[0].shape) for of_rank in sums]


def cut_short(tensors):
    """What K tensors are if K chunks of equal length are summed, and a rest is left as it was."""
    flats = [one.contiguous().view(-1) for one in tensors]
    kept = len(flats[0]) - len(flats[0]) % len(flats)
    return [torch.cat([sum(flats)[:kept], one[kept:]]).view(tensors[0].shape) for one in flats]


def check_all_reduce_traffic(evidence, size, name, tensor):
    """2(K-1) chunks a rank, a little more or less where they are uneven."""
    counts = [evidence[rank][size, name]["traffic"] for rank in range(size)]
    whole = tensor.numel() * tensor.element_size()
    total, expected = sum(count["bytes"] for count in counts), 2 * (size - 1) * whole
    if whole == 0:
        return
    require(total > 0, "nothing was sent over the wire: use wire.exchange, so that the bytes are counted")
    require(
        total != size * (size - 1) * whole or total == expected,
        f"{size} ranks: whole tensors travel; cut them into K chunks",
    )
    require(
        total == expected,
        f"{size} ranks, a tensor {name}: {total} bytes were sent in all; 2 (K-1) p = {expected} were expected",
    )


@task("4.5", "ring_seconds")
class RingSeconds:
    """The closed form: 2(K-1)/K p/b and 2(K-1) latencies."""

    def draw(random, hidden):
        """World sizes (1 among them), numbers of parameters, bits per second, without a latency and with one."""
        drawn = [
            (
                random.randrange(2, 65),
                random.randrange(1, 400) * 10**6,
                random.randrange(1, 100) * 10**8,
                random.randrange(1, 90) * 1e-5,
            )
            for _ in range(5)
        ]
        drawn.append((1, 10**6, 10**9, 1e-3))
        return {"cases": [(*link, latency) for *link, waits in drawn for latency in (0.0, waits)]}

    def probe(ring_seconds, cases):
        """The answer in each case."""
        return [ring_seconds(*case) for case in cases]

    def judge_transfer(evidence, cases):
        """2 (K-1)/K p/b, in seconds, where no message waits."""
        check_ring_seconds(evidence, cases, [latency == 0 for *_, latency in cases])

    def judge_latencies(evidence, cases):
        """2 (K-1) latencies more than without one, however long that takes."""
        for found in evidence:
            number(found, float, "the time")
        added = [more - without for without, more in zip(evidence[::2], evidence[1::2], strict=True)]
        due = [2 * (size - 1) * latency for size, _, _, latency in cases[1::2]]
        good = [abs(one - other) <= 1e-7 for one, other in zip(added, due, strict=True)]
        check_ring_seconds(evidence, cases, [chosen for one in good for chosen in (False, not one)])

    parts = {"transfer": (0.5, judge_transfer), "latencies": (0.5, judge_latencies)}


def check_ring_seconds(evidence, cases, chosen):
    """2 (K-1)/K p/b and 2 (K-1) latencies in the `chosen` cases."""
    for found in evidence:
        number(found, float, "the time")
    terms = [(2 * (k - 1) / k, p * 32 / b, 2 * (k - 1) * latency) for k, p, b, latency in cases]
    expected = [share * seconds + waits for share, seconds, waits in terms]
    faults = {
        "the link carries bits, and a byte has eight": [share * s / 8 + waits for share, s, waits in terms],
        "a float32 has four bytes": [share * s / 4 + waits for share, s, waits in terms],
        "where are the 2 (K-1) latencies?": [share * s for share, s, _ in terms],
        "every step pays a latency, and there are 2 (K-1) steps": [
            share * s + latency for (share, s, _), (*_, latency) in zip(terms, cases, strict=True)
        ],
        "that is reduce-scatter alone; allgather comes after it": [one / 2 for one in expected],
        "that is the whole-gradient ring: in each step only 1/K of the gradient travels": [
            2 * (k - 1) * s + waits for (_, s, waits), (k, *_) in zip(terms, cases, strict=True)
        ],
        "that is K steps a half; K-1 are enough": [
            2 * s + 2 * k * latency for (_, s, _), (k, *_, latency) in zip(terms, cases, strict=True)
        ],
    }
    about = [f"{k} ranks, {p:,} parameters, {b:,} bit/s, latency {latency:g} s" for k, p, b, latency in cases]
    compare_numbers(evidence, expected, about, faults, "s", chosen)


RING_LINES = {
    2: "that line only asks who the neighbours are",
    4: "the buffer is as long as the longest chunk: right",
    6: "the first half sends the right chunks",
    7: "only as much of the buffer is used as the chunk needs: right",
    8: "adding is right here",
    10: "the second half sends the right chunks",
    11: "a finished chunk is kept as it is: right",
}


@task("4.6", ("the_bug", "mended_ring"), ranks=4, forbidden=RING + COLLECTIVES, private=("values",))
class FindTheBugInTheRing:
    """A ring that loses the remainder."""

    def draw(random, hidden):
        """Rows whose lengths 2, 3 and 4 ranks can and cannot share equally; if `hidden` in float64 too."""
        lengths = {"even": 24, "odd": 12 * random.randrange(1, 3) + random.choice((5, 7, 11)), "short": 3}
        dtype = torch.float64 if hidden else torch.float32
        return {"values": {name: tensors(random, 4, n, dtype=dtype, whole=True) for name, n in lengths.items()}}

    def probe(the_bug, mended_ring, values):
        """The line that is named, and every rank's tensors afterwards, in worlds of 2 to 4 ranks."""
        evidence = {"line": the_bug()}
        for size, group in worlds(3, 4, 2):
            for name, of_ranks in values.items():
                tensor = of_ranks[torch.distributed.get_rank()].clone()
                mended_ring(tensor, group)
                evidence[size, name] = tensor
        return evidence

    def judge_line(evidence, values):
        """Line 3 cuts the tensor into chunks, and drops what is left over."""
        check_line(evidence[0]["line"], 3, RING_LINES)

    def judge_mended(evidence, values):
        """The sum of every number on every rank, whatever the length."""
        for size in (3, 4, 2):
            for name, of_ranks in values.items():
                of_ranks, total = of_ranks[:size], sum(of_ranks[:size])
                kept = len(total) - len(total) % size
                lost = [torch.cat([total[:kept], one[kept:]]) for one in of_ranks]
                guesses = [
                    (f"the last {len(total) % size} numbers are still the rank's own", lost),
                    ("the tensor has not changed", of_ranks),
                ]
                found = [evidence[rank][size, name] for rank in range(size)]
                compare_ranks(found, [total] * size, f"{size} ranks, {len(total)} numbers", guesses, oracle="the sum")

    parts = {"the line": (1, judge_line), "mended": (1, judge_mended)}
