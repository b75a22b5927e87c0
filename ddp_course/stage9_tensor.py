"""Stage 9: layers are split too. Each rank holds a slice of every large matrix, and T ranks work on
the same samples.

A linear layer y = x Wᵀ can be split in two ways (the names are those of Wᵀ, by which x is
multiplied):

    column-split   a rank has some of W's outputs   needs all of x      computes some of y
    row-split      a rank has some of W's inputs    needs some of x  computes one of T terms of y:
                                                                     all-reduce

A column-split layer's outputs are split as a row-split layer needs its inputs: a pair needs one
all-reduce per pass:

               x ──Enter──> column-split ──> activation ──> row-split ──Leave──> y
    forward      as it is                                              all-reduce
    backward     all-reduce                                            as it is

A transformer block is two pairs: attention, whose heads are shared out, and the MLP. If its
activations x have a bytes, a ring sends 2(T-1)/T a in each of four all-reduces per block and step.
All other layers are whole on every rank.

A mesh of D x T ranks combines this with data parallel training: rank = d T + t. For D = T = 2:

               t = 0     t = 1
    d = 0      rank 0    rank 1      a row: the same samples, different slices; activations are
                                     added up
    d = 1      rank 2    rank 3      a column: different samples, the same slices; gradients are
                                     averaged

Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053 (2019); its f and g are our Enter and Leave.
"""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear
from torch.optim import SGD

from .problems import TransformerBlock
from .running import checkpoint, wire
from .stage3_paramserver import broadcast_parameters, gradients
from .stage4_ring import average_on_ring, ring_all_reduce
from .stage7_sharded import clipping
from .stage8_pipeline import mesh

ELEMENTWISE = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
)  # these may stand between the two layers of a pair


class Enter(torch.autograd.Function):
    """Into a column-split layer: forward x goes on as it is; backward the gradient of x is the sum
    of all ranks'.
    """

    @staticmethod
    def forward(ctx, x, all_reduce):
        ctx.all_reduce = all_reduce
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.all_reduce(gradient.clone()), None


class Leave(torch.autograd.Function):
    """Out of a row-split layer: forward y is the sum of all ranks' terms; backward each term has
    y's gradient.
    """

    @staticmethod
    def forward(ctx, term, all_reduce):
        ctx.mark_dirty(term)
        return all_reduce(term)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Cut(NamedTuple):
    """Which slice of a tensor of this `shape` a rank has: the indices `mine` of dimension `dim`."""

    dim: int
    mine: torch.Tensor
    shape: torch.Size
    all_reduce: Callable

    def of(self, whole):
        """This rank's slice of a whole tensor."""
        return whole.detach().index_select(self.dim, self.mine.to(whole.device))

    def whole(self, piece):
        """The whole tensor from every rank's slice; all ranks call this."""
        indices = self.mine.to(piece.device)
        return self.all_reduce(
            piece.new_zeros(self.shape).index_copy_(self.dim, indices, piece.detach())
        )


class SplitLinear(nn.Module):
    """This rank's slice of a linear layer: its outputs or inputs with the indices `mine`."""

    split_along: dict[str, int]  # the dimension of weight and bias that is split

    def __init__(self, layer, mine, all_reduce):
        super().__init__()
        self.whole_layer, self.all_reduce = (
            [layer],
            all_reduce,
        )  # in a list, `layer` is not a submodule
        self.weight, self.bias = (
            layer.weight,
            layer.bias,
        )  # an optimizer may know these objects already
        for name, parameter in layer.named_parameters():
            if name in self.split_along:
                parameter.cut = Cut(self.split_along[name], mine, parameter.shape, all_reduce)
                parameter.data, parameter.grad = parameter.cut.of(parameter), None
                parameter.register_post_accumulate_grad_hook(guard)


def guard(parameter):
    """The hook: make the gradient of a slice refuse its norm, which `clip_grad_norm_` computes over
    all slices.
    """
    if hasattr(parameter, "cut") and parameter.shape != parameter.cut.shape:
        parameter.grad = parameter.grad.as_subclass(clipping.Part)


class ColumnLinear(SplitLinear):
    """Some of a linear layer's outputs: (…, inputs) to (…, len(mine)). All ranks are given the same
    inputs.
    """

    split_along = {"weight": 0, "bias": 0}

    def forward(self, x):
        return linear(Enter.apply(x, self.all_reduce), self.weight, self.bias)


class RowLinear(SplitLinear):
    """Some of a linear layer's inputs: (…, len(mine)) to (…, outputs). All ranks return the same
    outputs.
    """

    split_along = {"weight": 1}

    def forward(self, x):
        y = Leave.apply(linear(x, self.weight), self.all_reduce)
        return y if self.bias is None else y + self.bias  # once, not on every rank


def pairs(model):
    """Yield each pair that can be split: (parent, two layers' names, rows of the first and columns
    of the second).
    """
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            columns = torch.arange(module.out.in_features).view(-1, module.head_width)
            rows = torch.cat(
                [columns, columns + columns.numel(), columns + 2 * columns.numel()], dim=1
            )
            yield module, "qkv", "out", rows, columns
        children = list(module.named_children()) if isinstance(module, nn.Sequential) else []
        while len(children) > 2:
            (first, layer), (_, between), (last, after) = children[:3]
            if type(layer) is type(after) is nn.Linear and isinstance(between, ELEMENTWISE):
                yield module, first, last, *[torch.arange(layer.out_features).view(-1, 1)] * 2
                children = children[2:]
            children = children[1:]


def split(model, rank, ranks, all_reduce):
    """Leave in `model` slice `rank` of `ranks` of each pair that is used once and has units for all
    ranks.
    """
    uses = Counter(weight for _, weight in model.named_parameters(remove_duplicate=False))
    chosen = [pair for pair in pairs(model) if len(pair[3]) >= ranks]
    chosen = [
        pair
        for pair in chosen
        if all(uses[getattr(pair[0], name).weight] == 1 for name in pair[1:3])
    ]
    if not chosen:
        raise ValueError(
            f"{type(model).__name__} has no two linear layers that could be split over {ranks}"
            " ranks"
        )
    for parent, first, last, *units in chosen:
        rows, columns = (
            indices.tensor_split(ranks)[rank].flatten().sort().values for indices in units
        )
        setattr(parent, first, ColumnLinear(getattr(parent, first), rows, all_reduce))
        setattr(parent, last, RowLinear(getattr(parent, last), columns, all_reduce))
    return model


def parallelize(model, group=None):
    """Share out the layers of `model`, in place, over the ranks of `group`; all ranks call this
    with the same model.
    """
    states = (
        checkpoint.random_states()
    )  # all take those of the first rank, so that dropout drops the same
    checkpoint.set_random_state([states[wire.global_rank(0, group)]] * len(states))
    return split(
        model,
        dist.get_rank(group),
        dist.get_world_size(group),
        partial(ring_all_reduce, group=group),
    )


def restore(model):
    """Make all layers whole again, in place; all ranks call this. Return the model."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, SplitLinear):
                setattr(parent, name, child.whole_layer[0])
    for parameter in model.parameters():
        if hasattr(parameter, "cut"):
            parameter.data, parameter.grad = parameter.cut.whole(parameter), None
            del parameter.cut
    return model


def clip_grad_norm_(model, max_norm, group=None):
    """Scale the gradients of a split `model` so that their norm is at most `max_norm`; return the
    norm before.
    """
    counted = [
        p for p in model.parameters() if dist.get_rank(group) == 0 or hasattr(p, "cut")
    ]  # each element once
    total = clipping.clip_grad_norm_(counted, math.inf, 2.0, group, None)
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, total)
    return total


def train(model, batches, lr, tensor=None):
    """Train `model` in place, layers split over `tensor` ranks (default: all), on this mesh row's
    share of batches.
    """
    tensor = tensor or dist.get_world_size()
    groups = mesh(data=dist.get_world_size() // tensor, tensor=tensor)
    broadcast_parameters(model)
    parallelize(model, groups["tensor"])
    optimizer = SGD(model.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        average_on_ring(gradients(model), group=groups["data"])
        optimizer.step()
        losses.append(loss.item())
    restore(model)
    return losses
