"""Exercise 12: two levels, a prediction for more ranks, and why two nodes were no faster."""

import torch.distributed as dist

from ...running import wire
from . import require, task
from .diagnose import compare_ranks, number, tensors
from .forbidden import COLLECTIVES

HIERARCHICAL = tuple(
    f"ddp_course.collectives.hierarchical.{name}"
    for name in ("hierarchical_all_reduce", "reduce_scatter_among", "allgather_among")
)
HOSTS = {0: 0, 1: 0, 2: 1, 3: 1}  # rank -> host


@task("12.1", "two_levels", ranks=4, forbidden=COLLECTIVES + HIERARCHICAL, private=("values",))
class TwoLevels:
    """Two hosts of two ranks: reduce-scatter inside, all-reduce between, allgather inside."""

    def draw(random, hidden):
        """Whole numbers in tensors of three lengths, one of them odd, and if `hidden` one of a single number."""
        lengths = (12, 35, 64, *([1] if hidden else []))
        return {"values": {f"{n} numbers": tensors(random, 4, n, whole=True) for n in lengths}}

    def probe(two_levels, values):
        """Every rank's tensor afterwards, and what it sent to the other host and to its own."""
        rank, evidence = dist.get_rank(), []
        groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
        inside, between = ((0, 1) if rank < 2 else (2, 3)), ((0, 2) if rank % 2 == 0 else (1, 3))
        for of_ranks in values.values():
            tensor, sent = of_ranks[rank].clone(), []
            with wire.observing(lambda event, sent=sent: sent.append((event.kind, event.peer, event.bytes))):
                two_levels(tensor, groups[inside], groups[between])
            to = {peer: sum(n for kind, other, n in sent if (kind, other) == ("send", peer)) for peer in range(4)}
            evidence.append({"tensor": tensor, "traffic": {"bytes": sum(to.values()), "to": to}})
        return evidence

    def judge_sums(evidence, values):
        """The sum over all four ranks, on all four, in place."""
        for index, (length, of_ranks) in enumerate(values.items()):
            host = [of_ranks[0] + of_ranks[1]] * 2 + [of_ranks[2] + of_ranks[3]] * 2
            lanes = [of_ranks[0] + of_ranks[2], of_ranks[1] + of_ranks[3]] * 2
            guesses = [
                ("the tensor has not changed: the sum must end up in it, in place", of_ranks),
                ("that is the sum of each host: its parts must still be added up between the hosts", host),
                ("that is the sum between the hosts: inside them nothing was added up", lanes),
                ("you have the mean: this one is a sum", [sum(of_ranks) / 4] * 4),
            ]
            found = [evidence[rank][index]["tensor"] for rank in range(4)]
            compare_ranks(found, [sum(of_ranks)] * 4, f"a tensor of {length}", guesses, oracle="the sum")

    def judge_cable(evidence, values):
        """Only p bytes cross the cable in each direction, half of them from each rank."""
        for index, (length, of_ranks) in enumerate(values.items()):
            p, about = 4 * len(of_ranks[0]), f"a tensor of {length}"
            to = [evidence[rank][index]["traffic"]["to"] for rank in range(4)]
            require(any(sum(one.values()) for one in to), f"{about}: nothing was sent over the wire")
            for host in (0, 1):
                across = sum(to[a][b] for a in range(4) for b in range(4) if HOSTS[a] == host != HOSTS[b])
                whole = "each rank sends its whole tensor to the other host; reduce-scatter inside comes first"
                require(across != 2 * p, f"{about}: {across} bytes cross the cable from host {host}: {whole}")
                less = "2 (H-1)/H p, with H = 2 hosts, were expected"
                require(across == p, f"{about}: {across} bytes cross the cable from host {host}; {less}: {p}")

    parts = {"sums": (2, judge_sums), "bytes on the cable": (1, judge_cable)}


def ring_seconds(size, nbytes, latency, bandwidth):
    """The ring's closed form."""
    return 2 * (size - 1) * latency + 2 * (size - 1) / size * nbytes / bandwidth


@task("12.2", "foresee")
class Foresee:
    """From measurements on 2 to 4 ranks to any number."""

    def draw(random, hidden):
        """Networks (latency, bytes a second), each with a message and a number of ranks to foresee."""
        cases = [
            (random.randrange(2, 60) * 1e-6, random.randrange(5, 200) * 1e8, random.randrange(1, 60) * 2**16, size)
            for size in (8, 64, *([1024, 3] if hidden else []))
        ]
        return {"cases": [*cases, (5e-6, 2e10, 2**28, 16), (5e-5, 2e10, 2**12, 256)]}

    def probe(foresee, cases):
        """(seconds, "latency" or "bandwidth", how often it measured) in each case; None where it measured too large."""
        evidence = []
        for latency, bandwidth, nbytes, size in cases:
            asked = []

            def measure(ranks, message, latency=latency, bandwidth=bandwidth, asked=asked):
                asked.append(ranks)
                return ring_seconds(ranks, message, latency, bandwidth)

            evidence.append((foresee(measure, size, nbytes), max(asked, default=0), len(asked)))
        return evidence

    def judge_seconds(evidence, cases):
        """2 (K-1) latencies and 2 (K-1)/K p/b, both found by measuring on at most 4 ranks."""
        for (latency, bandwidth, nbytes, size), (found, largest, count) in zip(cases, evidence, strict=True):
            about = f"{size} ranks, {nbytes:,} bytes"
            require(isinstance(found, tuple | list) and len(found) == 2, f"{about}: return a pair: (seconds, cause)")
            require(largest <= 4, f"{about}: measured on {largest} ranks; you have four, so predict from these")
            require(1 < count <= 8, f"{about}: measured {count} times; two to eight measurements are enough")
            number(found[0], float, f"{about}: the seconds")
            expected = ring_seconds(size, nbytes, latency, bandwidth)
            faults = {
                "that is what 4 ranks take; both terms depend on K": ring_seconds(4, nbytes, latency, bandwidth),
                "that is what 2 ranks take; both terms depend on K": ring_seconds(2, nbytes, latency, bandwidth),
                "the latencies are missing: 2 (K-1) of them": ring_seconds(size, nbytes, 0, bandwidth),
                "in each step travels a K-th of the message": 2 * (size - 1) * (latency + nbytes / bandwidth),
                "that grows in a straight line with K": ring_seconds(2, nbytes, latency, bandwidth)
                + (size - 2) * (ring_seconds(4, nbytes, latency, bandwidth) - ring_seconds(2, nbytes, latency, bandwidth)) / 2,
            }  # fmt: skip
            near = [message for message, wrong in faults.items() if abs(found[0] - wrong) <= 1e-6 * wrong]
            right = abs(found[0] - expected) <= 1e-6 * expected
            require(right or not near, f"{about}: {found[0]:.4g} s; {near[0] if near else ''}")
            require(right, f"{about}: {found[0]:.4g} s; {expected:.4g} s was measured on that many")

    def judge_cause(evidence, cases):
        """Which of the two terms is the larger one."""
        for (latency, bandwidth, nbytes, size), (found, _, _) in zip(cases, evidence, strict=True):
            about = f"{size} ranks, {nbytes:,} bytes"
            latencies = 2 * (size - 1) * latency
            share = latencies / ring_seconds(size, nbytes, latency, bandwidth)
            expected = "latency" if share > 0.5 else "bandwidth"
            require(isinstance(found, tuple | list) and len(found) == 2, f"{about}: return a pair: (seconds, cause)")
            said = f'the cause is "latency" or "bandwidth", not {str(found[1])[:40]!r}'
            require(found[1] in ("latency", "bandwidth"), f"{about}: {said}")
            require(
                found[1] == expected, f"{about}: {share:.0%} of the time are latencies, so the cause is the other one"
            )

    parts = {"seconds": (2, judge_seconds), "cause": (1, judge_cause)}


CAUSES = ("apart", "cable", "input", "small batch", "straggler")


def log_of(random, cause, ranks):
    """Lines of a log: one node first, then two. Numbers differ a little from rank to rank, as they do."""
    compute, data, wait = random.uniform(0.15, 0.4), random.uniform(0.002, 0.006), random.uniform(0.01, 0.02)
    batch = random.choice((16, 32, 64))

    def lines(nodes, world_size, batch, compute, data, wait, slow=0.0):
        culprit = random.randrange(ranks * nodes)
        for rank in range(ranks * nodes):
            mine = compute + slow * (rank == culprit) + random.uniform(0, 0.004)
            idle = wait + slow * (rank != culprit) + random.uniform(0, 0.002)
            shown = rank % ranks if world_size < ranks * nodes else rank
            yield (f"nodes={nodes} node={rank // ranks} rank={shown} world_size={world_size} batch_per_rank={batch} "
                   f"data={data:.4f} compute={mine:.4f} wait={idle:.4f}")  # fmt: skip

    before = list(lines(1, ranks, batch, compute, data, wait))
    changed = {
        "apart": {"world_size": ranks},
        "cable": {"wait": wait + compute * random.uniform(0.8, 1.4)},
        "input": {"data": data + compute * random.uniform(0.8, 1.4)},
        "small batch": {"batch": batch // 2, "compute": compute * random.uniform(0.85, 0.95)},
        "straggler": {"slow": compute * random.uniform(0.8, 1.4)},
    }[cause]
    usual = {"world_size": 2 * ranks, "batch": batch, "compute": compute, "data": data, "wait": wait}
    after = list(lines(2, **{**usual, **changed}))
    return before + random.sample(after, len(after))


@task("12.3", "why_no_faster")
class WhyNoFaster:
    """A log of one node and of two; no speed-up; one cause."""

    def draw(random, hidden):
        """Two logs of each cause, shuffled; larger nodes if `hidden`."""
        causes = random.sample(CAUSES * 2, 2 * len(CAUSES))
        return {
            "logs": [(log_of(random, cause, random.choice((2, 4, 8, *([16] * hidden)))), cause) for cause in causes]
        }

    def probe(why_no_faster, logs):
        """The cause that is named for each log."""
        return [why_no_faster(list(log)) for log, _ in logs]

    def judge_words(evidence, logs, which=CAUSES):
        """Every cause by its word, for the logs that have it."""
        for found, (log, cause) in zip(evidence, logs, strict=True):
            if cause not in which:
                continue
            words = ", ".join(f'"{one}"' for one in CAUSES)
            require(found is not None, "the result is None: is there a `return`?")
            require(found in CAUSES, f"{str(found)[:40]!r} is none of {words}")
            look = {
                "apart": "how many ranks does each one think there are?",
                "cable": "which number has grown on all ranks alike, and is no computing?",
                "input": "look at the seconds before the computing begins",
                "small batch": "how many samples has each rank got, before and after?",
                "straggler": "all but one wait: for whom?",
            }[cause]
            size = log[0].split("world_size=")[1].split()[0]
            require(found == cause, f'one node of {size} ranks, then two: "{found}" is not it; {look}')

    def judge_setup(evidence, logs):
        """What was started wrongly: jobs apart from each other, batches cut in half."""
        WhyNoFaster.judge_words(evidence, logs, ("apart", "small batch"))

    def judge_seconds(evidence, logs):
        """Where the seconds of a step went: the cable, the input, one slow rank."""
        WhyNoFaster.judge_words(evidence, logs, ("cable", "input", "straggler"))

    parts = {"what was started": (1, judge_setup), "where the seconds go": (2, judge_seconds)}
