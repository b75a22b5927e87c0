"""A step of training as the benchmarks take it: a problem's model, and this rank's share of one fixed batch."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from ... import problems

Model = tuple[str, dict[str, Any], int]  # of `problems.make`, its options, samples a rank


def model_and_batch(name: str, options: dict[str, Any], samples: int) -> tuple[Callable, Tensor, Tensor]:
    """A function that makes the model, always the same, and this rank's inputs and targets."""
    problem = problems.make(name, **options)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return problem.model, *next(problem.batches(samples * world_size, 1, 0, rank, world_size))


def step(forward: Callable, optimizer: Any, inputs: Tensor, targets: Tensor) -> None:
    """Forward, backward, update."""
    optimizer.zero_grad()
    cross_entropy(forward(inputs), targets).backward()
    optimizer.step()
