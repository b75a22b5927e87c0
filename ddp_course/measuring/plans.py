"""Which way of training for which model and machine: memory and step time of each, by closed forms, and a choice.

A transformer of P parameters has L layers of width w with P = 12 L w² and, as published models have it, w = 128 L.
Parameters, gradients and Adam's state are float32, 16 P bytes; activations bfloat16, 34 w bytes a token and layer
(Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022). A step computes 6 P
operations a token, two thirds of them backward. Gradients are p = 4 P bytes; K devices, D of them on each host.

    way                  kept of 16 P      sent by a device                          hidden under
    DDP                  16 P              2(K-1)/K p                                backward
    ZeRO-1               8 P + 8 P/K       2(K-1)/K p                                backward
    fully sharded        16 P/K + 2 layers 3(K-1)/K p                                forward and backward
    sharded in a host    16 P/D + 2 layers 3(D-1)/D p inside, 2(H-1)/H p/D outside   forward and backward
    S-stage pipelines    16 P/S            activations; 2(R-1)/R p/S, R = K/S        (S-1)/(M+S-1) of the step idles

Where that is too much, activations are recomputed (gradient checkpointing): only every layer's input is kept, 2 w bytes
a token, for a third more computing. The devices of a host share its link. An
estimate, good for orders of magnitude: no latency, every layer alike.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ..running.units import bits_per_second, readable

LOCAL_BITS_S = 2.4e12  # NVLink of an A100, each way: 300 GB/s (NVIDIA A100 datasheet, 2020)
FLOPS = 120e12  # of an A100's 312e12 peak in bfloat16, what large models reach (Korthikanti et al. 2022)
SIMPLER = 1.1  # a more complicated way must be that much faster
MICROBATCHES = 4  # times the stages of a pipeline


class Setting(NamedTuple):
    """Model and machine: parameters, GB of a device, devices, bits a second of a host's link, devices a host."""

    parameters: float
    memory_gb: float
    devices: int
    bits_s: float
    per_host: int
    samples: int
    context: int
    recompute: bool = False

    @property
    def layers(self) -> float:
        """Layers of a model whose width is 128 times their number."""
        return (self.parameters / (12 * 128**2)) ** (1 / 3)

    @property
    def activation_bytes(self) -> float:
        """Bytes that a device's samples leave behind in all layers; when recomputing, whole in one layer only."""
        each = 2 + 34 / self.layers if self.recompute else 34
        return each * 128 * self.layers**2 * self.samples * self.context

    @property
    def compute_s(self) -> float:
        """Seconds that a device computes in a step."""
        return (8 if self.recompute else 6) * self.parameters * self.samples * self.context / FLOPS

    def all_reduce_s(self, nbytes: float, ranks: int, sharing: int = 1) -> float:
        """Seconds of a ring over `ranks` devices, inside one host if they fit; `sharing` rings use a host's link."""
        moved = 2 * (ranks - 1) / ranks * nbytes * 8
        return moved / LOCAL_BITS_S if ranks <= self.per_host and sharing == 1 else moved * sharing / self.bits_s


class Plan(NamedTuple):
    """One way: memory of a device (GB), seconds of a step, and those of them in which the device waits or idles."""

    name: str
    memory_gb: float
    step_s: float
    waiting_s: float
    fits: bool


def decide(
    billions: float,
    memory_gb: float,
    devices: int,
    bandwidth: str,
    per_host: int = 8,
    samples: int = 4,
    context: int = 2048,
) -> tuple[Plan | None, str, list[Plan]]:
    """(the plan to take or None, why in a few words, all plans): the simplest that is within 10 % of the fastest.

    `bandwidth` is that of a host's link ("100Gbit"), `samples` are those of a device in a step, `context` their tokens.
    Raises ValueError where hosts of `per_host` cannot be filled.
    """
    if devices > per_host and devices % per_host:
        raise ValueError(f"{devices} devices do not fill hosts of {per_host}; choose a multiple of {per_host}")
    setting = Setting(
        1e9 * billions, memory_gb, devices, bits_per_second(bandwidth), min(per_host, devices), samples, context
    )
    pairs = zip(ways(setting), ways(setting._replace(recompute=True)), strict=True)
    plans = [frugal if frugal.fits and not plain.fits else plain for plain, frugal in pairs]
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        least = min(plan.memory_gb for plan in plans)
        return None, f"even split over all of them it needs {least:,.0f} GB a device", plans
    fastest = min(plan.step_s for plan in fitting)
    chosen = next(plan for plan in fitting if plan.step_s <= SIMPLER * fastest)
    share = 100 * chosen.waiting_s / chosen.step_s
    return chosen, f"{readable(chosen.step_s)} s a step, {share:.0f} % of it waiting", plans


def ways(setting: Setting) -> Iterator[Plan]:
    """All plans for a setting, the simplest first."""
    devices, per_host, p = setting.devices, setting.per_host, 4 * setting.parameters
    hosts, state = devices // per_host, 16 * setting.parameters
    two_layers = 2 * p / setting.layers
    if devices == 1:
        yield plan(setting, "one device", state, 0.0, 0.0)
        return
    average_s = setting.all_reduce_s(p, devices)
    backward_s, compute_s = setting.compute_s * 2 / 3, setting.compute_s
    yield plan(setting, "DDP", state, average_s, backward_s)
    yield plan(setting, "ZeRO-1", state / 2 + state / 2 / devices, average_s, backward_s)
    yield plan(setting, "fully sharded", state / devices + two_layers, 1.5 * average_s, compute_s)
    if hosts > 1 and per_host > 1:
        inside, between = setting.all_reduce_s(p, per_host), setting.all_reduce_s(p / per_host, hosts, per_host)
        kept = state / per_host + two_layers
        yield plan(setting, "sharded in a host, DDP between", kept, 1.5 * inside + between, compute_s)
    stages = 2
    while stages <= devices and stages <= setting.layers:
        if devices % stages == 0:
            yield pipeline(setting, stages)
        stages *= 2


def pipeline(setting: Setting, stages: int) -> Plan:
    """Pipelines of `stages` devices, through the hosts one after the other; copies of them average their gradients."""
    replicas, microbatches = setting.devices // stages, MICROBATCHES * stages
    bubble_s = setting.compute_s * (stages - 1) / microbatches
    crossing = 2 * 128 * setting.layers * setting.samples * stages * setting.context  # bytes forward, as many backward
    links = min(setting.per_host, replicas)  # pipelines that share a host's link
    outside = setting.devices > setting.per_host
    activations_s = 8 * crossing * links / setting.bits_s if outside else 8 * crossing / LOCAL_BITS_S
    average_s = setting.all_reduce_s(4 * setting.parameters / stages, replicas)
    sent_s = max(0.0, activations_s - setting.compute_s) + average_s
    kept = 16 * setting.parameters / stages + setting.activation_bytes / MICROBATCHES
    name = f"{stages}-stage pipeline" + (f" x {replicas} replicas" if replicas > 1 else "")
    return made(setting, name, kept, bubble_s + sent_s)


def plan(setting: Setting, name: str, state: float, sent_s: float, hidden_s: float) -> Plan:
    """A plan that keeps `state` bytes and all activations, and sends for `sent_s`, `hidden_s` of it under computing."""
    return made(setting, name, state + setting.activation_bytes, max(0.0, sent_s - hidden_s))


def made(setting: Setting, name: str, kept: float, waiting_s: float) -> Plan:
    """The plan that keeps `kept` bytes and waits for `waiting_s` seconds."""
    name += ", recomputing" if setting.recompute else ""
    return Plan(name, kept / 1e9, setting.compute_s + waiting_s, waiting_s, kept / 1e9 <= setting.memory_gb)
