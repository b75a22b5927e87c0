"""The four networks of PyTorch's published DDP table, as layer sizes: nothing to download, nothing to run.

Source of the shapes: He et al., "Deep Residual Learning", 2016 (ResNet-50, -101), and Xie et al., "Aggregated
Residual Transformations", 2017 (ResNeXt-50 32x4d, ResNeXt-101 32x8d), for 224 x 224 pixels and 1,000 classes.
"""

from collections.abc import Iterator

from .model import Layer, Profile

BLOCKS = {"50": (3, 4, 6, 3), "101": (3, 4, 23, 3)}
SHAPES = {  # blocks of each stage, groups, width of a group at the first stage
    "resnet50": (BLOCKS["50"], 1, 64),
    "resnet101": (BLOCKS["101"], 1, 64),
    "resnext50": (BLOCKS["50"], 32, 4),
    "resnext101": (BLOCKS["101"], 32, 8),
}


def layers(name: str) -> Iterator[tuple[str, int, int]]:
    """Yield (name, parameters, multiplications per picture) for each layer of the network, in forward order.

    A convolution counts with its batch normalisation. The names are those of SHAPES.
    """
    blocks, groups, group_width = SHAPES[name]
    yield _convolution("stem", 3, 64, 7, 112)
    channels, side = 64, 56
    for stage, count in enumerate(blocks):
        middle, out = groups * group_width * 2**stage, 256 * 2**stage
        for block in range(count):
            before, label = side, f"stage{stage + 1}.{block + 1}"
            side = side // 2 if stage and not block else side
            yield _convolution(f"{label}.reduce", channels, middle, 1, before)
            yield _convolution(f"{label}.middle", middle, middle, 3, side, groups)
            yield _convolution(f"{label}.expand", middle, out, 1, side)
            if not block:
                yield _convolution(f"{label}.shortcut", channels, out, 1, side)
            channels = out
    yield "classifier", channels * 1000 + 1000, channels * 1000


def profile(name: str, compute_s: float, gradient_bytes: int = 4) -> Profile:
    """A `Profile` whose step computes for `compute_s` seconds: a third forward, the rest backward, by multiplications.

    `gradient_bytes` is the size of one number. Backward costs twice a forward: gradients of inputs and of weights.
    """
    table = list(layers(name))
    unit = compute_s / (3 * sum(work for *_, work in table))
    return Profile(
        tuple(Layer(label, work * unit, 2 * work * unit, size * gradient_bytes) for label, size, work in table)
    )


def _convolution(name, channels_in, channels_out, kernel, side, groups=1):
    weights = channels_in // groups * channels_out * kernel**2
    return name, weights + 2 * channels_out, weights * side**2
