"""What every stage trains on: two real data sets that need no download, and one model of any size.

    digits     scikit-learn's handwritten digits, a small convolutional net, accuracy on held-out
               images
    bytes      the Python standard library's own source text, a byte-level GPT, bits per byte
    synthetic  random vectors, a stack of linear layers: for measuring communication

A global batch depends only on the seed and the step, and not on the number of ranks: K ranks get K
equal shares of the very batch that one device would get. That is why all stages compute the same
weights.
"""

import inspect
import math
import os
import random
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from .base.losses import cross_entropy

NAMES = ("digits", "bytes", "synthetic")
Batch = tuple[Tensor, Tensor]  # inputs and targets


def make(name: str, **options: Any) -> "Problem":
    """Return the problem `name`: "digits", "bytes" or "synthetic".

    The options are those of the problem's class. Raises ValueError for other names and options.
    """
    if name not in NAMES:
        raise ValueError(f'unknown problem "{name}"; choose one of {", ".join(NAMES)}')
    chosen = {"digits": Digits, "bytes": Bytes, "synthetic": Synthetic}[name]
    known = inspect.signature(chosen).parameters
    if unknown := ", ".join(options.keys() - known):
        raise ValueError(f'"{unknown}" cannot be chosen for {name}, only {", ".join(known)}')
    return chosen(**options)


def shard(dataset_size: int, rank: int, world_size: int, epoch: int = 0, seed: int = 0) -> Tensor:
    """Return the indices of a rank's share of an epoch, a 1-D int64 tensor.

    All ranks' shares are equally long. The epoch's order is drawn from (seed + epoch), the same on
    every rank; rank r takes positions r, r+K, … Shares do not overlap, except that the epoch is
    padded with its first samples until K divides it, which counts these twice in an evaluation. The
    result equals `torch.utils.data.DistributedSampler`'s. Raises ValueError for a rank that is
    none.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}: ranks go from 0 to world_size - 1")
    order = torch.randperm(dataset_size, generator=torch.Generator().manual_seed(seed + epoch))
    padding = -dataset_size % world_size  # the samples that are missing until K divides the epoch
    positions = torch.arange(rank, dataset_size + padding, world_size)
    return order[positions % dataset_size]


def share(global_batch: int, world_size: int) -> int:
    """Return the number of samples of a global batch that each of `world_size` ranks gets.

    Raises ValueError if shares would be unequal.
    """
    if global_batch < 1 or global_batch % world_size:
        wanted = max(1, round(global_batch / world_size)) * world_size
        raise ValueError(
            f"{world_size} ranks cannot share a batch of {global_batch} equally; try {wanted}"
        )
    return global_batch // world_size


class Problem:
    """A data set with a model that learns it.

    The first dimension of `inputs` and `targets` are the samples.
    """

    training_loss: Callable = staticmethod(cross_entropy)
    optimizer: Callable = SGD
    name: str
    learning_rate: float
    global_batch: int
    steps: int
    new_model: Callable[[], nn.Module]

    def __init__(self, samples, held_out, dtype, device):
        self.inputs, self.targets = samples
        self.test_inputs, self.test_targets = held_out
        self.dtype = dtype
        self.device = device

    def model(self, seed: int = 0) -> nn.Module:
        """Return a new model whose weights depend on `seed` only.

        The state of the random generators stays as it is.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.new_model().to(self.device, self.dtype)

    def batches(
        self,
        global_batch: int,
        steps: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
    ) -> Iterator[Batch]:
        """Yield (inputs, targets) of `rank`'s share of the global batches `start` to `steps - 1`.

        Every epoch is shuffled again; the samples at its end that do not fill a whole global batch
        are left out. Raises ValueError if `world_size` does not divide `global_batch`, or if the
        data has fewer samples.
        """
        size = share(global_batch, world_size)
        per_epoch = len(self.targets) // global_batch
        if per_epoch == 0:
            raise ValueError(
                f"a batch of {global_batch} is more than the {len(self.targets)} samples of"
                f" {self.name}"
            )
        for step in range(start, steps):
            epoch, position = divmod(step, per_epoch)
            # Each epoch is drawn once.
            if position == 0 or step == start:
                indices = shard(len(self.targets), rank, world_size, epoch, seed)
            yield self.pick(indices[position * size : (position + 1) * size])

    def pick(self, indices: Tensor) -> Batch:
        """Return the (inputs, targets) of the samples with these indices."""
        return self.inputs[indices], self.targets[indices]

    def loss(self, model: nn.Module) -> float:
        """Return the mean loss of `model` on the held-out samples, in evaluation mode."""
        return functional.cross_entropy(outputs(model, self.test_inputs), self.test_targets).item()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return {name of a measure: its value on the held-out samples}."""
        return {"loss": self.loss(model)}


class Digits(Problem):
    """1,797 handwritten digits of 8 x 8 pixels, of which 360 are held out.

    They are from the UCI machine learning repository, and come with scikit-learn.
    """

    name = "digits"
    learning_rate = 0.05
    global_batch = 192
    steps = 24

    def __init__(self, dropout=0.0, dtype=torch.float32, device="cpu"):
        pixels, digits = _digit_images()
        # Pixels go from 0 to 16, and get a mean near 0 and a deviation near 1.
        images = torch.tensor(pixels, dtype=dtype, device=device).unsqueeze(1) / 6.0 - 0.8
        labels = torch.tensor(digits, device=device)
        super().__init__((images[360:], labels[360:]), (images[:360], labels[:360]), dtype, device)
        self.dropout = dropout

    def new_model(self) -> nn.Module:
        """Return a net of 88,092 parameters from (N, 1, 8, 8) pixels to (N, 10) logits.

        The number of parameters can be divided by 2, 3 and 4 ranks.
        """
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(self.dropout),
            nn.Linear(512, 150),
            nn.ReLU(),
            nn.Linear(150, 10),
        )

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return {"accuracy": the share of the held-out digits that the model names right}."""
        hits = outputs(model, self.test_inputs).argmax(1) == self.test_targets
        return {"accuracy": hits.double().mean().item()}


class Bytes(Problem):
    """The source text of Python's standard library, byte by byte; its last tenth is held out.

    `parameters` sets the size of the GPT, about 20,000 to 200 million; `context` is the number of
    bytes that it sees at a time.
    """

    name = "bytes"
    learning_rate = 0.3
    global_batch = 32
    steps = 80

    def __init__(
        self, parameters=1_000_000, context=64, dropout=0.0, dtype=torch.float32, device="cpu"
    ):
        text = torch.frombuffer(bytearray(standard_library_text()), dtype=torch.uint8)
        windows = text.unfold(0, context + 1, context + 1)
        held_out = len(windows) // 10
        # 128 windows, spread over the held-out text, are enough.
        stride = max(1, held_out // 128)
        tested = windows[-held_out:][::stride][:128]
        tested = tested.long().to(device)
        # The target of each byte is the byte after it.
        samples = (windows[:-held_out, :-1], windows[:-held_out, 1:])
        super().__init__(samples, (tested[:, :-1], tested[:, 1:]), dtype, device)
        self.parameters = parameters
        self.context = context
        self.dropout = dropout

    def pick(self, indices: Tensor) -> Batch:
        """Return inputs and targets, both (N, context) of int64, on the device."""
        inputs, targets = super().pick(indices)
        return inputs.to(self.device, torch.long), targets.to(self.device, torch.long)

    def new_model(self) -> nn.Module:
        """Return a `ByteGPT` of about `parameters` parameters."""
        return ByteGPT(*gpt_shape(self.parameters), self.context, self.dropout)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return {"bits_per_byte": …} on held-out text: 8 is guessing, 0 is knowing it by heart."""
        return {"bits_per_byte": self.loss(model) / math.log(2)}

    def sample(self, model: nn.Module, prompt: str = "def ", length: int = 100) -> str:
        """Return `prompt` and `length` more bytes from the model, unreadable ones replaced."""
        generator = torch.Generator().manual_seed(0)
        text = list(prompt.encode())
        for _ in range(length):
            window = torch.tensor([text[-self.context :]], device=self.device)
            chances = outputs(model, window)[0, :, -1].double().softmax(0).cpu()
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
        return bytes(text).decode(errors="replace")


class Synthetic(Problem):
    """Random vectors in `width` classes, where only the number of parameters matters.

    `parameters`, at most 10 billion, is rounded to whole layers of width x width, without biases.
    """

    name = "synthetic"
    learning_rate = 0.1
    global_batch = 24
    steps = 10

    def __init__(self, parameters=2**20, width=256, dtype=torch.float32, device="cpu"):
        if not 1 <= parameters <= 10**10:
            raise ValueError(
                f"a stack of {parameters:,} parameters is out of range; choose {width**2:,}, which"
                " are one layer, to 10,000,000,000"
            )
        generator = torch.Generator().manual_seed(0)
        sizes = (4096, 256)  # the numbers of samples to train on, and of those held out
        data = torch.randn(sum(sizes), width, generator=generator, dtype=torch.float64)
        labels = torch.randint(width, (sum(sizes),), generator=generator)
        inputs, test_inputs = data.to(device, dtype).split(sizes)
        targets, test_targets = labels.to(device).split(sizes)
        super().__init__((inputs, targets), (test_inputs, test_targets), dtype, device)
        self.layers = max(1, round(parameters / width**2))
        self.width = width

    def new_model(self) -> nn.Module:
        """Return linear layers with ReLU between them, from (N, width) to (N, width)."""
        stack = nn.Sequential()
        for _ in range(self.layers):
            layer = nn.Linear(self.width, self.width, bias=False)
            # Smaller weights would let the signal fade.
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            stack.extend([layer, nn.ReLU()])
        # Logits come out of a linear layer, so there is no ReLU after the last one.
        return stack[:-1]


class TransformerBlock(nn.Module):
    """A transformer block: causal self-attention, then a two-layer net, each added to its input."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.head_width = width // heads
        self.before_attention = nn.LayerNorm(width)
        self.before_mlp = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's outputs, (N, T, width), for inputs of the same shape."""
        x = x + self.dropout(self.attend(self.before_attention(x)))
        return x + self.dropout(self.mlp(self.before_mlp(x)))

    def attend(self, x: Tensor) -> Tensor:
        """Return what every position takes from itself and from the positions before it."""
        samples, length, _ = x.shape
        # One tensor (N, T, 3 · width) becomes three of (N, heads, T, head_width).
        joined = self.qkv(x).view(samples, length, 3, -1, self.head_width)
        query, key, value = joined.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class ByteGPT(nn.Module):
    """A GPT over bytes, from (N, T) of int64 below 256 to logits (N, 256, T).

    This is the shape that `cross_entropy` needs.
    """

    def __init__(self, layers, width, context, dropout=0.0):
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, max(1, width // 32), dropout) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)
        # The bytes' vectors keep torch's deviation of 1: beside it positions and head begin small,
        # so that the model tells bytes apart from the first step on.
        for layer in (self.positions, self.head):
            nn.init.normal_(layer.weight, std=0.02)

    def forward(self, indices: Tensor) -> Tensor:
        """Return the logits of the byte after each position."""
        return self.predict(self.blocks(self.embed(indices)))

    def embed(self, indices: Tensor) -> Tensor:
        """Return the vectors of bytes and their positions, (N, T, width), for (N, T) of int64."""
        return self.dropout(self.bytes(indices) + self.positions.weight[: indices.shape[1]])

    def predict(self, x: Tensor) -> Tensor:
        """Return the logits, (N, 256, T), for the blocks' outputs, (N, T, width)."""
        return self.head(self.norm(x)).transpose(1, 2)

    def layers(self) -> list[nn.Module]:
        """Return the same model as a list of modules to run one after the other, for a pipeline."""
        first = MethodModule(self.embed, self.bytes, self.positions, self.dropout)
        last = MethodModule(self.predict, self.norm, self.head)
        return [first, *self.blocks, last]


class MethodModule(nn.Module):
    """A module that runs a method of a model, and has the model's layers that the method uses."""

    def __init__(self, method, *layers):
        super().__init__()
        self.method = method
        self.used = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the method returns."""
        return self.method(x)


def gpt_shape(parameters: int) -> tuple[int, int]:
    """Return (layers, width) of the GPT whose size is nearest to `parameters`.

    Raises ValueError outside of 20 thousand to 200 million parameters.
    """
    if not 20_000 <= parameters <= 200_000_000:
        raise ValueError(
            f"a GPT of {parameters:,} parameters is out of range; choose 20,000 to 200,000,000"
        )
    distances = {}
    for layers in range(1, 25):
        # A head has a width of 32, so the model's width is a multiple.
        for width in range(32, min(64 * layers, 1024) + 1, 32):
            # A block has about 12 width²; bytes, 64 positions and head together about 600 width.
            size = 12 * layers * width**2 + 600 * width
            distances[layers, width] = abs(size - parameters)
    return min(distances, key=lambda shape: distances[shape])


@cache
def standard_library_text() -> bytes:
    """Return 4 MB of the standard library's source, without packages installed beside it."""
    folder = Path(os.__file__).parent
    files = sorted([*folder.glob("*.py"), *folder.glob("[a-z]*/*.py")])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    texts = [file.read_bytes() for file in files if file.parent.name not in skipped]
    # After this the held-out end of the text is like the rest of it.
    random.Random(0).shuffle(texts)
    return b"".join(texts)[:4_000_000]


@cache
def _digit_images():
    """Return pixels (1797, 8, 8) of 0 to 16 and labels, in a fixed random order.

    They are read from the file inside scikit-learn, as importing the library would cost every rank
    a second.
    """
    library = Path(find_spec("sklearn").origin).parent
    path = library / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(path, delimiter=",", dtype=np.int64)
    np.random.default_rng(0).shuffle(table)
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1]


def outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return what `model` computes from the inputs in evaluation mode, without gradients."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return model(inputs)
    finally:
        model.train(training)
