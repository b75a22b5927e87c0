"""Claims about what averaging does."""

from collections.abc import Sequence
from copy import deepcopy
from functools import partial

import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from ... import problems
from ...stage3_paramserver import broadcast_parameters, gradients
from ...stage4_ring import average_on_ring
from ...stage5_bucketed import BucketedDDP
from .claim import Claim, Outcome
from .models import batch_of, flat, me, on_cpu, vectors, weights

RANKS, BATCH, STEPS, RATE = 4, 24, 8, 0.02


def train(reduction: str, rate: float, rank: int = 0, world_size: int = 1) -> torch.Tensor:
    """Weights after a few steps of SGD on this rank's share, gradients averaged where there are several ranks."""
    problem, model = vectors(), vectors().model()
    optimizer = SGD(model.parameters(), lr=rate)
    for inputs, targets in problem.batches(BATCH, STEPS, rank=rank, world_size=world_size):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets, reduction=reduction).backward()
        if world_size > 1:
            average_on_ring(gradients(model))
        optimizer.step()
    return weights(model)


def must_scale_rate(reduction: str) -> Outcome:
    """Do K ranks match one device if (and only if) the learning rate is multiplied by K?"""
    rate = RATE / (BATCH if reduction == "sum" else 1)
    single = train(reduction, rate)
    same, scaled = on_cpu(lambda: [train(reduction, factor * rate, *me()) for factor in (1, RANKS)], world_size=RANKS)[
        0
    ]
    off_same, off_scaled = (float((many - single).abs().max()) for many in (same, scaled))
    number = f"weights differ by {off_scaled:.0e} with the rate times K, by {off_same:.0e} with the same rate"
    return Outcome(off_scaled < 1e-12 < off_same, number)


def seeds_on_rank(broadcast: bool, same_seed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank: weights after a few steps, and the dropout mask that it drew."""
    rank, world_size = me()
    torch.manual_seed(0 if same_seed else rank)
    problem, model = vectors(), vectors().model(seed=0 if same_seed else rank)
    if broadcast:
        broadcast_parameters(model)
    optimizer = SGD(model.parameters(), lr=RATE)
    for inputs, targets in problem.batches(BATCH, 3, rank=rank, world_size=world_size):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        average_on_ring(gradients(model))
        optimizer.step()
    return weights(model), torch.nn.functional.dropout(torch.ones(64))


def must_share_seed(broadcast: bool) -> Outcome:
    """Do replicas drift apart unless all ranks use the same seed?"""

    def replicas(same_seed):
        ranks = on_cpu(seeds_on_rank, broadcast, same_seed, world_size=2)
        return torch.equal(ranks[0][0], ranks[1][0]), torch.equal(ranks[0][1], ranks[1][1])

    (equal_own, masks_own), (equal_same, masks_same) = replicas(False), replicas(True)
    masks = "the same dropout mask on all ranks" if masks_same and not masks_own else "dropout masks as before"
    number = f"own seeds: replicas {'equal' if equal_own else 'differ'}; same seed: equal, and {masks}"
    return Outcome(equal_same and not equal_own, number)


def mean_of_means(sizes: Sequence[int]) -> Outcome:
    """Is the mean of the shards' mean losses the mean loss of all samples?"""
    problem, model = vectors(), vectors().model()
    inputs, targets = batch_of(problem, sum(sizes))
    losses = cross_entropy(model(inputs), targets, reduction="none").detach()
    parts = losses.split(sizes)
    plain = sum(part.mean() for part in parts) / len(parts)
    weighted = sum(part.mean() * len(part) for part in parts) / len(losses)
    off, rest = abs(float(plain - losses.mean())), abs(float(weighted - losses.mean()))
    return Outcome(off < 1e-12, f"shards of {sizes}: off by {off:.0e}, weighted by size {rest:.0e}")


def batchnorm_on_rank(synchronised: bool, samples: torch.Tensor) -> torch.Tensor:
    """One rank: the normalised outputs of its share."""
    from ...stage6_ddp import SyncBatchNorm

    rank, world_size = me()
    norm = torch.nn.Sequential(torch.nn.BatchNorm1d(samples.shape[1], dtype=samples.dtype))
    if synchronised:
        norm = SyncBatchNorm.convert_sync_batchnorm(norm)
    return norm(samples.chunk(world_size)[rank]).detach()


def sees_global_batch(synchronised: bool) -> Outcome:
    """Does BatchNorm on K ranks normalise as one device does with the whole batch?"""
    samples = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).cumsum(0)
    whole = torch.nn.BatchNorm1d(4, dtype=torch.float64)(samples).detach()
    parts = torch.cat(on_cpu(batchnorm_on_rank, synchronised, samples, world_size=2))
    off = float((parts - whole).abs().max())
    return Outcome(off < 1e-12, f"outputs differ from the whole batch's by {off:.0e}")


def clip_on_rank(limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank: the averaged gradient, clipped by its norm before (as a hook would) and after averaging."""
    rank, world_size = me()
    problem, model = vectors(), vectors().model()
    inputs, targets = batch_of(problem, BATCH, rank, world_size)
    cross_entropy(model(inputs), targets).backward()
    early = deepcopy(model)
    for parameter, copied in zip(model.parameters(), early.parameters(), strict=True):
        copied.grad = parameter.grad.clone()
        torch.nn.utils.clip_grad_norm_([copied], limit)
    average_on_ring(gradients(early))
    average_on_ring(gradients(model))
    torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    return flat(gradients(early)), flat(gradients(model))


def clip_anywhere(limit: float) -> Outcome:
    """Does clipping each gradient as it appears equal clipping all of them after backward?"""
    early, late = on_cpu(clip_on_rank, limit, world_size=2)[0]
    off = float((early - late).norm() / late.norm())
    return Outcome(off < 1e-12, f"norm limit {limit:g}: gradients differ by {100 * off:.0f} %")


def layout_on_rank(cap: float) -> torch.Tensor:
    """One rank: the averaged float32 gradient with buckets of `cap` MiB."""
    rank, world_size = me()
    problem = problems.make("synthetic", parameters=2**18)
    model = problem.model()
    inputs, targets = batch_of(problem, BATCH, rank, world_size)
    cross_entropy(BucketedDDP(model, bucket_cap_mb=cap)(inputs), targets).backward()
    return flat(gradients(model))


def layout_is_harmless(world_size: int) -> Outcome:
    """Do different bucket caps give the same bits?"""
    one, other = (on_cpu(layout_on_rank, cap, world_size=world_size)[0] for cap in (0.01, 25.0))
    different = int((one != other).sum())
    off = float((one - other).abs().max())
    return Outcome(
        different == 0, f"{different:,} of {len(one):,} gradients differ in their last bits, by up to {off:.0e}"
    )


CLAIMS = [
    Claim(
        1,
        "Averaging gradients over N devices scales the gradient by 1/N, so the learning rate must be scaled by N.",
        "measured",
        {"the loss is a mean": partial(must_scale_rate, "mean"), "the loss is a sum": partial(must_scale_rate, "sum")},
        "holds only if the loss is a sum",
        "The mean of the shards' means is the mean of the batch: the step is the same at the same rate. "
        "Only a summed loss loses a factor of N by averaging.",
    ),
    Claim(
        7,
        "The optimizers must be copied to all ranks with the same random seed.",
        "measured",
        {
            "rank 0 broadcasts its weights": partial(must_share_seed, True),
            "nobody broadcasts": partial(must_share_seed, False),
        },
        "holds only if nobody broadcasts",
        "Equal weights at the start and equal gradients keep replicas equal. The broadcast gives the first; "
        "the same seed everywhere also gives every rank the same dropout mask, which wastes randomness.",
    ),
    Claim(
        14,
        "The mean of the ranks' mean losses is the mean loss.",
        "measured",
        {
            "all shards are equally large": partial(mean_of_means, [6, 6, 6, 6]),
            "shards differ in size": partial(mean_of_means, [9, 7, 6, 2]),
        },
        "holds only if all shards are equally large",
        "A sample in a small shard counts more in a plain mean; weight each shard by its size.",
    ),
    Claim(
        15,
        "BatchNorm sees the global batch.",
        "measured",
        {
            "it is the ordinary BatchNorm": partial(sees_global_batch, False),
            "it is SyncBatchNorm": partial(sees_global_batch, True),
        },
        "holds only if it is SyncBatchNorm",
        "Every rank normalises with the mean and variance of its own share; SyncBatchNorm exchanges them.",
    ),
    Claim(
        16,
        "Clipping gradients in a hook equals clipping them after backward.",
        "measured",
        {
            "gradients are clipped": partial(clip_anywhere, 0.05),
            "nothing is large enough to be clipped": partial(clip_anywhere, 1e6),
        },
        "holds only if nothing is large enough to be clipped",
        "A hook sees one parameter's gradient of one rank; the norm that counts is that of all parameters, averaged.",
    ),
    Claim(
        20,
        "The bucket layout cannot change results.",
        "measured",
        {"K = 2": partial(layout_is_harmless, 2), "K = 4": partial(layout_is_harmless, 4)},
        "holds only if K = 2",
        "Where a chunk begins decides in which order the ranks' values are added, and floating-point sums of three "
        "or more values depend on the order. Two values have one order only.",
    ),
]
