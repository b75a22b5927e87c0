"""Blocks of a model, whose parameters are gathered and freed together."""

from contextlib import suppress

import torch

from manyranks.torch_inside import tree_leaves

from ..base.torch_private import as_plain_tensors
from .flat import Flat, Shard, gather_chunks
from .parts import label

# These functions and attributes tell a tensor's shape and kind, and read none of its elements.
HARMLESS = {"size", "dim", "numel", "is_floating_point", "is_complex"}
HARMLESS |= {"shape", "ndim", "device", "dtype", "is_cuda", "is_leaf", "requires_grad"}


class Sharded(torch.nn.Parameter):
    """A parameter while its block does not compute: only its shape and kind can be read.

    A parameter's class is exchanged for this one and back, as that of a
    `torch.nn.UninitializedParameter` is.
    """

    refuse_average = Shard.refuse_average

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if label(function) in HARMLESS and function.__name__ != "__set__":
            with as_plain_tensors():
                return function(*args, **(kwargs or {}))
        sharded = [each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)]
        shape = tuple(sharded[0].shape)
        raise RuntimeError(
            f"this parameter, of shape {shape}, is sharded, and whole only while its block"
            " computes. Make an optimizer from parameters() of FullyShardedDataParallel, after"
            " wrapping; its state_dict() has the whole weights, and restore() an ordinary model;"
            " initialise, load, freeze, add hooks before wrapping. If this happens in forward(), a"
            " block is used by its parts: name those that are called in `blocks`"
        )


class Block(Flat):
    """The parameters of one `module`, whole from `make_room` and `gather` until `free`.

    At other times only `shard` stays. Memory is freed by resizing the storage to nothing, so that
    the tensors which autograd keeps for backward get their values back with the next `gather`. Only
    the training thread calls `make_room` and `free`: `fsdp` says why.

    `gathering` is a function that waits until the block is whole, or None. `following` has the
    block that comes next in each phase. `holders` are the layers of each parameter, with its name
    in them: while the block is not whole, they have the parameter's shard instead.
    """

    def __init__(self, number, module, parameters, group, holders):
        kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
        if len(kinds) > 1:
            raise ValueError(
                f"the block {type(module).__name__} has parameters of several dtypes or devices;"
                " name smaller `blocks`"
            )
        super().__init__(parameters, group, copied=True)
        self.number = number
        self.module = module
        self.holders = []
        for parameter in parameters:
            self.holders += [(parameter, *place) for place in holders[parameter]]
        self.following = {}
        self.bytes = self.full.untyped_storage().nbytes()
        self.classes = {parameter: type(parameter) for parameter in parameters}
        self.gathering = None

    def make_room(self):
        """Allocate the memory of the whole parameters, which `gather` will fill."""
        self.full.untyped_storage().resize_(self.bytes)
        views = self.views(self.full)
        for parameter, whole_class in self.classes.items():
            parameter.__class__ = whole_class
            parameter.data = views[parameter]
        for parameter, layer, name in self.holders:
            layer._parameters[name] = parameter

    def gather(self, group):
        """Fill this memory, in the communication thread; this rank sends (K-1)/K of its bytes."""
        self.own_chunk.copy_(self.shard)
        gather_chunks(self.chunks, group)

    def free(self):
        """Free the whole parameters, even if they are on their way; now they are `Sharded`."""
        if self.gathering is not None:
            # If gathering failed, whoever waited for the parameters has raised the error.
            with suppress(Exception):
                self.gathering()
            self.gathering = None
        for parameter in self.parameters:
            if not isinstance(parameter, Sharded):
                # One element, repeated by strides of 0, has the parameter's shape without its
                # memory.
                parameter.data = self.full.new_empty(()).expand(parameter.shape)
                parameter.grad = None
                parameter.__class__ = Sharded
        for parameter, layer, name in self.holders:
            layer._parameters[name] = self.shards[parameter]
        self.full.untyped_storage().resize_(0)


def default_blocks(module):
    """Return the members of every outermost Sequential or ModuleList in, or at, `module`."""
    if isinstance(module, torch.nn.Sequential | torch.nn.ModuleList):
        return [child for child in module if list(child.parameters())]
    return [block for child in module.children() for block in default_blocks(child)]


def assign_blocks(module, blocks):
    """Return (block, its parameters) pairs.

    Parameters of no block, of several blocks, or of layers outside of their block, too, go to
    `module` as a whole. Raises ValueError for a block that is no part of the model.
    """
    # A module that runs twice is one block.
    members = {block: [] for block in [module, *blocks]}
    if not {*members} <= {*module.modules()}:
        raise ValueError("every block must be a submodule of the model")
    for parameter, places in holders_of(module).items():
        layers = {layer for layer, _ in places}
        homes = [block for block in members if block is not module and layers <= {*block.modules()}]
        home = homes[0] if len(homes) == 1 else module
        members[home].append(parameter)
    return [(block, parameters) for block, parameters in members.items() if parameters]


def holders_of(module):
    """Return the (layer, name) pairs of each parameter: a tied one is in several layers."""
    holders = {}
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            holders.setdefault(parameter, []).append((layer, name))
    return holders
