"""Small models and helpers that several experiments share."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from ... import problems
from ...running.launching.launch import launch

on_cpu = partial(launch, device="cpu")  # on every machine the same experiment


def batch_of(
    problem: problems.Problem, global_batch: int, rank: int = 0, world_size: int = 1, step: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step's (inputs, targets) of this rank's share."""
    return next(problem.batches(global_batch, step + 1, rank=rank, world_size=world_size, start=step))


def me() -> tuple[int, int]:
    """(rank, world size) of this process."""
    return dist.get_rank(), dist.get_world_size()


def flat(tensors: Iterable[Any]) -> torch.Tensor:
    """All tensors end to end, detached."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def weights(model: nn.Module) -> torch.Tensor:
    """All parameters of a model as one vector."""
    return flat(model.parameters()).clone()


def gradient(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """The gradient of a model on one batch as one vector."""
    model.zero_grad()
    cross_entropy(model(inputs), targets, reduction=reduction).backward()
    return flat([parameter.grad for parameter in model.parameters()]).clone()


class Branches(torch.nn.Module):
    """A trunk and two branches; `forward` takes the branches named in `used`."""

    def __init__(self, used=("left",), width=64):
        super().__init__()
        self.trunk, self.used = torch.nn.Linear(width, width), used
        self.left, self.right = torch.nn.Linear(width, 4 * width), torch.nn.Linear(width, 4 * width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The mean output of the branches in use."""
        hidden = torch.tanh(self.trunk(inputs))
        return sum(getattr(self, name)(hidden) for name in self.used) / len(self.used)


def vectors() -> problems.Problem:
    """A small network on random vectors in float64, where rounding errors are of the size 1e-16."""
    return problems.make("synthetic", parameters=3 * 64**2, width=64, samples=512, dtype=torch.float64)
