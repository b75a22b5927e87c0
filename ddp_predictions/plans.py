"""Which way of training for which transformer and machine: memory and step time of each, and the
simplest fast one.

Times are those of `simulate.transformers`, with the numbers fitted to published steps
(`simulate.published`): one model for the scoreboard and for this choice. Training keeps 16 bytes
per parameter (weights and gradients in bfloat16, 4 each for a float32 copy and Adam's two), and 34
h bytes of activations per token and layer, or 2 h where they are recomputed (Korthikanti et al.
2022). K devices, D of them on each host, T x P x R ways of tensor, pipeline and data parallelism:

    way                kept of 16 bytes  sent per parameter of 2 bytes         hidden under
    DDP                16                2(K-1)/K                              backward
    ZeRO-1             4 + 12/K          2(K-1)/K                              backward
    fully sharded      16/K + 2 layers   3(K-1)/K, over one NIC                all but a fitted part
    sharded in a host  16/D + 2 layers   3(D-1)/D inside, 2(H-1)/H /D outside  as both above
    T x P x R          16/(T P)          activations; 2(R-1)/R /(T P)          nothing

A plan's complexity is 0 for DDP, 1 for one wrapper, 2 for another layout of the model or of the
ranks, 3 for both.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import sqrt
from typing import Any, NamedTuple

from ddp_course.running.units import bits_per_second

from . import published
from .transformers import LATENCY_S, Machine, Shape, Sharding, Split, fully_sharded_s, step_s

SIMPLER = 1.1  # A more complicated plan must be faster by this factor.
VOCABULARY = 51_200
CHECKED = {"A100": (3.6, 175, 768), "H100": (8, 8, 128), "V100": (0.02, 0.1, 16)}
ASSUMED = (
    "Assumed: 16-bit products and traffic, attention without stored scores, 10 µs per message,"
    " equal layers, no stragglers, no congestion; GPUs and links reach the share of their"
    " datasheets that published runs reached.\nChecked: A100s, 3.6 to 175 billion parameters on 64"
    " to 768; H100s, 8 billion fully sharded on 8 to 128.\nNever checked: NICs below 200 Gbit/s,"
    " convolutions, other GPUs, memory."
)


@dataclass
class Setting:
    """Model and machine: `billions` of parameters, `devices` with `memory_gb` GB each, `per_host`
    of them on each host.

    `bandwidth` is that of one NIC ("200Gbit"), of which a host has `nics`; a device has `samples`
    sequences of `context` tokens in a step; `gpu` is in `DATASHEETS`. Raises ValueError for numbers
    that are not positive, and if the devices do not fill hosts of `per_host`.
    """

    billions: float
    memory_gb: float
    devices: int
    bandwidth: str
    per_host: int = 8
    samples: int = 4
    context: int = 2048
    nics: int = 1
    gpu: str = "A100"
    recompute: bool = False

    def __post_init__(self):
        for name, number in vars(self).items():
            if name not in ("bandwidth", "gpu", "recompute") and not number > 0:
                raise ValueError(f"{name.replace('_', ' ')} is {number}; it must be more than 0")
        self.per_host = min(self.per_host, self.devices)
        if self.devices % self.per_host:
            do_not_fill = f"{self.devices} devices do not fill hosts of {self.per_host}"
            raise ValueError(f"{do_not_fill}; choose a multiple of {self.per_host}")
        self.parameters, self.nic = 1e9 * self.billions, bits_per_second(self.bandwidth) / 8

    @cached_property
    def shape(self) -> Shape:
        """A model with `parameters` whose width is 128 times its number of layers, as in published
        models.
        """
        layers = max(1, round((self.parameters / (12 * 128**2)) ** (1 / 3)))
        a, b = 12 * layers, VOCABULARY
        return Shape(
            layers, (sqrt(b * b + 4 * a * self.parameters) - b) / (2 * a), self.context, VOCABULARY
        )

    @cached_property
    def machine(self) -> Machine:
        """The published machine with this GPU, and links that reach the same share of these
        NICs.
        """
        fitted = published.machine().slower(published.megatron()[0]).on(self.gpu)
        share = fitted.host_link / (4 * published.NIC)
        return fitted._replace(host_link=share * self.nics * self.nic, per_host=self.per_host)

    @cached_property
    def sharding(self) -> Sharding:
        """What fully sharded training reaches here: ZeRO-3 of 2021 on A100s and before, FSDP of
        2024 on H100s.
        """
        fitted = published.sharding_of_today() if self.gpu == "H100" else published.megatron()[1]
        return fitted._replace(ring=published.megatron()[1].ring * self.nic / published.NIC)

    @cached_property
    def compute_s(self) -> float:
        """Seconds that a device computes in a step, all its samples at once."""
        alone = Split(1, 1, 1, self.samples)
        return step_s(self.shape, alone, self.machine, self.samples, self.recompute)


class Plan(NamedTuple):
    """One plan: memory of a device (GB), seconds of a step, and the part of them in which a device
    does not compute.
    """

    name: str
    memory_gb: float
    step_s: float
    waiting_s: float
    fits: bool
    complexity: int


def decide(*setting: Any, **settings: Any) -> tuple[Plan | None, str, list[Plan]]:
    """(the plan to take or None, why in a few words, all plans) for the `Setting` with these
    arguments.

    The plan is the simplest within 10 % of the fastest; of equally simple plans, the one that needs
    the least memory.
    """
    plain = Setting(*setting, **settings)
    pairs = zip(ways(plain), ways(replace(plain, recompute=True)), strict=True)
    plans = [less if less.fits and not more.fits else more for more, less in pairs]
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        least = min(plan.memory_gb for plan in plans)
        return (
            None,
            f"even split over all of them it needs {least:,.0f} GB per device; take more devices",
            plans,
        )
    fastest = min(plan.step_s for plan in fitting)
    near = [plan for plan in fitting if plan.step_s <= SIMPLER * fastest]
    chosen = min(near, key=lambda plan: (plan.complexity, plan.memory_gb))
    share = 100 * chosen.waiting_s / chosen.step_s
    return (
        chosen,
        f"{readable(chosen.step_s)} s per step, {share:.0f} % of it waiting{unchecked(plain)}",
        plans,
    )


def readable(value: float) -> str:
    """A number to read: two digits below 10, and whole from there on ("0.29", "5.2", "3,460"),
    never 3.5e+03.
    """
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.2g}"


def unchecked(setting: Setting) -> str:
    """Words on a setting beyond CHECKED, which has the least and most billions and the most devices
    of each GPU.
    """
    low, high, devices = CHECKED[setting.gpu]
    if low <= setting.billions <= high and setting.devices <= devices:
        return ""
    return (
        f"; beyond what was checked: {low:g} to {high:g} billion on up to {devices} {setting.gpu}s"
    )


def ways(setting: Setting) -> list[Plan]:
    """All plans for a setting, the simplest first; of plans with tensor or pipeline ways the
    fastest of each kind.
    """
    devices, per_host, compute_s = setting.devices, setting.per_host, setting.compute_s
    if devices == 1:
        return [plan(setting, "one device", 16, compute_s, 0)]
    forward_s = compute_s / (4 if setting.recompute else 3)
    average_s = max(
        compute_s, forward_s + all_reduce_s(setting)
    )  # The all-reduce hides under the backward pass.
    two_layers = 4 / setting.shape.layers
    plans = [
        plan(setting, "DDP", 16, average_s, 0),
        plan(setting, "ZeRO-1", 4 + 12 / devices, average_s, 1),
        plan(setting, "fully sharded", 16 / devices + two_layers, sharded_s(setting, devices), 1),
    ]
    if devices > per_host > 1:
        seconds = sharded_s(setting, per_host) + average_s - compute_s
        plans.append(
            plan(setting, "sharded in a host, DDP between", 16 / per_host + two_layers, seconds, 2)
        )
    splits = list(all_splits(setting))
    for wanted in ((True, False), (False, True), (True, True)):
        kind = [plan for split, plan in splits if (split.tensor > 1, split.pipeline > 1) == wanted]
        if kind:
            plans.append(
                min(
                    kind,
                    key=lambda plan: (not plan.fits, plan.step_s if plan.fits else plan.memory_gb),
                )
            )
    return plans


def all_splits(setting: Setting) -> Iterator[tuple[Split, Plan]]:
    """Every split into tensor ways inside a host, pipeline and data ways, with micro-batches up to
    8; and its plan.
    """
    tensors = [ways for ways in (1, 2, 4, 8) if setting.per_host % ways == 0]
    for tensor, stages, size in product(tensors, range(1, setting.shape.layers + 1), (1, 2, 4, 8)):
        data, rest = divmod(setting.devices, tensor * stages)
        if not rest and tensor * stages > 1 and setting.samples * tensor * stages % size == 0:
            split = Split(tensor, data, stages, size)
            yield split, split_plan(setting, split)


def split_plan(setting: Setting, split: Split) -> Plan:
    """The plan of tensor, pipeline and data parallelism together."""
    seconds = step_s(
        setting.shape, split, setting.machine, setting.samples * setting.devices, setting.recompute
    )
    in_flight = min(
        split.pipeline, setting.samples * split.tensor * split.pipeline // split.micro_batch
    )
    left = activations(setting, split.micro_batch, split.tensor, in_flight / split.pipeline)
    ways = [(split.tensor, "tensor"), (split.pipeline, "pipeline"), (split.data, "data")]
    name = " x ".join(f"{number} {way}" for number, way in ways if number > 1)
    complexity = 2 + (split.tensor > 1 and split.pipeline > 1)
    return plan(setting, name, 16 / split.tensor / split.pipeline, seconds, complexity, left)


def plan(
    setting: Setting,
    name: str,
    per_parameter: float,
    seconds: float,
    complexity: int,
    left: float | None = None,
) -> Plan:
    """The plan that keeps `per_parameter` bytes, and `left` bytes of activations: by default those
    of all samples.
    """
    left = activations(setting, setting.samples) if left is None else left
    memory_gb = (per_parameter * setting.parameters + left) / 1e9
    name += ", recomputing" if setting.recompute else ""
    waiting_s = max(0.0, seconds - setting.compute_s)
    return Plan(name, memory_gb, seconds, waiting_s, memory_gb <= setting.memory_gb, complexity)


def activations(setting: Setting, sequences: float, tensor: int = 1, share: float = 1.0) -> float:
    """Bytes of activations kept for backward in a `share` of all layers; when recomputing, in full
    for one layer.
    """
    shape = setting.shape
    values = sequences * shape.context * shape.width
    whole = (10 + 24 / tensor) * values
    words = 4 * sequences * shape.context * shape.vocabulary / tensor
    return words + (
        whole + 2 * values * shape.layers * share
        if setting.recompute
        else whole * shape.layers * share
    )


def sharded_s(setting: Setting, devices: int) -> float:
    """Seconds of a step that is fully sharded over this many of the devices."""
    batch = setting.samples * devices
    return fully_sharded_s(
        setting.shape, devices, setting.machine, setting.sharding, batch, setting.recompute
    )


def all_reduce_s(setting: Setting) -> float:
    """Seconds of the gradients' all-reduce in two levels: rings share a host's NICs, messages
    follow each other.
    """
    hosts = setting.devices // setting.per_host
    rate = (
        setting.machine.inside
        if hosts == 1
        else min(setting.machine.inside, setting.machine.host_link)
    )
    latencies = 2 * (hosts - 1) + 2 * (setting.per_host - 1)
    return (
        2 * (setting.devices - 1) / setting.devices * 2 * setting.parameters / rate
        + latencies * LATENCY_S
    )
