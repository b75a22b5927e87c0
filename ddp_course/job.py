"""`Job`: what is trained and how, checked before anything starts, and what a step of it costs."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from manyranks.devices import Device

from . import problems
from .stage8_pipeline import layers_of, split
from .stage9_tensor import split_layers
from .your_model import YourModel, YourProblem


class Layer(NamedTuple):
    """A layer or a parameter: the seconds of its two passes, and the bytes of its gradient."""

    name: str
    forward_s: float
    backward_s: float
    gradient_bytes: float


class Profile(NamedTuple):
    """What a step costs: `layers` in forward order, the update's seconds, the step's flops.

    The backward pass runs through the layers in reverse. The flops are 0 if they are not counted.
    """

    layers: tuple[Layer, ...]
    update_s: float = 0.0
    flops: float = 0.0

    @property
    def gradient_bytes(self) -> float:
        """The bytes of all gradients together."""
        return sum(layer.gradient_bytes for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """The seconds of a step on one device, without communication."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers) + self.update_s


@dataclass(frozen=True)
class Job:
    """A problem, and how it is trained.

    `dtype` is a name. `parameters` is the size of the models of bytes and synthetic, None for the
    problem's own size. `dropout` is for digits and bytes. `timeout` is in seconds per launch, and
    `progress` shows the steps of each. Data and models are on the `device`, which a rank replaces
    by its own. Data, sizes and work are made once, when they are asked for.
    """

    problem_name: str | YourModel
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
        """Return the settings alone: ranks make data and models of their own."""
        return asdict(self)

    @cached_property
    def problem(self) -> problems.Problem:
        """The problem that is trained, with its data and its models."""
        settings = {"parameters": self.parameters, "dropout": self.dropout}
        # Not every problem takes these settings, so None and 0 are not handed on.
        options = {name: value for name, value in settings.items() if value}
        dtype = getattr(torch, self.dtype)
        return problem_of(self.problem_name, dtype=dtype, device=self.device, **options)

    def model(self) -> torch.nn.Module:
        """Return a new model with the weights that the job's seed gives."""
        return self.problem.model(self.seed)

    def batches(self, rank: int = 0, world_size: int = 1) -> Iterator[problems.Batch]:
        """Return the (inputs, targets) of all steps: a rank's equal share of each global batch."""
        return self.problem.batches(self.global_batch, self.steps, self.seed, rank, world_size)

    @cached_property
    def parameter_count(self) -> int:
        """The number of the model's parameters."""
        return sum(parameter.numel() for parameter in self.model().parameters())

    @property
    def gradient_bytes(self) -> int:
        """The bytes of all gradients."""
        return self.parameter_count * getattr(torch, self.dtype).itemsize

    @cached_property
    def activation_bytes(self) -> list[int]:
        """The bytes of one batch's activations at each cut of a pipeline over all ranks."""
        activation, _ = next(self.batches())
        sizes = []
        with torch.no_grad():
            for part in split(layers_of(self.model()), self.world_size)[:-1]:
                activation = part(activation)
                sizes.append(activation.nbytes)
        return sizes

    @cached_property
    def reduced_bytes(self) -> list[int]:
        """The bytes of each all-reduce in a step, if layers are split over all ranks."""
        sizes = []
        inputs, targets = next(self.batches())
        self.problem.training_loss(self.slice_of_model(sizes)(inputs), targets).backward()
        return sizes

    def slice_of_model(self, sizes: list[int]) -> torch.nn.Module:
        """Return a model with one rank's slices, which notes its all-reduces' bytes in `sizes`."""

        def note(tensor):
            """Note the bytes of a tensor, in place of an all-reduce."""
            sizes.append(tensor.nbytes)
            return tensor

        return split_layers(self.model(), 0, self.world_size, note)

    def work(self, device: Device, ranks: int = 1) -> Profile:
        """Return the times of a step on `device` with one of `ranks` equal shares of a batch."""
        return profile_of_step(self, device, ranks)


def problem_of(name: str | YourModel, **options: Any) -> problems.Problem:
    """The problem of this name, or a learner's own. Raises ValueError for what cannot work."""
    if isinstance(name, YourModel):
        if unknown := ", ".join(options.keys() - {"dtype", "device"}):
            raise ValueError(f'"{unknown}" cannot be chosen for a model of your own')
        return YourProblem(name, **options)
    return problems.make(name, **options)


def make_job(
    problem: str | YourModel,
    world_size: int,
    steps: int | None = None,
    global_batch: int | None = None,
    lr: float | None = None,
    parameters: int | None = None,
    **settings: Any,
) -> Job:
    """Return the job with these settings.

    Steps, batch and learning rate that are None are the problem's own. Raises ValueError for a
    setting that cannot work.
    """
    if world_size < 1:
        raise ValueError(f"world size is {world_size}; it must be 1 or more")
    options = {} if parameters is None else {"parameters": parameters}
    defaults = problem_of(problem, **options)
    steps = defaults.steps if steps is None else steps
    lr = defaults.learning_rate if lr is None else lr
    if global_batch is None:
        share = max(1, defaults.global_batch // world_size)
        global_batch = share * world_size
    job = Job(problem, world_size, steps, global_batch, lr, parameters=parameters, **settings)
    if isinstance(defaults, YourProblem):
        defaults.try_step(torch.arange(min(2, len(defaults.data))), lr)
    # This call refuses a batch that is too large, or that ranks cannot share equally.
    next(job.batches(0, world_size))
    return job


@lru_cache(maxsize=16)
def profile_of_step(job: Job, device: Device, ranks: int = 1, sliced: bool = False) -> Profile:
    """Compute one step on the emulated device; return its profile, with a `Layer` per parameter.

    If `sliced`, the model has one rank's slices of the layers. The device's clock moves on, but
    nobody waits for it.
    """
    model = job.slice_of_model([]) if sliced else job.model()
    inputs, targets = next(job.batches(0, ranks))
    optimizer = job.problem.optimizer(model.parameters(), lr=job.lr)
    ready_s = {}
    with device.emulate(sleep=False) as emulation:

        def note(parameter):
            """Note when the device has made this gradient."""
            ready_s[parameter] = emulation.busy_s

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(note)
        loss = job.problem.training_loss(model(inputs), targets)
        forward_s = emulation.busy_s
        loss.backward()
        end_s = emulation.busy_s
        optimizer.step()
    # Gradients are made from the last parameter to the first: a `Layer` lasts from one gradient to
    # the next.
    layers = []
    now = forward_s
    for parameter in reversed([p for p in model.parameters() if p in ready_s]):
        backward_s = max(0.0, ready_s[parameter] - now)
        layers.append(Layer("", 0.0, backward_s, parameter.nbytes))
        now = max(now, ready_s[parameter])
    # One more `Layer` has the forward pass, and the end of the backward pass after the last
    # gradient.
    layers.append(Layer("", forward_s, end_s - now, gradient_bytes=0.0))
    return Profile(tuple(reversed(layers)), emulation.busy_s - end_s, emulation.flops)
