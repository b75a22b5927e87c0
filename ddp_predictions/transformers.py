"""Seconds of a GPT's training step under tensor, data and pipeline parallelism: closed forms, five
numbers fitted.

A `Shape` has L layers of width h; a micro-batch is n tokens; T GPUs share each layer, P stages
share the layers, D copies share the batch. With activations recomputed, a layer runs 4 times per
micro-batch (forward, again, and twice backward), and its T GPUs sum their outputs 6 times. M
micro-batches per copy:

    layer      4 (24 h + 4 s) h n / T flops, 4 passes over n h / T values that no matrix product
               touches, a launch
    tensor     6 all-reduces of 2 n h bytes, over the host's wires, or over its link where T exceeds
               the host
    stage      L/P layers, and 2 n h / T bytes to each neighbour over the GPU's share of the link
    step       (M + P - 1) stages, M times the output words (6 h V n / T flops), the all-reduce of
               bf16 gradients

Fully sharded, a GPU computes for c seconds, and gathers and sends 3 (K-1)/K 2 bytes per parameter
in m seconds: the longer of the two counts, and a fitted part of the shorter. Schedules other than
1F1B change P - 1 (`idle_stages`).

Sources: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", 2022; Qi et al., "Zero Bubble Pipeline Parallelism", 2024.
"""

from math import ceil
from typing import NamedTuple

LATENCY_S = 1e-5  # A message between GPUs takes this long; it is assumed, not fitted.
A100_FLOPS, A100_MEMORY = (
    312e12,
    2.0e12,
)  # An A100 has these flops in bfloat16 and bytes per second.
# NVIDIA (2017, 2020, 2022) states 16-bit flops, and bytes per second of memory and of NVLink each
# way.
DATASHEETS = {
    "V100": (125e12, 0.9e12, 150e9),
    "A100": (A100_FLOPS, A100_MEMORY, 300e9),
    "H100": (989e12, 3.35e12, 450e9),
}


class Shape(NamedTuple):
    """A GPT: `layers` of `width`, sequences of `context` tokens out of a `vocabulary`."""

    layers: int
    width: float
    context: int = 2048
    vocabulary: int = 51_200

    @property
    def parameters(self) -> float:
        """Weights of all layers and of the words."""
        return 12 * self.layers * self.width**2 + self.vocabulary * self.width

    def flops(self, sequences: float) -> float:
        """Operations of a step with recomputing, as Narayanan et al. count them."""
        parts = (
            1 + self.context / (6 * self.width) + self.vocabulary / (16 * self.layers * self.width)
        )
        return 96 * sequences * self.context * self.layers * self.width**2 * parts


class Split(NamedTuple):
    """How GPUs share a step: ways of tensor, data and pipeline parallelism, and the sequences of a
    micro-batch.
    """

    tensor: int
    data: int
    pipeline: int
    micro_batch: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of all ways together."""
        return self.tensor * self.data * self.pipeline


class Machine(NamedTuple):
    """What a GPU and its links reach, fitted to published steps.

    `matmul` is the share of A100_FLOPS; `touched` bytes per value of an activation in 4 passes, at
    A100_MEMORY; `launch_s` seconds per layer and micro-batch; `inside` and `host_link` bytes per
    second of a GPU's wires to its neighbours and of a host's link to others.
    """

    matmul: float
    touched: float
    launch_s: float
    inside: float
    host_link: float
    per_host: int = 8

    def slower(self, factor: float, links: float = 1.0) -> "Machine":
        """A machine that needs `factor` times as long for everything, with `links` times the links
        between hosts.
        """
        matmul, inside, host_link = (
            rate / factor for rate in (self.matmul, self.inside, links * self.host_link)
        )
        touched, launch_s = self.touched * factor, self.launch_s * factor
        return Machine(matmul, touched, launch_s, inside, host_link, self.per_host)

    def on(self, gpu: str) -> "Machine":
        """The same shares of another GPU's datasheet; ValueError for a GPU that is not in
        DATASHEETS.
        """
        if gpu not in DATASHEETS:
            raise ValueError(
                f'there is no datasheet of "{gpu}"; choose one of {", ".join(DATASHEETS)}'
            )
        flops, memory, wires = (
            mine / a100 for mine, a100 in zip(DATASHEETS[gpu], DATASHEETS["A100"], strict=True)
        )
        return self._replace(
            matmul=self.matmul * flops, touched=self.touched / memory, inside=self.inside * wires
        )


class Sharding(NamedTuple):
    """Fitted to fully sharded training: bytes per second of its ring, and the part of the shorter
    time that shows.
    """

    ring: float
    shows: float


def step_s(
    shape: Shape, split: Split, machine: Machine, global_batch: int, recompute: bool = True
) -> float:
    """Seconds of a step on `global_batch` sequences; ValueError where the split cannot be."""
    micro_batches = count_micro_batches(shape, split, global_batch)
    weights = shape.parameters / split.tensor / split.pipeline
    average_s = (
        2
        * (split.data - 1)
        * (2 * weights / split.data / averaging_rate(split, machine) + LATENCY_S)
    )
    stage_s = ceil(shape.layers / split.pipeline) * layer_s(shape, split, machine, recompute)
    if split.pipeline > 1:
        outside = split.gpus > machine.per_host
        rate = machine.host_link / machine.per_host if outside else machine.inside
        stage_s += 2 * (
            2 * split.micro_batch * shape.context * shape.width / split.tensor / rate + LATENCY_S
        )
    slots = micro_batches + split.pipeline - 1
    return slots * stage_s + micro_batches * words_s(shape, split, machine) + average_s


def layer_s(shape: Shape, split: Split, machine: Machine, recompute: bool = True) -> float:
    """Seconds of a layer's passes on one micro-batch, with what its tensor-parallel GPUs send each
    other.
    """
    passes, ways = 4 if recompute else 3, split.tensor
    values = split.micro_batch * shape.context * shape.width
    products_s = (
        passes
        * (24 * shape.width + 4 * shape.context)
        * values
        / ways
        / (machine.matmul * A100_FLOPS)
    )
    others_s = passes / 4 * machine.touched * values / ways / A100_MEMORY
    rate = machine.inside if ways <= machine.per_host else min(machine.inside, machine.host_link)
    sums_s = 2 * (passes - 1) * 2 * (ways - 1) / ways * 2 * values / rate
    return products_s + others_s + sums_s + machine.launch_s


def words_s(shape: Shape, split: Split, machine: Machine) -> float:
    """Seconds of the output words, forward and backward, on one micro-batch."""
    flops = 6 * split.micro_batch * shape.context * shape.width * shape.vocabulary / split.tensor
    return flops / (machine.matmul * A100_FLOPS)


def averaging_rate(split: Split, machine: Machine) -> float:
    """Bytes per second of a ring of data-parallel copies: as many rings share a host's link as it
    has tensor ways.
    """
    if split.tensor * split.data <= machine.per_host:
        return machine.inside
    return min(machine.inside, machine.host_link / min(split.tensor, machine.per_host))


def fully_sharded_s(
    shape: Shape,
    gpus: int,
    machine: Machine,
    sharding: Sharding,
    global_batch: int,
    recompute: bool = True,
) -> float:
    """Seconds of a step of fully sharded training (ZeRO-3, FSDP) on `gpus` GPUs, one micro-batch on
    each.
    """
    split = Split(1, gpus, 1, max(1, global_batch // gpus))
    compute_s = shape.layers * layer_s(shape, split, machine, recompute) + words_s(
        shape, split, machine
    )
    rate = machine.inside if gpus <= machine.per_host else sharding.ring
    sent_s = 3 * (gpus - 1) * (2 * shape.parameters / gpus / rate + shape.layers * LATENCY_S)
    return max(compute_s, sent_s) + sharding.shows * min(compute_s, sent_s)


def count_micro_batches(shape: Shape, split: Split, global_batch: int) -> int:
    """How many micro-batches each copy of the model has in a step; ValueError, with what to do,
    where none fits.
    """
    if split.pipeline > shape.layers:
        raise ValueError(
            f"{split.pipeline} stages for {shape.layers} layers; give each stage at least one"
        )
    if global_batch % (split.data * split.micro_batch):
        each = f"{split.data} copies with micro-batches of {split.micro_batch}"
        raise ValueError(
            f"a batch of {global_batch} does not come out even over {each}; choose a multiple"
        )
    return int(global_batch // (split.data * split.micro_batch))


def idle_stages(
    schedule: str, stages: int, chunks: float, weights: float, left_over: float
) -> float:
    """How many micro-batches' time a stage idles in a step, by schedule (Qi et al. 2024, section
    2).

    `chunks` per stage of the interleaved schedule; `weights` is the share of a micro-batch's time
    that gradients of weights take, which zero-bubble schedules may postpone; `left_over` is the
    fitted share of ZB-2p's formula that its search for a better order leaves. The first three are
    what `stage8_pipeline.timetable` plays.
    """
    share = {
        "1F1B": 1.0,
        "1F1B-I": 1 / chunks,
        "ZB-1p": 1 - 2 * weights,
        "ZB-2p": left_over * (1 - 3 * weights),
    }
    return share[schedule] * (stages - 1)
