"""A job: what every stage of a comparison trains, checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from .. import problems
from ..running.devices import Device
from ..stage8_pipeline import layers_of, split
from ..stage9_tensor import split_layers
from .simulate.model import Layer, Profile


@dataclass(frozen=True)
class Job:
    """A problem, and how it is trained. Data, sizes and work are made once, when they are asked
    for.

    `dtype` is a name; `parameters` is the size of the models of bytes and synthetic, None for the
    problem's own; `dropout` is for digits and bytes; `timeout` is in seconds per launch, and
    `progress` shows the steps of each. Data and models are on the `device`, which a rank replaces
    by its own.
    """

    problem_name: str
    world_size: int
    steps: int
    global_batch: int
    lr: float
    seed: int = 0
    dtype: str = "float32"
    parameters: int | None = None
    dropout: float = 0.0
    bucket_cap_mb: float = 0.25
    timeout: float = 300.0
    progress: bool = False
    device: str = "cpu"

    def __post_init__(self):
        """Raise ValueError for a setting that cannot work."""
        for right, message in [
            (self.steps >= 1, f"steps is {self.steps}; it must be 1 or more"),
            (0 < self.lr < math.inf, f"lr is {self.lr}; it must be a positive number, such as 0.1"),
            (
                0 <= self.dropout < 1,
                f"dropout is {self.dropout}; it must be 0 or more, and less than 1",
            ),
            (
                self.dtype in ("float32", "float64"),
                f'dtype is "{self.dtype}"; choose float32 or float64',
            ),
            (
                0 < self.bucket_cap_mb < math.inf,
                f"bucket_cap_mb is {self.bucket_cap_mb}; it must be a positive number of MiB",
            ),
        ]:
            if not right:
                raise ValueError(message)

    def __getstate__(self) -> dict[str, Any]:
        """The ranks get the settings, and make data and models of their own."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def problem(self) -> problems.Problem:
        """The problem: its data and its models."""
        options = {"parameters": self.parameters, "dropout": self.dropout or None}
        chosen = {name: value for name, value in options.items() if value is not None}
        return problems.make(
            self.problem_name, dtype=getattr(torch, self.dtype), device=self.device, **chosen
        )

    def model(self) -> torch.nn.Module:
        """A new model with the job's weights."""
        return self.problem.model(self.seed)

    def batches(self, rank: int = 0, world_size: int = 1) -> Iterator[problems.Batch]:
        """The (inputs, targets) of all steps: one of `world_size` equal shares of each global
        batch.
        """
        return self.problem.batches(self.global_batch, self.steps, self.seed, rank, world_size)

    @cached_property
    def parameter_count(self) -> int:
        """Parameters of the model."""
        return sum(parameter.numel() for parameter in self.model().parameters())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return self.parameter_count * getattr(torch, self.dtype).itemsize

    @cached_property
    def activation_bytes(self) -> list[int]:
        """Bytes of one batch's activations at each cut of a pipeline over all ranks."""
        flowing, _ = next(self.batches())
        sizes = []
        with torch.no_grad():
            for part in split(layers_of(self.model()), self.world_size)[:-1]:
                flowing = part(flowing)
                sizes.append(flowing.nbytes)
        return sizes

    @cached_property
    def reduced_bytes(self) -> list[int]:
        """Bytes of each all-reduce of activations in a step, if layers are split over all ranks."""
        sizes: list[int] = []
        inputs, targets = next(self.batches())
        cross_entropy(self.slice_of_model(sizes)(inputs), targets).backward()
        return sizes

    def slice_of_model(self, sizes: list[int]) -> torch.nn.Module:
        """A model with one rank's slices of the layers, which notes the bytes of its all-reduces
        and sends nothing.
        """

        def note(tensor):
            """Stand in for an all-reduce: only its bytes count."""
            sizes.append(tensor.nbytes)
            return tensor

        return split_layers(self.model(), 0, self.world_size, note)

    def work(self, device: Device, ranks: int = 1) -> Profile:
        """The times of a step on `device` with one of `ranks` equal shares of a batch."""
        return profile_of_step(self, device, ranks)


def make_job(
    problem: str,
    world_size: int,
    steps: int | None = None,
    global_batch: int | None = None,
    lr: float | None = None,
    parameters: int | None = None,
    **settings: Any,
) -> Job:
    """The job with these settings; None for steps, batch and learning rate are the problem's own.

    Raises ValueError for a setting that cannot work.
    """
    if world_size < 1:
        raise ValueError(f"world size is {world_size}; it must be 1 or more")
    own = problems.make(problem, **({} if parameters is None else {"parameters": parameters}))
    steps = own.steps if steps is None else steps
    lr = own.learning_rate if lr is None else lr
    if global_batch is None:
        global_batch = max(world_size, own.global_batch // world_size * world_size)
    job = Job(problem, world_size, steps, global_batch, lr, parameters=parameters, **settings)
    # This call refuses a batch that is too large or that ranks cannot share equally.
    next(job.batches(0, world_size))
    return job


@lru_cache(maxsize=16)
def profile_of_step(job: Job, device: Device, ranks: int = 1, sliced: bool = False) -> Profile:
    """Compute one step on the emulated device without waiting for its clock; return a `Layer` for
    each parameter.

    If `sliced`, the model has one rank's slices of the layers.
    """
    model = job.slice_of_model([]) if sliced else job.model()
    inputs, targets = next(job.batches(0, ranks))
    optimizer = SGD(model.parameters(), lr=0.0)
    ready = {}
    with device.emulate(sleep=False) as emulation:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: ready.update({p: emulation.busy_s})
            )
        loss = cross_entropy(model(inputs), targets)
        now = forward = emulation.busy_s
        loss.backward()
        end = emulation.busy_s
        optimizer.step()
    layers = []
    for parameter in reversed([p for p in model.parameters() if p in ready]):
        layers.append(Layer("", 0.0, max(0.0, ready[parameter] - now), parameter.nbytes))
        now = max(now, ready[parameter])
    layers.append(Layer("", forward, end - now, 0.0))
    return Profile(tuple(reversed(layers)), emulation.busy_s - end, emulation.flops)
