"""Three ways to train that are too short for a module: whole-gradient ring, ZeRO-1, torch's DDP."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from manyranks.devices import rank_device

from . import stage1_single, stage4_ring, wire
from .base.losses import cross_entropy
from .stage3_paramserver import broadcast_parameters
from .stage7_sharded import ShardedOptimizer

average_on_whole_ring = partial(
    stage4_ring.average_on_ring, all_reduce=stage4_ring.whole_gradient_ring
)
train_on_whole_ring = partial(stage4_ring.train, average=average_on_whole_ring)


def train_with_sharded_optimizer(
    model: nn.Module,
    batches: Iterable,
    lr: float,
    loss: Callable = cross_entropy,
    optimizer: type = SGD,
) -> list[float]:
    """Train with ZeRO-1: the loop of stage 1, whose optimizer averages and updates one shard."""
    # The optimizer broadcasts parameters, but no buffers.
    broadcast_parameters(model)
    sharded = partial(ShardedOptimizer, optimizer_cls=optimizer)
    return stage1_single.train(model, batches, lr, loss, sharded)


def train_with_torch(
    model: nn.Module,
    batches: Iterable,
    lr: float,
    loss: Callable = cross_entropy,
    optimizer: type = SGD,
    bucket_cap_mb: float | None = None,
) -> list[float]:
    """Train with torch's class in the loop of stage 1; observers see its all-reduces."""
    devices = [rank_device()] if rank_device().type == "cuda" else None
    parallel = DistributedDataParallel(model, device_ids=devices, bucket_cap_mb=bucket_cap_mb)
    parallel.register_comm_hook(None, observed_all_reduce)
    return stage1_single.train(parallel, batches, lr, loss, optimizer)


def observed_all_reduce(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average one bucket as torch does by default, and tell observers when; this is a hook."""
    start = wire.now()
    flat = bucket.buffer().mul_(1 / dist.get_world_size())

    def report(future):
        wire.ended("all_reduce", start, flat)
        return future.value()[0]

    return dist.all_reduce(flat, async_op=True).get_future().then(report)
