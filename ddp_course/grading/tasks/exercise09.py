"""Exercise 9: a sampler with epochs, a learning-rate schedule, a mean over uneven shards."""

import math

import torch
import torch.distributed as dist

from ...stage4_ring import ring_all_reduce
from ..examine import worlds
from . import Wrong, require, task
from .diagnose import compare_numbers, compare_ranks, same

SHARD = ("ddp_course.problems.shard",)


def order_of(size, epoch, seed):
    """The epoch's order, the same on all ranks."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def padded_share(order, rank, world_size):
    """Positions rank, rank + K, … of the order, padded from its beginning."""
    padded = order + order[: -len(order) % world_size]
    return padded[rank::world_size]


@task("9.1", "epoch_indices", forbidden=SHARD)
class EpochIndices:
    """A rank's share of one epoch."""

    def draw(random, hidden):
        """Sizes that do and do not divide by the world size, three epochs each, and a seed."""
        seed = random.randrange(1000)
        shapes = [(24, 3), (25, 4), (10, 4), (7, 1), *([(103, 8)] if hidden else [])]
        return {"cases": [(size, world_size, epoch, seed) for size, world_size in shapes for epoch in (0, 1, 5)]}

    def probe(epoch_indices, cases):
        """The shares of all ranks, with the global generator in a state of its own."""
        evidence = []
        for size, world_size, epoch, seed in cases:
            torch.manual_seed(epoch_indices.__hash__() % 1000)
            shares = [epoch_indices(size, rank, world_size, epoch, seed) for rank in range(world_size)]
            evidence.append([share.tolist() if isinstance(share, torch.Tensor) else share for share in shares])
        return evidence

    def judge(evidence, cases):
        """The order of seed + epoch, padded from its beginning, positions r, r+K, … to rank r."""
        for (size, world_size, epoch, seed), shares in zip(cases, evidence, strict=True):
            about = f"{size} samples, {world_size} ranks, epoch {epoch}"
            shares = [list(share) if isinstance(share, list | tuple) else None for share in shares]
            require(None not in shares, f"{about}: a list of indices was expected")
            judge_shares(about, shares, size, world_size, epoch, seed)


def judge_shares(about, shares, size, world_size, epoch, seed):
    """All ranks' shares of one epoch."""
    order = order_of(size, epoch, seed)
    if shares == [padded_share(order, rank, world_size) for rank in range(world_size)]:
        return
    lengths = [len(share) for share in shares]
    together = [index for share in shares for index in share]
    require(len(set(lengths)) == 1, f"{about}: shares of {lengths} samples; all ranks need equally many, so pad")
    require(all(type(i) is int and 0 <= i < size for i in together), f"{about}: indices go from 0 to {size - 1}")
    first = order_of(size, 0, seed)
    frozen = epoch and shares == [padded_share(first, rank, world_size) for rank in range(world_size)]
    require(not frozen, f"{about}: the order is that of epoch 0: reshuffle with seed + epoch")
    plain = shares == [padded_share(list(range(size)), rank, world_size) for rank in range(world_size)]
    require(not plain, f"{about}: the samples are not shuffled")
    blocks = [
        (order + order[: -size % world_size])[rank * lengths[0] : (rank + 1) * lengths[0]] for rank in range(world_size)
    ]
    require(shares != blocks or world_size == 1, f"{about}: those are blocks; rank r takes positions r, r+K, …")
    require(len(together) >= size, f"{about}: samples are dropped; pad with the first ones of the order instead")
    require(
        set(together) == set(range(size)),
        f"{about}: some samples are in no share: the order must be the same on all ranks, so no rank in the seed",
    )
    raise Wrong(
        f"{about}: not the order that seed + epoch gives: use a generator of your own, seeded with it, and pad from the beginning"
    )


def warmup_cosine(step, warmup, total, peak):
    """Linear to the peak, then half a cosine to zero."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1.0, (step - warmup) / (total - warmup))
    return peak * (1 + math.cos(math.pi * done)) / 2


@task("9.2", "learning_rate")
class LearningRate:
    """Warm-up and cosine."""

    def draw(random, hidden):
        """Warm-up, total and peak, with steps on both sides of every edge."""
        warmup, total, peak = random.randrange(5, 20), random.randrange(60, 200), random.randrange(1, 60) / 10
        steps = [0, 1, warmup - 1, warmup, warmup + 1, (warmup + total) // 2, total - 1, total, total + 10]
        return {"cases": [(step, warmup, total, peak) for step in steps]}

    def probe(learning_rate, cases):
        """The answer for each step."""
        return [learning_rate(*case) for case in cases]

    def judge(evidence, cases):
        """Linear to the peak, half a cosine to zero, and zero from then on."""

        def each(formula):
            return [formula(*case) for case in cases]

        def cosine(step, w, t, p):
            return p * (1 + math.cos(math.pi * min(1.0, max(0.0, (step - w) / (t - w))))) / 2

        faults = {
            "step 0 has a rate already: count from 1 in the warm-up": each(
                lambda s, w, t, p: p * s / w if s < w else cosine(s, w, t, p)
            ),
            "there is no warm-up": each(cosine),
            "the cosine starts after the warm-up, not at step 0": each(
                lambda s, w, t, p: p * (s + 1) / w if s < w else p * (1 + math.cos(math.pi * min(1.0, s / t))) / 2
            ),
            "half a wave goes from 1 to 0: (1 + cos) / 2": each(
                lambda s, w, t, p: p * (s + 1) / w if s < w else 2 * cosine(s, w, t, p) - p
            ),
            "after the last step the rate stays at 0; it does not rise again": each(
                lambda s, w, t, p: p * (s + 1) / w if s < w else p * (1 + math.cos(math.pi * (s - w) / (t - w))) / 2
            ),
            "the rate stays at the peak after the warm-up": each(lambda s, w, t, p: p * min(1.0, (s + 1) / w)),
            "that is a straight line down; half a cosine was asked for": each(
                lambda s, w, t, p: p * (s + 1) / w if s < w else p * (1 - min(1.0, (s - w) / (t - w)))
            ),
            "the peak is missing: multiply by it": each(lambda s, w, t, p: warmup_cosine(s, w, t, 1.0)),
        }
        about = [f"step {s}, warm-up {w}, total {t}, peak {p}" for s, w, t, p in cases]
        compare_numbers(evidence, [float(one) for one in each(warmup_cosine)], about, faults)


@task("9.3", "global_mean", ranks=4)
class GlobalMean:
    """The mean over all samples, from means over uneven shards."""

    def draw(random, hidden):
        """Each rank's mean and number of samples; one rank has none (not always the same if `hidden`)."""
        counts = [random.randrange(20, 40), random.randrange(1, 9), 0, random.randrange(9, 20)]
        return {
            "means": [random.uniform(0.5, 4.0) for _ in range(4)],
            "counts": random.sample(counts, 4) if hidden else counts,
        }

    def probe(global_mean, means, counts):
        """Every rank's result, its input afterwards, and how often it called all_reduce."""
        evidence = {}
        for size, group in worlds(4, 3, 2):
            rank, calls = dist.get_rank(), []
            mean = torch.tensor(means[rank] if counts[rank] else float("nan"), dtype=torch.float64)

            def all_reduce(tensor, group=group, calls=calls):
                calls.append(tensor.numel())
                return ring_all_reduce(tensor, group)

            result = global_mean(mean, counts[rank], all_reduce)
            evidence[size] = {"result": result, "calls": len(calls), "mean": mean}
        return evidence

    def judge(evidence, means, counts):
        """The mean over all samples on every rank, also where a rank without any has the mean 0/0."""
        for size in (4, 3, 2):
            n, m = counts[:size], means[:size]
            about = f"with {size} ranks of {n} samples"
            found = [evidence[rank][size]["result"] for rank in range(size)]
            require(
                evidence[0][size]["calls"], f"{about}: all_reduce was not called: every rank knows only its own shard"
            )
            found = [
                one if isinstance(one, torch.Tensor) or one is None else torch.tensor(one, dtype=torch.float64)
                for one in found
            ]
            require(
                not any(one is not None and one.isnan().any() for one in found),
                f"{about}: the result is not a number: a rank without samples has the mean 0/0, which 0 times it does not cure",
            )
            weighted = sum(k * v for k, v in zip(n, m, strict=True) if k)
            live = [v for k, v in zip(n, m, strict=True) if k]

            def as_tensors(value, size=size):
                return [torch.tensor(value, dtype=torch.float64)] * size

            guesses = [
                (
                    "that is the mean of the ranks' means: weight each by its number of samples",
                    as_tensors(sum(live) / size),
                ),
                (
                    "that is the mean of the ranks' means: weight each by its number of samples",
                    as_tensors(sum(live) / len(live)),
                ),
                ("that is the sum over all samples: divide by their number", as_tensors(weighted)),
                ("that is divided by the ranks; divide by the number of all samples", as_tensors(weighted / size)),
                ("that is each rank's own mean", [torch.tensor(v, dtype=torch.float64) for v in m]),
            ]
            expected = as_tensors(weighted / sum(n))
            compare_ranks(
                [
                    one.reshape(()).double() if isinstance(one, torch.Tensor) and one.numel() == 1 else one
                    for one in found
                ],
                expected,
                about,
                guesses,
                1e-6,
                "the mean of all samples",
            )
            for rank in range(size):
                kept = evidence[rank][size]["mean"]
                require(
                    not n[rank] or same(kept, torch.tensor(m[rank], dtype=torch.float64)),
                    f"{about}: the input was changed (aliasing): work on a copy",
                )
