"""A step of training as the benchmarks take it: a model, and this rank's share of one batch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from ddp_course import problems

Model = tuple[str, dict[str, Any], int]  # A model is a problem, its options, and samples per rank.


class Encoder(torch.nn.Module):
    """A transformer encoder of four layers with 48 small parameters: (N, 256) to (N, 256).

    The inputs are read as 8 tokens of 32.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(
            32, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of as many classes as there are inputs."""
        return self.layers(inputs.view(len(inputs), 8, 32)).flatten(1)


def model_and_batch(
    name: str, options: dict[str, Any], samples: int
) -> tuple[Callable, Tensor, Tensor]:
    """Return a function that makes the model, always the same, and this rank's inputs and targets.

    Besides the course's problems there is "encoder", many small parameters on the data of
    "synthetic".
    """
    problem = problems.make("synthetic" if name == "encoder" else name, **options)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    make_model = Encoder if name == "encoder" else problem.model
    batches = problem.batches(samples * world_size, 1, 0, rank, world_size)
    inputs, targets = next(batches)
    return make_model, inputs, targets


def step(forward: Callable, optimizer: Any, inputs: Tensor, targets: Tensor) -> None:
    """Make one step: forward, backward, update."""
    optimizer.zero_grad()
    cross_entropy(forward(inputs), targets).backward()
    optimizer.step()
