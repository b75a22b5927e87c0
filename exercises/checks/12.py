"""Exercise 12: two levels, a prediction for more ranks, and why two nodes were no faster."""

from itertools import product

import torch.distributed as dist

from ddp_course.checking.attempt import COLLECTIVES
from ddp_course.checking.tasks import task
from ddp_course.running import wire

from .shared import OTHER_ALGORITHMS, require, several, tensors


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
        lengths = (12, 35, 64, 1)
        return {
            "values": {
                f"a tensor of {n} numbers": tensors(random, 4, n, whole=True) for n in lengths
            }
        }

    def probe(two_levels, values):
        rank = dist.get_rank()
        hosts = ((0, 1), (2, 3))
        columns = ((0, 2), (1, 3))
        groups = {ranks: dist.new_group(list(ranks)) for ranks in (*hosts, *columns)}
        inside = hosts[rank // 2]
        between = columns[rank % 2]
        for case, of_ranks in values.items():
            tensor = of_ranks[rank].clone()
            events = []
            with wire.observing(events.append):
                two_levels(tensor, groups[inside], groups[between])
            sent = [(event.peer, event.bytes) for event in events if event.kind == "send"]
            yield "", case, (tensor, sent)

    def read(returned, values):
        for number, case in enumerate(values):
            tensors_of, sent_by = zip(*(of_rank[number] for of_rank in returned), strict=True)
            across = [0, 0]
            for rank, messages in enumerate(sent_by):
                host = rank // 2
                stranger = 3 - rank
                require(
                    stranger not in {peer for peer, _ in messages},
                    f"{case}: rank {rank} sends to rank {stranger}, which is in neither of its"
                    " groups: sum in `inside` and in `between`",
                )
                across[host] += sum(nbytes for peer, nbytes in messages if peer // 2 != host)
            yield "sums", case, dict(enumerate(tensors_of))
            about = f"{case}, bytes across the cable from a host"
            yield "bytes on the cable", about, {rank: across[rank // 2] for rank in range(4)}


def two_measured(latency, bandwidth):
    """The seconds of two ranks for an empty message and for a mebibyte.

    A cluster is kept as these, so whoever looks into `measure` finds no more than it tells.
    """
    return 2 * latency, 2 * latency + 2**20 / bandwidth


def ring_seconds(size, nbytes, empty, mebibyte):
    """The ring's closed form, from two measurements on two ranks."""
    return (size - 1) * empty + 2 * (size - 1) / size * nbytes / 2**20 * (mebibyte - empty)


@task("12.2", "foresee", {"seconds": 2, "cause": 1})
class Foresee:
    """From measurements on 2 to 4 ranks to any number, and which of the two terms is the larger
    one.
    """

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
            asked = []

            def measure(ranks, message, empty=empty, mebibyte=mebibyte, asked=asked):
                asked.append(ranks)
                return ring_seconds(ranks, message, empty, mebibyte)

            pair = f"{size} ranks, {nbytes:,} bytes: return a pair: (seconds, cause)"
            seconds, cause = several(foresee(measure, size, nbytes), 2, pair)
            yield "", number, (seconds, cause, asked)

    def read(returned, cases):
        for case, (seconds, cause, asked) in zip(cases, returned, strict=True):
            empty, mebibyte, nbytes, size = case
            about = f"{size} ranks, {nbytes:,} bytes"
            require(
                len(asked) >= 2,
                f"{about}: one measurement cannot tell latency from bandwidth: two are needed",
            )
            require(
                len(asked) <= 8,
                f"{about}: you measured {len(asked)} times; two to eight are enough",
            )
            require(
                max(asked) <= 4,
                f"{about}: you measured on {max(asked)}; you have four, so predict from these",
            )
            rounded = float(f"{seconds:.6g}") if type(seconds) is float else seconds
            yield "seconds", f"{about}, seconds", rounded
            share = (size - 1) * empty / ring_seconds(size, nbytes, empty, mebibyte)
            yield "cause", f"{about}: {share:.0%} of the time are latencies", cause


def log_of(random, cause, ranks, scale):
    """Lines of a log: one node first, then two. Numbers differ a little from rank to rank, as in
    real logs. Steps of a small model take a tenth of the time, those of a large one ten times as
    long.
    """
    compute = random.uniform(0.15, 0.4)
    data = random.uniform(0.002, 0.006)
    wait = random.uniform(0.01, 0.02)
    batch = random.choice((16, 32, 64))

    def lines(nodes, world_size, batch, compute, data, wait, slow=0.0):
        culprit = random.randrange(ranks * nodes)
        for rank in range(ranks * nodes):
            computing = compute + random.uniform(0, 0.004)
            idle = wait + random.uniform(0, 0.002)
            if rank == culprit:
                computing += slow
            else:
                idle += slow
            # Two launches that do not know of each other both count from 0.
            apart = world_size < ranks * nodes
            shown = rank % ranks if apart else rank
            yield (
                f"nodes={nodes} node={rank // ranks} rank={shown} world_size={world_size} batch_per_rank={batch} "
                f"data={scale * data:.4f} compute={scale * computing:.4f} wait={scale * idle:.4f}"
            )

    before = list(lines(1, ranks, batch, compute, data, wait))
    changed = {
        "apart": {"world_size": ranks},
        "cable": {"wait": wait + compute * random.uniform(0.8, 1.4)},
        "input": {"data": data + compute * random.uniform(0.8, 1.4)},
        "small batch": {"batch": batch // 2, "compute": compute * random.uniform(0.85, 0.95)},
        "straggler": {"slow": compute * random.uniform(0.8, 1.4)},
    }[cause]
    usual = {
        "world_size": 2 * ranks,
        "batch": batch,
        "compute": compute,
        "data": data,
        "wait": wait,
    }
    after = list(lines(2, **{**usual, **changed}))
    return before + random.sample(after, len(after))


LOOK = {
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
        causes = random.sample([*product(LOOK, (0.1, 10.0))], 2 * len(LOOK))
        sizes = (2, 4, 8, 16)
        for number, (cause, scale) in enumerate(causes):
            size = random.choice(sizes)
            part = (
                "what was started" if cause in ("apart", "small batch") else "where the seconds go"
            )
            about = f"log {number}, one node of {size} ranks, then two ({LOOK[cause]})"
            yield part, about, (log_of(random, cause, size, scale),)
