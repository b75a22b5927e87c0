"""Exercise 10: a sampler with epochs, a learning-rate schedule, a mean over uneven shards."""

import math

import torch
import torch.distributed as dist

from ...stage4_ring import ring_all_reduce
from ..probing import worlds
from . import Wrong, require, task
from .diagnose import check_line, compare_numbers, compare_ranks, same

SHARD = ("ddp_course.problems.shard",)


def order_of(size, epoch, seed):
    """The epoch's order, the same on all ranks."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def padded_share(order, rank, world_size):
    """Positions rank, rank + K, … of the order, padded from its beginning."""
    padded = order + order[: -len(order) % world_size]
    return padded[rank::world_size]


@task("10.1", "epoch_indices", forbidden=SHARD)
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

    def judge_even(evidence, cases):
        """The order of seed + epoch, positions r, r+K, … to rank r, where all ranks get equally many."""
        check_shares(evidence, cases, even=True)

    def judge_uneven(evidence, cases):
        """And where they do not: padded from the beginning of the order."""
        check_shares(evidence, cases, even=False)

    parts = {"even shares": (1, judge_even), "uneven sizes": (1, judge_uneven)}


def check_shares(evidence, cases, even):
    """The shares in those cases in which the samples can (or cannot) be shared evenly."""
    for (size, world_size, epoch, seed), shares in zip(cases, evidence, strict=True):
        if even == (size % world_size == 0):
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
        f"{about}: some samples are in no share: all ranks must draw the same order, each from a generator of its own, "
        "seeded without the rank",
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


@task("10.2", "learning_rate")
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

    def judge_warm_up(evidence, cases):
        """Linear to the peak, from the first step on."""
        check_rates(evidence, cases, lambda step, warmup: step <= warmup)

    def judge_cosine(evidence, cases):
        """Half a cosine to zero, and zero from then on."""
        check_rates(evidence, cases, lambda step, warmup: step > warmup)

    parts = {"warm-up": (1, judge_warm_up), "cosine": (1, judge_cosine)}


def after_warm_up(cool_down):
    """A formula that is right in the warm-up, and `cool_down(step - warmup, total - warmup, peak)` after it."""
    return lambda s, w, t, p: p * (s + 1) / w if s < w else cool_down(s - w, t - w, p)


def half_wave(done, whole, peak):
    """Half a cosine, from the peak to zero, and zero from then on."""
    return peak * (1 + math.cos(math.pi * min(1.0, max(0.0, done / whole)))) / 2


RATE_FAULTS = {
    "step 0 has a rate already: count from 1 in the warm-up": lambda s, w, t, p: (
        p * s / w if s < w else half_wave(s - w, t - w, p)
    ),
    "there is no warm-up": lambda s, w, t, p: half_wave(s - w, t - w, p),
    "the cosine starts after the warm-up, not at step 0": lambda s, w, t, p: (
        p * (s + 1) / w if s < w else half_wave(s, t, p)
    ),
    "half a wave goes from 1 to 0: (1 + cos) / 2": after_warm_up(lambda n, m, p: 2 * half_wave(n, m, p) - p),
    "after the last step the rate stays at 0; it does not rise again": after_warm_up(
        lambda n, m, p: p * (1 + math.cos(math.pi * n / m)) / 2
    ),
    "the rate stays at the peak after the warm-up": after_warm_up(lambda n, m, p: p),
    "that is a straight line down; half a cosine was asked for": after_warm_up(
        lambda n, m, p: p * (1 - min(1.0, n / m))
    ),
    "the peak is missing: multiply by it": lambda s, w, t, p: warmup_cosine(s, w, t, 1.0),
}


def check_rates(evidence, cases, which):
    """The rates of those steps for which `which(step, warmup)` is true."""
    pairs = [(found, case) for found, case in zip(evidence, cases, strict=True) if which(case[0], case[1])]
    faults = {message: [float(formula(*case)) for _, case in pairs] for message, formula in RATE_FAULTS.items()}
    expected = [float(warmup_cosine(*case)) for _, case in pairs]
    about = ["step {}, warm-up {}, total {}, peak {}".format(*case) for _, case in pairs]
    compare_numbers([found for found, _ in pairs], expected, about, faults)


@task("10.3", "global_mean", ranks=4, private=("means", "counts"))
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

    def judge_mean(evidence, means, counts):
        """The mean over all samples on every rank, where each has some; inputs unchanged."""
        check_means(evidence, means, counts, lambda counts: 0 not in counts)

    def judge_empty(evidence, means, counts):
        """The mean over all samples on every rank, also where one without any has the mean 0/0."""
        check_means(evidence, means, counts, lambda counts: 0 in counts)

    parts = {"mean": (1, judge_mean), "a rank without samples": (1, judge_empty)}


def check_means(evidence, means, counts, which):
    """The means in those worlds for whose counts `which` is true."""
    for size in [size for size in (4, 3, 2) if which(counts[:size])] or (4, 3, 2):
        n, m, about = counts[:size], means[:size], f"with {size} ranks of {counts[:size]} samples"
        found = [as_scalar(evidence[rank][size]["result"]) for rank in range(size)]
        called = evidence[0][size]["calls"]
        require(called, f"{about}: all_reduce was not called: every rank knows only its own shard")
        odd = any(isinstance(one, torch.Tensor) and one.isnan().any() for one in found)
        cure = "a rank without samples has the mean 0/0, which 0 times it does not cure"
        require(not odd, f"{about}: the result is not a number: {cure}")
        weighted, live = sum(k * v for k, v in zip(n, m, strict=True) if k), [v for k, v in zip(n, m, strict=True) if k]
        ranks_mean = "that is the mean of the ranks' means: weight each by its number of samples"
        guesses = [
            (ranks_mean, as_tensors(sum(live) / size, size)),
            (ranks_mean, as_tensors(sum(live) / len(live), size)),
            ("that is the sum over all samples: divide by their number", as_tensors(weighted, size)),
            ("that is divided by the ranks; divide by the number of all samples", as_tensors(weighted / size, size)),
            (
                "the sum is divided by the rank's own number: divide by that of all",
                [torch.tensor(weighted / max(1, k), dtype=torch.float64) for k in n],
            ),
            ("that is each rank's own mean", [torch.tensor(v, dtype=torch.float64) for v in m]),
        ]
        compare_ranks(found, as_tensors(weighted / sum(n), size), about, guesses, 1e-6, "the mean of all samples")
        kept = [same(evidence[r][size]["mean"], as_tensors(m[r], 1)[0]) for r in range(size) if n[r]]
        require(all(kept), f"{about}: the input was changed (aliasing): work on a copy")


def as_scalar(result):
    """A plain number, or a tensor of one, as a float64 tensor without dimensions; all else as it is."""
    if isinstance(result, torch.Tensor) and result.numel() == 1:
        return result.reshape(()).double()
    return torch.tensor(result, dtype=torch.float64) if type(result) in (int, float) else result


def as_tensors(value, size):
    """The same number for each of `size` ranks."""
    return [torch.tensor(value, dtype=torch.float64)] * size


SAMPLER_LINES = {
    2: "the generator is seeded as it was before the stop, on all ranks alike: right",
    3: "the order is that of the epoch: right, or nobody would know what was seen",
    5: "filling up is right, for whatever is left",
    6: "dealing out is right",
}


@task("10.4", ("the_bug", "rest_of_epoch"))
class FindTheBugInTheSampler:
    """An epoch goes on where it stopped, on any number of ranks."""

    def draw(random, hidden):
        """(size, ranks before, ranks now, steps done, epoch, seed): equally many ranks, fewer, more; a full epoch if `hidden`."""
        seed = random.randrange(1000)
        cases = [(48, 4, 4, 5, 1, seed), (50, 4, 3, 5, 0, seed), (61, 2, 4, 7, 3, seed), (40, 5, 2, 3, 2, seed)]
        return {"cases": cases + [(30, 5, 4, 6, 1, seed)] * hidden}

    def probe(the_bug, rest_of_epoch, cases):
        """The line that is named, and all ranks' rests in each case."""
        rests = [
            [rest_of_epoch(size, rank, now, epoch, seed, before * steps) for rank in range(now)]
            for size, before, now, steps, epoch, seed in cases
        ]
        return {"line": the_bug(), "rests": rests}

    def judge_line(evidence, cases):
        """Line 4 goes back to a multiple of the new number of ranks."""
        check_line(evidence["line"], 4, SAMPLER_LINES)

    def judge_rests(evidence, cases):
        """Whatever was not seen is dealt out, in the order of the epoch, and filled up."""
        for (size, before, now, steps, epoch, seed), found in zip(cases, evidence["rests"], strict=True):
            done = before * steps
            about = f"{size} samples, {done} seen by {before} ranks, {now} go on"
            require(all(isinstance(one, list | tuple) for one in found), f"{about}: a list of indices was expected")
            order = order_of(size, epoch, seed)
            left = order[done:]
            together = [index for one in found for index in one]
            again = sorted(set(together) & set(order[:done]) - set(left))
            require(not again, f"{about}: some are seen a second time: {again[:3]}")
            require(
                set(together) >= set(left), f"{about}: some are never seen: {sorted(set(left) - set(together))[:3]}"
            )
            require(
                len(set(map(len, found))) <= 1,
                f"{about}: shares of {list(map(len, found))}; all ranks need equally many",
            )
            expected = [(left + left[: -len(left) % now])[rank::now] for rank in range(now)]
            require(
                list(map(list, found)) == expected,
                f"{about}: rank r takes positions r, r+K, … of what is left, in order",
            )

    parts = {"the line": (1, judge_line), "mended": (1, judge_rests)}
