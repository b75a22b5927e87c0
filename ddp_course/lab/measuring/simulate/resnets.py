"""The four networks of PyTorch's published DDP table, as sizes of layers.

So there is nothing to download and nothing to run.

Source of the shapes: He et al., "Deep Residual Learning", 2016 (ResNet-50, -101), and Xie et al.,
"Aggregated Residual Transformations", 2017 (ResNeXt-50 32x4d, ResNeXt-101 32x8d), for 224 x 224
pixels and 1,000 classes.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ....job import Layer, Profile


class Shape(NamedTuple):
    """The blocks of a network's stages, and the groups of a block's middle convolution.

    `group_width` is the width of a group at the first stage.
    """

    blocks: tuple[int, ...]
    groups: int
    group_width: int


SHAPES = {
    "resnet50": Shape((3, 4, 6, 3), groups=1, group_width=64),
    "resnet101": Shape((3, 4, 23, 3), groups=1, group_width=64),
    "resnext50": Shape((3, 4, 6, 3), groups=32, group_width=4),
    "resnext101": Shape((3, 4, 23, 3), groups=32, group_width=8),
}


def layers(name: str) -> Iterator[tuple[int, int]]:
    """Yield (parameters, multiplications per picture) for each layer of a network of SHAPES.

    The layers are in forward order, and a convolution counts with its batch normalisation.
    """
    shape = SHAPES[name]
    yield _convolution(3, 64, kernel=7, side=112)
    channels = 64
    side = 56  # A pooling layer without parameters has halved the picture.
    for stage, count in enumerate(shape.blocks):
        middle = shape.groups * shape.group_width * 2**stage
        out = 256 * 2**stage
        for block in range(count):
            yield _convolution(channels, middle, kernel=1, side=side)
            # The middle convolution of a first block halves the picture, except in the first stage.
            if block == 0 and stage > 0:
                side //= 2
            yield _convolution(middle, middle, kernel=3, side=side, groups=shape.groups)
            yield _convolution(middle, out, kernel=1, side=side)
            # The first block's shortcut changes the channels.
            if block == 0:
                yield _convolution(channels, out, kernel=1, side=side)
            channels = out
    # The head has 1,000 classes.
    yield channels * 1000 + 1000, channels * 1000


def profile(name: str, compute_s: float) -> Profile:
    """Return a `Profile` of `compute_s` seconds, a third of them forward, the rest backward.

    A layer's share is that of its multiplications; gradients of inputs and of weights make backward
    cost twice forward.
    """
    sizes = list(layers(name))
    multiplications = sum(work for _, work in sizes)
    # Of three parts of the time, forward takes one and backward takes two.
    unit = compute_s / (3 * multiplications)
    profiled = []
    for parameters, work in sizes:
        profiled.append(Layer("", work * unit, 2 * work * unit, 4 * parameters))
    return Profile(tuple(profiled))


def _convolution(channels_in, channels_out, kernel, side, groups=1):
    """Return the parameters and multiplications of a convolution and its normalisation.

    The output is `side` pixels wide; the normalisation has two parameters for each channel.
    """
    weights = channels_in // groups * channels_out * kernel**2
    return weights + 2 * channels_out, weights * side**2
