"""What is gathered and freed together: the parameters of one block of the model."""

from contextlib import suppress

import torch

from ..running import communication, flight_recorder
from ..running.torch_inside import as_plain_tensors, tree_leaves
from .flat import Flat, flats, gather_chunks, sum_chunks


class Sharded(torch.nn.Parameter):
    """What a parameter is while its block does not compute: only its shape and kind are here. All else is refused.

    A parameter turns into this and back as `torch.nn.UninitializedParameter` turns into one: its class is exchanged.
    """

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in HARMLESS:
            with as_plain_tensors():
                return function(*args, **(kwargs or {}))
        shape = next(tuple(each.shape) for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        raise RuntimeError(
            f"this parameter, of shape {shape}, is sharded, and whole only while its block computes. Make an optimizer "
            "from parameters() of FullyShardedDataParallel, after wrapping; its state_dict() and load_state_dict() "
            "have the whole weights, and restore() an ordinary model; initialise, freeze, add hooks before wrapping. "
            "If this happens in forward(), a block is used by its parts: name those that are called in `blocks`"
        )

    def __repr__(self):
        return f"a sharded parameter of shape {tuple(self.shape)}"


def getter(name):
    """What torch passes on when a tensor is asked for this attribute."""
    return getattr(torch.Tensor, name).__get__


HARMLESS = {getter(name) for name in ("shape", "ndim", "device", "dtype", "is_cuda", "is_leaf", "requires_grad")}
HARMLESS |= {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel}
HARMLESS |= {torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.is_floating_point, torch.is_complex}


class FreeableFlat(Flat):
    """A `Flat` that exists whole only between `gather` and `free`; in between, only `shard`, a copy of `mine`, stays.

    Memory is freed by resizing the storage to nothing, so that the tensors which autograd keeps for backward come back
    to life with the next `gather`. `make_room` and `free` are for the thread that trains: see `fsdp` for the reason.
    """

    def __init__(self, parameters, group=None):
        super().__init__(parameters, group)
        self.whole, self.bytes = self.views(self.full), self.full.untyped_storage().nbytes()
        self.kinds, self.nothing = [type(parameter) for parameter in parameters], self.full.new_empty(())

    def kept(self):
        """The memory of the shards: a copy of the chunk, which stays when the chunk goes."""
        return self.mine.clone()

    def make_room(self):
        """Bring the memory of the whole parameters into being, with nothing in it yet."""
        self.full.untyped_storage().resize_(self.bytes)
        for parameter, view, kind in zip(self.parameters, self.whole, self.kinds, strict=True):
            parameter.__class__ = kind
            parameter.data = view

    def gather(self, group=None):
        """Fill the room with the whole parameters; this rank sends (K-1)/K of their bytes."""
        self.mine.copy_(self.shard)
        gather_chunks(self.chunks, group=group)

    def free(self):
        """Let go of the whole parameters: from now on they are `Sharded`."""
        for parameter in self.parameters:
            if not isinstance(parameter, Sharded):
                parameter.data = self.nothing.expand(parameter.shape)
                parameter.__class__ = Sharded
        self.full.untyped_storage().resize_(0)


class Block:
    """A module whose parameters are gathered and freed together. `following` has the block after it in each phase.

    `gathering` waits until it is whole; None while it is not. `missing` are the parameters whose gradients are not
    complete yet; None outside of the backward pass.
    """

    def __init__(self, number, module, parameters, group):
        self.number, self.module, self.following = number, module, {}
        self.flats = flats(parameters, group, FreeableFlat)
        self.trainable = [flat for flat in self.flats if flat.parameters[0].requires_grad]
        self.flat_of = {parameter: flat for flat in self.trainable for parameter in flat.parameters}
        self.gathering = self.missing = None

    @property
    def version(self):
        """A number that grows with every change of the shards."""
        return sum(flat.shard._version for flat in self.flats)

    def make_room(self):
        """Bring the memory of all parameters into being."""
        for flat in self.flats:
            flat.make_room()

    def gather(self, moment, group):
        """Gather all parameters (in the communication thread); `moment` is when, in words, the same on all ranks."""
        with flight_recorder.entry(f"gather of block {self.number}, {moment},", [f.full for f in self.flats], group):
            for flat in self.flats:
                flat.gather(group)

    def reduce(self, moment, group):
        """Average all gradients (in the communication thread); return what was sent, where that is only queued."""
        with flight_recorder.entry(f"average of block {self.number}, {moment},", [f.full for f in self.flats], group):
            sent = [flat.average(sum_chunks, group) for flat in self.trainable]
        return sent if communication.is_queued(sent[0].device) else None

    def give(self):
        """Hand the averages, if there are any, to the shards."""
        for flat in self.trainable:
            if flat.averages is not None:
                flat.give()

    def free(self):
        """Let go of the parameters, whether they are here or still on their way."""
        if self.gathering is not None:
            with suppress(Exception):  # the block that waited for the parameters has raised the error
                self.gathering()
            self.gathering = None
        for flat in self.flats:
            flat.free()

    def start_over(self):
        """Forget a pass that broke off."""
        self.free()
        self.missing = None
        for flat in self.trainable:
            flat.forget()


def default_blocks(module):
    """The members of every outermost Sequential or ModuleList in `module`, which may be one itself."""
    if isinstance(module, torch.nn.Sequential | torch.nn.ModuleList):
        return [child for child in module if any(True for _ in child.parameters())]
    return [block for child in module.children() for block in default_blocks(child)]


def assign_blocks(module, blocks):
    """Return (block, its parameters) pairs; parameters of no block or of several go to `module` as a whole."""
    inside, blocks = list(module.modules()), list(dict.fromkeys(blocks))  # a module that runs twice is one block
    if not all(any(block is submodule for submodule in inside) for block in blocks):
        raise ValueError("every block must be a submodule of the model")
    owners = {}
    for block in blocks:
        for parameter in block.parameters():
            owners.setdefault(parameter, []).append(block)
    owner_of = {parameter: owner[0] for parameter, owner in owners.items() if len(owner) == 1}
    members = [(block, [p for p in block.parameters() if owner_of.get(p) is block]) for block in blocks]
    rest = [parameter for parameter in module.parameters() if parameter not in owner_of]
    return [(block, parameters) for block, parameters in [(module, rest), *members] if parameters]
