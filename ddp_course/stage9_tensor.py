"""Stage 9: layers are split, too: T ranks work on the same samples, each with slices of layers.

A linear layer y = x Wᵀ can be split in two ways (the names are those of Wᵀ, by which x is
multiplied):

    column-split   a rank has some of W's outputs   needs all of x    computes some of y
    row-split      a rank has some of W's inputs    needs some of x   computes one of T terms of y:
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

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.optim import SGD

from . import checkpoint, wire
from .base.losses import cross_entropy
from .base.replicas import check_replicas
from .base.torch_private import allow_foreach, as_plain_tensors, uncompiled, wrapper_around
from .mesh import mesh
from .problems import TransformerBlock
from .stage3_paramserver import broadcast_parameters, gradients
from .stage4_ring import average_on_ring, ring_all_reduce
from .stage7_sharded.clipping import total_norm
from .stage7_sharded.parts import PartOfParameter, refuse_with
from .stage7_sharded.shardable import check_model

# These may stand between the two layers of a pair, since they work element by element.
ACTIVATIONS = {nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid}


class Enter(torch.autograd.Function):
    """The way into a column-split layer.

    In the forward pass x goes on as it is; in the backward pass its gradient is summed over the
    ranks.
    """

    @staticmethod
    def forward(ctx, x, all_reduce):
        ctx.all_reduce = all_reduce
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return ctx.all_reduce(gradient.clone()), None


class Leave(torch.autograd.Function):
    """The way out of a row-split layer.

    In the forward pass y is the sum of all ranks' terms; in the backward pass each term has y's
    gradient.
    """

    @staticmethod
    def forward(ctx, term, all_reduce):
        ctx.mark_dirty(term)
        return all_reduce(term)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient, None


class SumOver:
    """The all-reduce over the ranks of `group`, which copies of a model share."""

    def __init__(self, group):
        self.group = group

    def __call__(self, tensor):
        return ring_all_reduce(tensor, group=self.group)

    def __deepcopy__(self, memo):
        return self


class Cut(NamedTuple):
    """A rank's slice of a tensor of this `shape`: the `indices` along dimension `dim`.

    `all_reduce(tensor)` sums over the ranks that have the other slices.
    """

    dim: int
    indices: torch.Tensor
    shape: torch.Size
    all_reduce: Callable

    def of(self, whole):
        """Return this rank's slice of a whole tensor."""
        return whole.detach().index_select(self.dim, self.indices.to(whole.device))

    def whole(self, own_slice):
        """Return the whole tensor from every rank's slice; all ranks call this."""
        # The sum of all ranks' padded slices is the whole tensor.
        padded = own_slice.new_zeros(self.shape)
        padded.index_copy_(self.dim, self.indices.to(padded.device), own_slice.detach())
        return self.all_reduce(padded)


class Slice(PartOfParameter):
    """A parameter while its layer is split; its `cut` says which slice this rank has.

    A parameter's class is exchanged for this one and back, because an optimizer may know the
    parameter.
    """

    def refuse_average(self, name, group):
        """Raise ValueError if ranks of `group` have different slices, which have no average."""
        members = set(dist.get_process_group_ranks(group))
        sharing = dist.get_process_group_ranks(self.cut.all_reduce.group)
        # This rank is in both groups; one rank more has another slice.
        if len(members.intersection(sharing)) > 1:
            raise ValueError(
                f"parameter {name} is split over ranks of this process group: average over the"
                " mesh's data axis, as in DistributedDataParallel(model,"
                ' process_group=mesh(data=…, tensor=…)["data"])'
            )


allow_foreach(Slice)


class Place(NamedTuple):
    """Where a pair of split layers stands: `members` of `parent`, {name: layer} after the split."""

    parent: nn.Module
    members: dict[str, nn.Module]

    def check(self):
        """Raise RuntimeError, with a name, if something else computes from slices now."""
        for name, known in self.members.items():
            present = self.parent._modules.get(name)
            if present is not known and not computes_the_same(present, known):
                raise RuntimeError(
                    f"{name} of {type(self.parent).__name__} was exchanged after the split, and"
                    " each rank has a slice of what is computed there: put adapters and other"
                    " layers around whole layers, before a model is split, or after restore()"
                )
            if any(module_hooks(known)):
                raise RuntimeError(
                    f"a hook was added to {name} of {type(self.parent).__name__} after the split,"
                    " and would be given a slice: add hooks before a model is split, so that the"
                    " layer stays whole, or after restore()"
                )


def computes_the_same(present, known):
    """Return whether a layer may stand in the place of the one `known` after the split.

    It may if it adds no weights to a split layer, as a wrapper for checkpointing does, or if it is
    an activation that stands for another.
    """
    if isinstance(known, SplitLinear) and present is not None:
        return set(present.parameters()) == set(known.parameters())
    return type(present) in ACTIVATIONS


class SplitLinear(nn.Linear):
    """This rank's slice of a linear layer: the outputs, or the inputs, with these `indices`.

    It is a linear layer for programs that initialise, freeze or prune all of them. `in_features`
    and `out_features` are those of the slice.
    """

    split_along: dict[str, int]  # the dimension of weight and bias that is split
    place: Place
    reset_parameters = refuse_with(
        "every rank would draw numbers of its own, from the shape of its slice: initialise a model"
        " before it is split, or after restore()"
    )

    def __init__(self, layer, indices, all_reduce):
        # A linear layer would allocate and draw weights.
        nn.Module.__init__(self)
        # In a list the whole layer is not a submodule.
        self.whole_layer = [layer]
        self.all_reduce = all_reduce
        self.weight = layer.weight
        self.bias = layer.bias
        for name, parameter in layer.named_parameters():
            if name in self.split_along:
                cut = Cut(self.split_along[name], indices, parameter.shape, all_reduce)
                parameter.data = cut.of(parameter)
                parameter.grad = None
                parameter.cut = cut
                parameter.__class__ = Slice
        self.out_features, self.in_features = layer.weight.shape

    @uncompiled
    def forward(self, x):
        """Return this layer's outputs, computed from its slices as from any tensors.

        Raises ValueError inside torch's DistributedDataParallel over the ranks of this layer, and
        RuntimeError if it has other parameters, or stands elsewhere, than after the split.
        """
        self.check_parameters()
        self.place.check()
        if wrapper := wrapper_around():
            check_replicas(dict(self.named_parameters()), wrapper.process_group)
        with as_plain_tensors():
            return self.outputs(x)

    def check_parameters(self):
        """Raise RuntimeError, with a name, if one was exchanged, added or removed."""
        known = self.whole_layer[0]._parameters
        for name in known | self._parameters:
            if known.get(name) is not self._parameters.get(name):
                raise RuntimeError(
                    f"the {name} of a split layer was exchanged, added or removed, and nobody knows"
                    " which slice of a whole tensor it is: write values into a slice by copy_(…),"
                    " and change a model before it is split, or after restore()"
                )

    def make_whole(self):
        """Return the layer that was split, whole again, with the present weights.

        Raises RuntimeError if it has other parameters than after the split.
        """
        self.check_parameters()
        for name in self.split_along:
            parameter = getattr(self, name)
            if parameter is not None:
                cut = parameter.cut
                del parameter.cut
                parameter.__class__ = nn.Parameter
                parameter.data = cut.whole(parameter)
                parameter.grad = None
        return self.whole_layer[0]


class ColumnLinear(SplitLinear):
    """A column-split layer, which computes some of the outputs: (…, inputs) to (…, len(indices)).

    All ranks are given the same inputs.
    """

    split_along = {"weight": 0, "bias": 0}

    def outputs(self, x):
        """Return the outputs that this rank computes."""
        return linear(Enter.apply(x, self.all_reduce), self.weight, self.bias)


class RowLinear(SplitLinear):
    """A row-split layer, which takes some of the inputs: (…, len(indices)) to (…, outputs).

    All ranks return the same outputs.
    """

    split_along = {"weight": 1}

    def outputs(self, x):
        """Return all outputs; the bias is added once, not on every rank."""
        y = Leave.apply(linear(x, self.weight), self.all_reduce)
        return y if self.bias is None else y + self.bias


class Pair(NamedTuple):
    """Two layers of `parent`, by their names: one to split by columns, and one by rows after it.

    They are split by units, such as heads: `rows[unit]` has the unit's outputs of the first layer,
    and `columns[unit]` its inputs of the second. `between` are the names of layers between the two.
    """

    parent: nn.Module
    first: str
    between: list[str]
    second: str
    rows: torch.Tensor
    columns: torch.Tensor


def pairs(model):
    """Yield each `Pair` of layers in `model` that can be split."""
    uses = Counter(weight for _, weight in model.named_parameters(remove_duplicate=False))
    for module in model.modules():
        if type(module) is TransformerBlock and can_be_split([module.qkv, module.out], uses):
            # The outputs of qkv are all heads' queries, then all keys, then all values.
            outputs = torch.arange(module.qkv.out_features).view(3, -1, module.head_width)
            inputs = torch.arange(module.out.in_features).view(-1, module.head_width)
            yield Pair(module, "qkv", [], "out", outputs.transpose(0, 1), inputs)
        if isinstance(module, nn.Sequential):
            yield from pairs_of(module, uses)


def pairs_of(sequential, uses):
    """Yield the pairs of layers of `sequential` around an activation; no layer is in two pairs."""
    # named_children() would leave out a layer that comes once more.
    modules = sequential._modules
    names = list(modules)
    taken = None  # the second layer of the pair before
    for first, between, second in zip(names, names[1:], names[2:], strict=False):
        layers = [modules[first], modules[second]]
        activation = type(modules[between]) in ACTIVATIONS and not has_hooks(modules[between])
        if activation and first != taken and type(layers[0]) is nn.Linear:
            taken = second
            if can_be_split(layers, uses):
                neurons = torch.arange(layers[0].out_features).view(-1, 1)
                yield Pair(sequential, first, [between], second, neurons, neurons)


def has_hooks(module):
    """Return whether hooks make `module` compute more than its class does.

    The hooks may be on the module or on its parameters. Hooks on finished gradients do not count:
    from a slice they can compute nothing wrong.
    """
    return any(module_hooks(module)) or any(p._backward_hooks for p in module.parameters())


def module_hooks(module):
    """Return the dicts with the hooks that are called when `module` is, and in backward."""
    return [
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ]


def can_be_split(layers, uses):
    """Return whether all `layers` are plain linear layers without hooks, each weight used once."""
    return all(
        type(layer) is nn.Linear and uses[layer.weight] == 1 and not has_hooks(layer)
        for layer in layers
    )


def split_layers(model, rank, ranks, all_reduce):
    """Replace the pairs of layers in `model` by slice `rank` of `ranks`; return the model.

    Only pairs with units for all ranks are split. Raises ValueError if there is no such pair.
    """
    chosen = [pair for pair in pairs(model) if len(pair.rows) >= ranks]
    if not chosen:
        raise ValueError(
            f"{type(model).__name__} has no two linear layers that could be split over {ranks}"
            " ranks: layers with hooks, shared weights or a class of their own must stay whole"
        )
    for parent, first, between, second, rows, columns in chosen:
        for name, kind, units in ((first, ColumnLinear, rows), (second, RowLinear, columns)):
            # Sorted, the indices of qkv are its queries, keys and values again.
            indices = units.tensor_split(ranks)[rank].flatten().sort().values
            setattr(parent, name, kind(getattr(parent, name), indices, all_reduce))
        place = Place(parent, {name: parent._modules[name] for name in (first, *between, second)})
        parent._modules[first].place = place
        parent._modules[second].place = place
    return model


def parallelize(model, group=None):
    """Share out the layers of `model`, in place, over the ranks of `group`; return it.

    All ranks call this with the same model, and start from the first rank's weights. An optimizer
    may be made before, if it has made no step yet. Pairs of layers with hooks stay whole. Raises
    ValueError for a model that has no layers to split, or is sharded, split or compiled already.
    """
    if dist.get_world_size(group) == 1:
        return model
    check_model(model, group)
    # All ranks go on from the first one's random state, so that dropout drops the same.
    states = checkpoint.random_states()
    checkpoint.set_random_state([states[wire.global_rank(0, group)]] * len(states))
    broadcast_parameters(model, group=group)
    return split_layers(model, dist.get_rank(group), dist.get_world_size(group), SumOver(group))


def restore(model):
    """Make all layers of `model` whole again, in place, and return it; all ranks call this.

    Raises RuntimeError if a slice was exchanged for a tensor that is no slice.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, SplitLinear):
                setattr(parent, name, child.make_whole())
    return model


def clip_grad_norm_(model, max_norm, group=None):
    """Scale a split model's gradients to a norm of at most `max_norm`; return the norm before."""
    # Each element counts once: only the first rank counts the parameters that all ranks have.
    is_first = dist.get_rank(group) == 0
    counted = [p for p in model.parameters() if is_first or isinstance(p, Slice)]
    total = total_norm(counted, 2.0, group, counted[0].device)
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, total)
    return total


def train(model, batches, lr, tensor=None, loss=cross_entropy, optimizer=SGD):
    """Train `model` in place, with layers split over `tensor` ranks (default: all).

    The batches are the share of this row of the mesh.
    """
    tensor = tensor or dist.get_world_size()
    groups = mesh(data=dist.get_world_size() // tensor, tensor=tensor)
    parallelize(model, groups["tensor"])
    broadcast_parameters(model, group=groups["data"])
    optimizer = optimizer(model.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        step_loss = loss(model(inputs), targets)
        step_loss.backward()
        average_on_ring(gradients(model), group=groups["data"])
        optimizer.step()
        losses.append(step_loss.item())
    restore(model)
    return losses
