"""Predicts the seconds and memory of a transformer's training step, by one closed form.

A layer of W weights and width h computes a micro-batch of n tokens in sequences of s. T GPUs share
each layer, P stages share the layers, K copies share the batch:

    products    2 W n / T flops at `matmul` of the peak; twice as many in the backward pass
    attention   2 s h n / T flops (half the scores is masked) at `attend` of an A100's peak; other
                GPUs as multiprocessors and clock allow; 2.5 times as many backward
    memory      `touched` bytes per value, that is per token and unit of width
    launch      `launch` seconds per layer and micro-batch that no rate explains, and `moved` bytes
                per weight, which take as long whatever n is
    tensor      two all-reduces of 2 n h bytes in each pass, hidden by nothing
    ring        (K-1)/K bytes over NVLink or over the cards that its rings share, and a hop per GPU

What is sent for weights and gradients hides under computing: the longer of the two counts, and
`shows` of the shorter. Where a pass is run again, its part `again` of the forward pass is added.

    fsdp        gathers weights in each pass, and scatters gradients, per layer and micro-batch
    zero2       gathers once, and keeps the weights until the backward pass
    hybrid      as fsdp inside a host; all-reduce between hosts under the last backward pass
    zero1, ddp  reduce under the last backward pass; zero1 gathers under a forward pass
    pipeline    (M + P - 1) stages; each hands 4 n h / T bytes to a neighbour
    update      40 bytes through memory per own weight, 16 per gradient that is kept whole

Attention of 2021 computed, wrote and read all scores (`attention`: "unfused"), and Megatron hid
nothing (`overlap`: "no"): these are switches, with constants of their own in constants.csv.

Sources: Narayanan et al., SC 2021; Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022; Dao, "FlashAttention-2", 2023; Shah et al., "FlashAttention-3", 2024.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from manyranks import presets

from .frozen import constants

A100 = presets.ACCELERATORS["A100"]
UNDIVIDED = 10 / 34  # T GPUs do not divide this part of the activations (Korthikanti et al.).
EAGER = 260  # Norms, rotations and gates in plain torch operations move so many bytes per value.
UPDATE = 40  # AdamW reads and writes so many bytes per own weight.
GRADIENT = 16  # A gradient that is kept whole moves so many bytes: it is accumulated and read.
WAYS = ("ddp", "zero1", "zero1 in host", "zero2", "fsdp", "hybrid")
SHARDED = ("zero2", "fsdp", "hybrid")  # These divide the weights, too.
BY_HOST = ("zero1 in host", "hybrid")  # These divide what is kept inside each host only.


class Machine(NamedTuple):
    """The rates of a GPU and its links: flops, cycles and bytes per second, each way of a link.

    `nics` are the bytes per second of all network cards of a host together.
    """

    peak: float
    clock: float
    memory: float
    nvlink: float
    nics: float


@dataclass
class Run:
    """A training run: architecture, batch, machine and way.

    `ff` is the width of the MLP, which has a third matrix where it is `gated`; `kv_heads` are the
    heads of keys and values. `recompute` is the part of the forward pass that is run again.
    `reduce_bytes` are the bytes of a gradient that is sent. Links are in bits per second.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    gpu: str
    gpus: int
    ff: int
    kv_heads: int
    gated: bool = False
    gpus_per_host: int = 8
    network: float = 0.0
    inside: float = 0.0
    micro_batch: int = 1
    accumulate: int = 1
    tensor: int = 1
    pipeline: int = 1
    way: str = "fsdp"
    recompute: float = 0.0
    pure: bool = False
    reduce_bytes: int = 4
    attention: str = "fused"
    kernels: str = "compiled"
    overlap: bool = True
    model: str = ""

    @property
    def data(self) -> int:
        """The number of copies that share the batch."""
        return self.gpus // (self.tensor * self.pipeline)

    @property
    def tokens(self) -> int:
        """The tokens of a micro-batch."""
        return self.micro_batch * self.seq

    @property
    def weights(self) -> float:
        """The number of weights of a layer."""
        attention = 2 + 2 * self.kv_heads / self.heads
        matrices = 3 if self.gated else 2
        return self.hidden**2 * (attention + matrices * self.ff / self.hidden)

    @property
    def parameters(self) -> float:
        """The weights of all layers, of the input words and of the output words."""
        return self.layers * self.weights + 2 * self.vocab * self.hidden

    @property
    def stage_layers(self) -> int:
        """The layers of a pipeline's stage; some stages may have one less."""
        return ceil(self.layers / self.pipeline)

    @property
    def weights_on_gpu(self) -> float:
        """The weights of a GPU before they are sharded over copies."""
        layers = self.stage_layers * self.weights
        return (layers + 2 * self.vocab * self.hidden / self.pipeline) / self.tensor

    @property
    def inside_host(self) -> int:
        """The GPUs of a host, or all GPUs if there are fewer."""
        return min(self.gpus_per_host, self.gpus)

    @property
    def in_one_host(self) -> bool:
        """Whether all GPUs are in one host."""
        return self.gpus <= self.inside_host

    @property
    def ways(self) -> list[str]:
        """The ways that these hosts allow."""
        return [way for way in WAYS if way not in BY_HOST or not self.in_one_host]

    @property
    def shards(self) -> int:
        """The number of parts into which the copies of this way divide what they keep."""
        if self.way == "ddp":
            return 1
        if self.way in BY_HOST:
            return min(self.data, max(1, self.inside_host // self.tensor))
        return self.data

    @property
    def machine(self) -> Machine:
        """The rates of this run's GPU and links."""
        known = presets.ACCELERATORS[self.gpu]
        inside = self.inside or presets.LINKS[known.link].bandwidth
        network = self.network or known.network
        return Machine(known.rate, known.cycles, known.memory, inside / 8, network / 8)


class Work(NamedTuple):
    """The seconds of one pass of a layer, by what they are spent on."""

    products: float
    attention: float
    memory: float
    launch: float
    tensor: float


class Sending(NamedTuple):
    """The seconds of sending in `total`, and those that show: per micro-batch, once per step."""

    shown: float
    shown_once: float
    total: float


class Step(NamedTuple):
    """The seconds of a step by `parts`, and those of `sending`, of which a part is hidden."""

    parts: dict[str, float]
    sending: float

    @property
    def seconds(self) -> float:
        """The seconds of the whole step."""
        return sum(self.parts.values())

    @property
    def hidden(self) -> float:
        """The seconds of sending that do not show."""
        return max(0.0, self.sending - self.parts["sending that shows"])


def ring(run: Run, machine: Machine, nbytes: float, ranks: int, stride: int, numbers: Any) -> float:
    """Return the seconds of a gather or scatter of `nbytes` over `ranks` GPUs, `stride` apart.

    In a host it goes over NVLink; between hosts as many rings as `stride` share the cards.
    """
    if ranks <= 1:
        return 0.0
    rate = numbers["inside"] * machine.nvlink
    if ranks * stride > run.inside_host:
        rate = min(rate, numbers["outside"] * machine.nics / min(stride, run.inside_host))
    return (ranks - 1) * (nbytes / ranks / rate + numbers["hop"])


def between_copies(run: Run, machine: Machine, nbytes: float, numbers: Any) -> float:
    """Return the seconds of an all-reduce of `nbytes` by the GPUs that keep the same shard."""
    copies = run.data // run.shards
    stride = run.tensor * run.shards
    return 2 * ring(run, machine, nbytes, copies, stride, numbers)


def showing(computing: float, sending: float, numbers: Any) -> float:
    """Return the seconds that computing takes longer with sending beneath it."""
    both = max(computing, sending) + numbers["shows"] * min(computing, sending)
    return both - computing


def passes(run: Run, machine: Machine, numbers: Any) -> tuple[Work, Work]:
    """Return the forward and the backward pass of a layer on one micro-batch, as two `Work`s.

    The backward pass recomputes. The numbers `touched`, `score`, `launch` and `moved` are for both
    passes, and the forward pass has a third of each.
    """
    n = run.tokens / run.tensor
    peak = numbers["matmul"] * machine.peak
    products = 2 * run.weights * n / peak
    if run.attention == "fused":
        rate = A100.rate * machine.clock / A100.cycles
        attention = 2 * run.seq * run.hidden * n / (numbers["attend"] * rate)
        attention_backward = 2.5 * attention
    else:
        scores = run.heads * run.seq * n
        stored = numbers["score"] / 3 * scores / machine.memory
        attention = 4 * run.seq * run.hidden * n / peak + stored
        attention_backward = 2 * attention
    bytes_per_value = numbers["touched"]
    if run.kernels == "eager" and run.gated:
        bytes_per_value += EAGER
    share = UNDIVIDED + (1 - UNDIVIDED) / run.tensor
    values = run.tokens * run.hidden * share
    memory = bytes_per_value / 3 * values / machine.memory
    moving = numbers["moved"] * run.weights / run.tensor / machine.memory
    launch = (numbers["launch"] + moving) / 3
    # An all-reduce is a scatter and a gather, each a ring: four rings are two all-reduces.
    outputs = 2 * run.tokens * run.hidden
    tensor = 4 * ring(run, machine, outputs, run.tensor, stride=1, numbers=numbers)
    again = run.recompute
    forward = Work(products, attention, memory, launch, tensor)
    backward = Work(
        products=(2 + again) * products,
        attention=attention_backward + again * attention,
        memory=(2 + again) * memory,
        launch=2 * launch,
        tensor=(1 + again) * tensor,
    )
    return forward, backward


def sharded_sending(
    run: Run, machine: Machine, forward: float, backward: float, numbers: Any
) -> Sending:
    """Return what a way of SHARDED sends beneath each layer's `forward` and `backward` seconds."""
    weights = run.weights / run.tensor
    gather = ring(run, machine, 2 * weights, run.shards, run.tensor, numbers)
    scatter = ring(run, machine, run.reduce_bytes * weights, run.shards, run.tensor, numbers)
    second_gather = 0.0 if run.way == "zero2" else gather
    shown = showing(forward, gather, numbers)
    shown += showing(backward, scatter + second_gather, numbers)
    layers = run.stage_layers
    total = run.accumulate * layers * (gather + second_gather + scatter)
    shard = run.reduce_bytes * run.weights_on_gpu / run.shards
    average = between_copies(run, machine, shard, numbers)
    shown_once = showing(layers * backward, average, numbers)
    return Sending(layers * shown, shown_once, total + average)


def averaging(run: Run, machine: Machine, forward: float, backward: float, numbers: Any) -> Sending:
    """Return what copies with whole weights send: those of ZeRO-1, and of DDP with one shard."""
    nbytes = 2 * run.weights_on_gpu
    gather = ring(run, machine, nbytes, run.shards, run.tensor, numbers)
    scatter = gather + between_copies(run, machine, nbytes / run.shards, numbers)
    if run.shards > 1:
        gather += numbers["shard"] * run.shards
    shown_once = scatter + gather
    if run.overlap:
        shown_once = showing(run.stage_layers * backward, scatter, numbers)
        shown_once += showing(run.stage_layers * forward, gather, numbers)
    return Sending(0.0, shown_once, scatter + gather)


def output_seconds(run: Run, machine: Machine, layer: float, numbers: Any) -> float:
    """Return the seconds for a micro-batch's output words.

    A stage with one layer less than the others has the seconds of that `layer` for them.
    """
    logits = run.vocab * run.tokens / run.tensor
    seconds = 6 * run.hidden * logits / (numbers["matmul"] * machine.peak)
    seconds += numbers["logit"] * logits / machine.memory
    if run.layers % run.pipeline:
        return max(0.0, seconds - layer)
    return seconds


def handing_seconds(run: Run, machine: Machine, numbers: Any) -> float:
    """Return the seconds in which a stage hands activations and gradients to a neighbour."""
    if run.pipeline == 1:
        return 0.0
    rate = numbers["outside"] * machine.nics / run.inside_host
    if run.in_one_host:
        rate = numbers["inside"] * machine.nvlink
    return 4 * run.tokens * run.hidden / run.tensor / rate


def step(run: Run, machine: Machine | None = None, numbers: Any = None) -> Step:
    """Return the step of a run, on its own machine and with the frozen constants by default."""
    machine = machine or run.machine
    numbers = numbers or constants("today" if run.attention == "fused" else "of_2021")
    forward, backward = passes(run, machine, numbers)
    layer = sum(forward) + sum(backward)
    send = sharded_sending if run.way in SHARDED else averaging
    sending = send(run, machine, sum(forward), sum(backward), numbers)
    handing = handing_seconds(run, machine, numbers)
    stage = run.stage_layers * layer + sending.shown + handing
    own_weights = run.weights_on_gpu / run.shards
    whole_gradients = 0.0 if run.way in SHARDED else run.weights_on_gpu
    update = (UPDATE * own_weights + GRADIENT * whole_gradients) / machine.memory
    times = run.accumulate
    parts = {}
    for name, there, back in zip(Work._fields, forward, backward, strict=True):
        parts[name] = times * run.stage_layers * (there + back)
    parts["products"] += times * output_seconds(run, machine, layer, numbers)
    parts["memory"] += update
    parts["sending that shows"] = times * sending.shown + sending.shown_once
    parts["bubble"] = (run.pipeline - 1) * stage + times * handing
    return Step(parts, sending.total)


def tokens_per_s(run: Run, seconds: float) -> float:
    """Return the tokens per second and GPU."""
    return run.tokens * run.accumulate * run.data / run.gpus / seconds


def mfu(run: Run, seconds: float) -> float:
    """Return the model flops utilization: 6 N + 12 L s h flops per token, over the peak.

    This is PaLM's. N are all weights but those of the input words; recomputing does not count.
    """
    weights = run.parameters - run.vocab * run.hidden
    scores = run.layers * run.seq * run.hidden
    flops = 6 * weights + 12 * scores
    return flops * tokens_per_s(run, seconds) / run.machine.peak


def memory_gb(run: Run) -> dict[str, float]:
    """Return the least GB per GPU, by what is kept; workspace and fragments come on top."""
    state = 8 if run.pure else 16
    if run.way in SHARDED:
        per_weight = state / run.shards
        # In 16 bits there are all layers, or the one that computes and the next.
        gathered = 2 * run.weights_on_gpu if run.way == "zero2" else 4 * run.weights / run.tensor
    else:
        per_weight = 4 + (state - 4) / run.shards
        gathered = 0.0
    # Korthikanti et al. count 34 bytes per token and unit of width, of which 2 are for dropout.
    unfused = 5 * run.heads * run.seq if run.attention == "unfused" else 0
    n = run.tokens / run.tensor
    layer = (32 * run.hidden + unfused) * n
    inputs = 2 * n * run.hidden
    kept_of_layer = (1 - run.recompute) * layer + run.recompute * inputs
    in_flight = min(run.accumulate, run.pipeline)
    activations = in_flight * run.stage_layers * kept_of_layer + run.recompute * layer
    kept = {
        "weights, gradients, optimizer": per_weight * run.weights_on_gpu,
        "gathered layers": gathered,
        "activations": activations,
        "output words": 6 * n * run.vocab,
    }
    return {name: nbytes / 1e9 for name, nbytes in kept.items()}
