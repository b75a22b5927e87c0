"""Exercise 10: a sampler with epochs, and all that a fixed batch asks for.

The tasks are a learning-rate schedule, a mean over uneven shards, the largest rate, a loss that
weighs tokens alike, and a figure in words. A task's `draw`, `probe` and `read` are what
`ddp_exercises.tasks.Task` says.
"""

import math
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from ddp_course import problems, stage1_single
from ddp_course.stage4_ring import ring_all_reduce
from ddp_exercises.attempt import COLLECTIVES
from ddp_exercises.errors import Wrong
from ddp_exercises.tasks import task

from .shared import (
    as_it_is,
    different_words,
    form_of_explanation,
    in_words,
    noted_ring,
    nothing,
    require,
    several,
    tensors,
    worlds,
)


def plain(indices):
    """Return a tensor of indices as a list; any other value unchanged."""
    return indices.tolist() if isinstance(indices, torch.Tensor) else indices


RESEEDED = (
    "it was seeded or drawn from: dropout would be the same in every epoch; make a generator of your own,"
    " torch.Generator().manual_seed(…)"
)


def refuse_sampler(*_, **__):
    """Raise Wrong, in place of torch's sampler."""
    raise Wrong("torch's DistributedSampler is all of this task: write it yourself")


@task(
    "10.1",
    "epoch_indices",
    {"even shares": 1, "uneven sizes": 1},
    forbidden=("ddp_course.problems.shard",),
)
class EpochIndices:
    """A rank's share of one epoch: the order of seed + epoch, positions r, r+K, …, padded.

    What is padded comes from its beginning.
    """

    def draw(random):
        seed = random.randrange(1000)
        cases = []
        for size, world_size in ((24, 3), (25, 4), (10, 4), (7, 1), (103, 8)):
            for epoch in (0, 1, 5):
                cases.append((size, world_size, epoch, seed))
        return {"cases": cases}

    def probe(epoch_indices, cases):
        fault = ""
        for number, (size, world_size, epoch, seed) in enumerate(cases):
            shares = []
            for rank in range(world_size):
                # In training, too, ranks' generators have different states.
                torch.manual_seed(100 * number + rank)
                before = torch.get_rng_state()
                with mock.patch.object(DistributedSampler, "__init__", refuse_sampler):
                    share = epoch_indices(size, rank, world_size, epoch, seed)
                shares.append(plain(share))
                if not torch.equal(before, torch.get_rng_state()):
                    fault = RESEEDED
            part = "uneven sizes" if size % world_size else "even shares"
            yield part, f"{size} samples, {world_size} ranks, epoch {epoch}", shares
        yield "even shares", "torch's own generator, afterwards", fault


@task("10.2", "learning_rate", {"warm-up": 1, "cosine": 1})
class LearningRate:
    """Linear to the peak from the first step on; then half a cosine to zero, and then zero."""

    def draw(random):
        warmup = random.randrange(5, 20)
        total = random.randrange(60, 200)
        peak = random.randrange(11, 60) / 10  # At a peak of 1 nobody sees that it is missing.
        steps = [
            0,
            1,
            warmup - 1,
            warmup,
            warmup + 1,
            (warmup + total) // 2,
            total - 1,
            total,
            total + 10,
        ]
        for step in steps:
            about = f"step {step}, warm-up {warmup}, total {total}, peak {peak}"
            part = "warm-up" if step <= warmup else "cosine"
            yield part, about, (step, warmup, total, peak)


@task(
    "10.3",
    "global_mean",
    {"mean": 1, "a rank without samples": 1},
    ranks=4,
    forbidden=COLLECTIVES,
)
class GlobalMean:
    """The mean over all samples, from means over uneven shards; without samples a mean is 0/0."""

    def draw(random):
        counts = [random.randrange(20, 40), random.randrange(1, 9), random.randrange(9, 20), 0]
        return {"means": [random.uniform(0.5, 4.0) for _ in range(4)], "counts": counts}

    def probe(global_mean, means, counts):
        rank = dist.get_rank()
        for size, group in worlds(4, 3, 2):
            all_reduce, calls = noted_ring(group)
            about = f"with {size} ranks of {counts[:size]} samples"
            own_mean = means[rank] if counts[rank] else math.nan
            mean = torch.tensor(own_mean, dtype=torch.float64)
            result = global_mean(mean, counts[rank], all_reduce)
            if isinstance(result, torch.Tensor) and result.numel() == 1:
                result = result.item()
            part = "a rank without samples" if 0 in counts[:size] else "mean"
            fault = ""
            if result != result:  # Only what is not a number differs from itself.
                fault = (
                    "the mean is not a number: somewhere 0 / 0 comes in, and 0 times that is no 0"
                )
                result = "not a number"
            yield part, f"{about}, a number", fault
            yield part, about, result
            yield part, f"{about}, whether all_reduce was called", bool(calls)
            if counts[rank]:
                yield part, f"{about}, the input afterwards", mean


@task("10.4", ("the_bug", "rest_of_epoch"), {"the line": 1, "mended": 1}, secret=("the line",))
class FindTheBugInTheSampler:
    """An epoch goes on where it stopped, on any number of ranks, but for a fault in line 4.

    It goes back to a multiple of the new number.
    """

    def draw(random):
        seed = random.randrange(1000)
        # Samples, ranks before and after the stop, steps before it, and the epoch.
        return {
            "cases": [
                (48, 4, 4, 5, 1, seed),
                (50, 4, 3, 5, 0, seed),
                (61, 2, 4, 7, 3, seed),
                (40, 5, 2, 3, 2, seed),
                (30, 5, 4, 6, 1, seed),
            ]
        }

    def probe(the_bug, rest_of_epoch, cases):
        yield "the line", "the faulty line", the_bug()
        for size, ranks_before, ranks, steps, epoch, seed in cases:
            seen = ranks_before * steps
            rests = []
            for rank in range(ranks):
                rests.append(plain(rest_of_epoch(size, rank, ranks, epoch, seed, seen)))
            case = f"{size} samples, {seen} seen by {ranks_before} ranks, {ranks} go on"
            yield "mended", case, rests


@task("10.5", "largest_rate", {"learns with half": 1, "not with twice": 1}, seconds=30.0)
class LargestRate:
    """Tried by two trainings: half of the rate learns, and twice as much does not.

    With half of it the last ten losses are below 1.
    """

    def draw(random):
        return {}

    def probe(largest_rate):
        pair = "a pair was expected: (the rate, a sentence)"
        yield "", "pair", tuple(several(largest_rate(), 2, pair))

    def read(returned):
        [(rate, sentence)] = returned
        require(
            type(rate) in (int, float) and 0 < rate < 1e6,
            f"the rate is a number above 0, not {rate!r}",
        )
        six = "a sentence of six words or more was expected, six different ones"
        require(different_words(sentence) >= 6, six)
        with_half = learns(rate / 2)
        yield "learns with half", "whether it learns with half of your rate", with_half
        # Where nothing is learned at a rate, twice that rate says nothing.
        is_largest = with_half and not learns(2 * rate)
        yield (
            "not with twice",
            "whether it learns with half of your rate, and not with twice",
            is_largest,
        )


def learns(rate):
    """Return whether 40 steps on the digits end with a mean loss below 1."""
    digits = problems.make("digits")
    losses = stage1_single.train(digits.model(), digits.batches(96, 40), lr=rate)
    return sum(losses[-10:]) / 10 < 1


NO_GRAPH = (
    "a loss has no graph behind it, so `backward()` finds no parameter: .item(), detach() and torch.tensor()"
    " cut it off; scale the tensors of `sums` themselves"
)
ONCE = (
    "a rank calls all_reduce once for each of its micro-batches, and ranks have different numbers of them:"
    " add up this rank's tokens first, then one call is enough"
)


@task(
    "10.6",
    "losses_for_backward",
    {"gradient": 2, "one sum": 1},
    ranks=4,
    forbidden=COLLECTIVES,
)
class LossesForBackward:
    """Sums of losses over the number of all tokens, times K, since DDP divides by K."""

    def draw(random):
        counts = [[3], [300, 0], [40, random.randrange(5, 30), 8], [random.randrange(50, 90)]]
        weights, *slopes = tensors(random, 9, 6, dtype=torch.float64)
        return {"weights": weights, "slopes": slopes, "counts": counts}

    def probe(losses_for_backward, weights, slopes, counts):
        rank = dist.get_rank()
        own = counts[rank]
        for size, group in worlds(4, 3, 2):
            parameter = torch.nn.Parameter(weights.clone())
            all_reduce, calls = noted_ring(group)
            sums = []
            for number, count in enumerate(own):
                # The micro-batches of a rank differ, and so do the first ones of all ranks.
                loss_of_token = (parameter @ slopes[(rank + 2 * number) % len(slopes)]).square()
                sums.append(count * loss_of_token)
            about = f"with {size} ranks of {counts[:size]} tokens"
            each = f"{about}: a loss for each micro-batch was expected"
            causes = {
                "all ranks must call the same collective": f"{about}: {ONCE}",
                "does not require grad": f"{about}: {NO_GRAPH}",
                "has no attribute 'backward'": f"{about}: {NO_GRAPH}",
            }
            with in_words(causes):
                answer = losses_for_backward(sums, list(own), all_reduce, size)
                losses = several(answer, len(own), each)
                calls_of_answer = len(calls)
                answer = losses_for_backward(sums, list(own), doubled(all_reduce), size)
                halved = several(answer, len(own), each)
                for loss in losses:
                    loss.backward(retain_graph=True)
                require(parameter.grad is not None, f"{about}: {NO_GRAPH}")
                gradient = parameter.grad / size
                ring_all_reduce(gradient, group)
            require(
                not gradient.isnan().any(),
                f"{about} the gradient is not a number: a micro-batch without tokens has no mean,"
                " 0 / 0; divide by the tokens of all ranks",
            )
            yield "gradient", f"{about}, DDP's average of the gradients", gradient
            yield "one sum", f"{about}, all-reduces", calls_of_answer
            share = round((halved[0] / losses[0]).item(), 6)
            yield "one sum", f"{about}, a loss if the sum is twice as large, to now", share


def doubled(all_reduce):
    """Sum twice as much as an all-reduce would."""

    def twice(tensor, *groups):
        all_reduce(tensor, *groups)
        tensor.mul_(2)

    return twice


@task("10.7", "explain_figure", {"text": 1, "ticks": 1})
class ExplainFigure:
    """A figure in the learner's own words, and which points the learner ticks; a teacher reads it."""

    draw = nothing
    probe = as_it_is
    read = form_of_explanation
