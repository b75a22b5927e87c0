"""Exercise 12: two levels, a prediction for more ranks, and why two nodes were no faster.

The last task is a figure in words. A task's `draw`, `probe` and `read` are what
`ddp_exercises.tasks.Task` says.
"""

from itertools import product

import torch.distributed as dist

from ddp_course import wire
from ddp_exercises.attempt import COLLECTIVES
from ddp_exercises.tasks import task

from .shared import (
    OTHER_ALGORITHMS,
    as_it_is,
    form_of_explanation,
    nothing,
    require,
    several,
    tensors,
    unequal_lengths,
)


@task(
    "12.1",
    "two_levels",
    {"sums": 2, "bytes on the cable": 1},
    ranks=4,
    forbidden=(*COLLECTIVES, *OTHER_ALGORITHMS),
)
class TwoLevels:
    """Two hosts of two ranks: reduce-scatter inside, all-reduce between, allgather inside."""

    def draw(random):
        values = {}
        for length in (12, 35, 64, 1):
            values[f"a tensor of {length} numbers"] = tensors(random, 4, length, whole=True)
        return {"values": values}

    def probe(two_levels, values):
        rank = dist.get_rank()
        # All ranks make all groups, also those that they are not in.
        hosts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        inside = hosts[rank // 2]
        between = columns[rank % 2]
        for case, of_ranks in values.items():
            tensor = of_ranks[rank].clone()
            events = []
            with wire.observing(events.append):
                two_levels(tensor, inside, between)
            sent = [(event.peer, event.bytes) for event in events if event.kind == "send"]
            yield "", case, (tensor, sent, unequal_lengths(events, dist.group.WORLD))

    def read(returned, values):
        for number, case in enumerate(values):
            sums = {}
            lengths = {}
            across = [0, 0, 0, 0]  # bytes that each rank sends to the other host
            for rank, of_cases in enumerate(returned):
                sums[rank], sent, lengths[rank] = of_cases[number]
                stranger = 3 - rank  # It is on the other host and in the other column.
                for peer, nbytes in sent:
                    require(
                        peer != stranger,
                        f"{case}: rank {rank} sends to rank {stranger}, which is in neither of its"
                        " groups: sum in `inside` and in `between`",
                    )
                    if peer // 2 != rank // 2:
                        across[rank] += nbytes
            yield "sums", case, sums
            about = f"{case}, bytes across the cable from a host"
            of_host = [across[0] + across[1], across[2] + across[3]]
            yield "bytes on the cable", about, {rank: of_host[rank // 2] for rank in range(4)}
            alone = ""
            if 0 in across and any(across) and sums[0].numel() > 1:
                alone = (
                    f"rank {across.index(0)} sends nothing over the cable, its neighbour all: each sends the"
                    " chunk that it holds, or one card carries everything while the other one waits"
                )
            yield "bytes on the cable", f"{case}, who sends", dict.fromkeys(range(4), alone)
            yield "bytes on the cable", f"{case}, lengths of messages", lengths


def two_measured(latency, bandwidth):
    """Return the seconds of two ranks for an empty message and for a mebibyte.

    Inputs have these, not the latency and the bandwidth: whoever looks into `measure` finds no more
    than it tells.
    """
    return 2 * latency, 2 * latency + 2**20 / bandwidth


def ring_seconds(size, nbytes, empty, mebibyte):
    """Return the ring's seconds on any number of ranks, from `two_measured`."""
    latencies = (size - 1) * empty
    return latencies + 2 * (size - 1) / size * nbytes / 2**20 * (mebibyte - empty)


@task(
    "12.2",
    "foresee",
    {"seconds": 2, "cause": 1},
    forbidden=("ddp_course.lab.measuring.theory.ring", "ddp_course.lab.measuring.theory.seconds"),
)
class Foresee:
    """From measurements on 2 to 4 ranks to any number, and which of the two terms is larger."""

    def draw(random):
        cases = []
        for size in (8, 64, 1024, 3):
            latency = random.randrange(2, 60) * 1e-6
            bandwidth = random.randrange(5, 200) * 1e8
            nbytes = random.randrange(1, 60) * 2**16
            cases.append((*two_measured(latency, bandwidth), nbytes, size))
        cases.append((*two_measured(5e-6, 2e10), 2**28, 16))
        cases.append((*two_measured(5e-5, 2e10), 2**12, 256))
        return {"cases": cases}

    def probe(foresee, cases):
        for number, (empty, mebibyte, nbytes, size) in enumerate(cases):
            measure, sizes_measured = cluster(empty, mebibyte)
            pair = f"{size} ranks, {nbytes:,} bytes: return a pair: (seconds, cause)"
            seconds, cause = several(foresee(measure, size, nbytes), 2, pair)
            yield "", number, (seconds, cause, sizes_measured)

    def read(returned, cases):
        for case, (seconds, cause, sizes_measured) in zip(cases, returned, strict=True):
            empty, mebibyte, nbytes, size = case
            about = f"{size} ranks, {nbytes:,} bytes"
            times = len(sizes_measured)
            require(
                times >= 2,
                f"{about}: one measurement cannot tell latency from bandwidth: two are needed",
            )
            require(times <= 8, f"{about}: you measured {times} times; two to eight are enough")
            most = max(sizes_measured)
            require(
                most <= 4,
                f"{about}: you measured on {most}; you have four, so predict from these",
            )
            rounded = float(f"{seconds:.6g}") if type(seconds) is float else seconds
            yield "seconds", f"{about}, seconds", rounded
            share = (size - 1) * empty / ring_seconds(size, nbytes, empty, mebibyte)
            yield "cause", f"{about}: {share:.0%} of the time are latencies", cause


def cluster(empty, mebibyte):
    """Return `measure` on a cluster of which this was measured, and a list of what it is asked.

    The list gets the number of ranks of each measurement.
    """
    sizes_measured = []

    # The defaults are there to be looked into: they are no more than `measure` tells.
    def measure(ranks, nbytes, empty=empty, mebibyte=mebibyte, sizes_measured=sizes_measured):
        sizes_measured.append(ranks)
        return ring_seconds(ranks, nbytes, empty, mebibyte)

    return measure, sizes_measured


def log_of(random, cause, ranks, scale):
    """Return the lines of a log: one node first, then two, which are no faster for this `cause`.

    Steps of a small model (`scale` 0.1) take a tenth of the time, those of a large one (10) ten
    times as long.
    """
    usual = {
        "compute": random.uniform(0.15, 0.4),
        "data": random.uniform(0.002, 0.006),
        "wait": random.uniform(0.01, 0.02),
        "batch": random.choice((16, 32, 64)),
        "scale": scale,
        "ranks": ranks,
    }
    before = lines_of_ranks(random, nodes=1, world_size=ranks, **usual)
    compute = usual["compute"]
    changed = {
        "apart": {"world_size": ranks},
        "cable": {"wait": usual["wait"] + compute * random.uniform(0.8, 1.4)},
        "input": {"data": usual["data"] + compute * random.uniform(0.8, 1.4)},
        "small batch": {
            "batch": usual["batch"] // 2,
            "compute": compute * random.uniform(0.85, 0.95),
        },
        "straggler": {"slow": compute * random.uniform(0.8, 1.4)},
    }
    settings = usual | {"world_size": 2 * ranks} | changed[cause]
    after = lines_of_ranks(random, nodes=2, **settings)
    return before + random.sample(after, len(after))


def lines_of_ranks(random, nodes, ranks, world_size, batch, compute, data, wait, scale, slow=0.0):
    """Return a line of each rank in a step of these seconds.

    One rank is `slow` by so many, and the others wait for it. Numbers differ a little from rank to
    rank, as in real logs.
    """
    straggler = random.randrange(ranks * nodes)
    lines = []
    for rank in range(ranks * nodes):
        computing = compute + random.uniform(0, 0.004)
        waiting = wait + random.uniform(0, 0.002)
        if rank == straggler:
            computing += slow
        else:
            waiting += slow
        # Two launches that do not know of each other both count from 0.
        apart = world_size < ranks * nodes
        shown = rank % ranks if apart else rank
        lines.append(
            f"nodes={nodes} node={rank // ranks} rank={shown} world_size={world_size} batch_per_rank={batch} "
            f"data={scale * data:.4f} compute={scale * computing:.4f} wait={scale * waiting:.4f}"
        )
    return lines


WHERE_TO_LOOK = {
    "apart": "how many ranks does each one think there are?",
    "cable": "which number has grown on all ranks alike, and is no computing?",
    "input": "look at the seconds before the computing begins",
    "small batch": "how many samples has each rank got, before and after?",
    "straggler": "all but one wait: for whom?",
}


@task("12.3", "why_no_faster", {"what was started": 1, "where the seconds go": 2})
class WhyNoFaster:
    """The one cause for which two nodes are no faster than one, from a log of both."""

    def draw(random):
        pairs = list(product(WHERE_TO_LOOK, (0.1, 10.0)))
        for number, (cause, scale) in enumerate(random.sample(pairs, len(pairs))):
            ranks = random.choice((2, 4, 8, 16))
            part = "where the seconds go"
            if cause in ("apart", "small batch"):
                part = "what was started"
            about = f"log {number}, one node of {ranks} ranks, then two ({WHERE_TO_LOOK[cause]})"
            yield part, about, (log_of(random, cause, ranks, scale),)


@task("12.4", "explain_figure", {"text": 1, "ticks": 1})
class ExplainFigure:
    """A figure in the learner's own words, and which points the learner ticks; a teacher reads it."""

    draw = nothing
    probe = as_it_is
    read = form_of_explanation
