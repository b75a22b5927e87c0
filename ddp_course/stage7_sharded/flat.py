"""Parameters laid end to end and cut into one chunk per rank; so are their gradients, and an optimizer's state."""

from copy import deepcopy
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from ..running import wire
from ..running.torch_inside import as_plain_tensors, timeout_of, tree_map_only
from ..stage4_ring import allgather, reduce_scatter
from .clipping import Part

PATIENCE = timedelta(seconds=120)  # a call that needs all ranks waits for so long
gather_chunks = wire.collective(allgather)
sum_chunks = wire.collective(reduce_scatter)


class Flat:
    """Parameters of one dtype and device end to end in `full`, which is cut into K `chunks`; `mine` is this rank's.

    The parameters become views into `full`. `pieces[p]` is a pair of slices: the part of parameter p that lies in
    this rank's chunk, as a range of p's elements and as a range of the chunk, both empty if there is none.
    `shards[p]` is that part as a parameter of its own, for an optimizer, with as many dimensions as p.
    """

    def __init__(self, parameters, group=None):
        self.parameters, self.shapes = parameters, [parameter.shape for parameter in parameters]
        rank, world_size, _, _ = wire.neighbours(group)
        self.full = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.chunks = self.full.tensor_split(world_size)
        self.index = (rank + 1) % world_size
        for parameter, view in zip(parameters, self.views(self.full), strict=True):
            parameter.data = view
        self.pieces, self.shard = self.cut(), self.kept()
        self.shards = {
            parameter: torch.nn.Parameter(like(self.shard[inside], parameter), requires_grad=parameter.requires_grad)
            for parameter, (_, inside) in self.pieces.items()
        }
        self.gradient, self.averages, self.places = None, None, {}

    @property
    def mine(self):
        """The chunk of this rank; rank r's is chunk r+1."""
        return self.chunks[self.index]

    def kept(self):
        """The memory of the shards: the chunk itself."""
        return self.mine

    def views(self, flat):
        """The part of `flat` (as long as `full`) that belongs to each parameter, in the parameter's shape."""
        pieces = flat.split([shape.numel() for shape in self.shapes])
        return [piece.view(shape) for shape, piece in zip(self.shapes, pieces, strict=True)]

    def cut(self):
        """Find the part of each parameter that lies in this rank's chunk."""
        low, start, pieces = sum(len(chunk) for chunk in self.chunks[: self.index]), 0, {}
        for parameter, shape in zip(self.parameters, self.shapes, strict=True):
            end = start + shape.numel()
            first = max(low, start)
            last = max(first, min(low + len(self.mine), end))
            pieces[parameter] = slice(first - start, last - start), slice(first - low, last - low)
            start = end
        return pieces

    def check_home(self):
        """Raise RuntimeError if a parameter has left the memory that its optimizer updates."""
        for parameter, view in zip(self.parameters, self.views(self.full), strict=True):
            if parameter.data_ptr() != view.data_ptr():
                raise RuntimeError(
                    "a parameter lies in other memory than when its optimizer was made: convert and move a model "
                    "before that, and write values by parameter.copy_(…) in place of parameter.data = …"
                )

    # Gradients go from the parameters, divided by K, into one message, and from the sum of the messages to the shards

    def collect(self):
        """Make room for the gradients, the views of one message. Returns the parameters."""
        self.gradient = torch.empty_like(self.full)
        self.places = dict(zip(self.parameters, self.views(self.gradient), strict=True))
        return self.parameters

    def take(self, parameter):
        """Move a finished gradient over to its place, divided by K on the way, as in stage 6.

        It is added to zero, so that it has no negative zeros: `average` gives those a meaning.
        """
        zero = self.gradient.new_zeros(())
        gradient = parameter.grad
        gradient = gradient.to_dense() if gradient.is_sparse else gradient.as_subclass(torch.Tensor)
        torch.add(zero, gradient, alpha=1 / len(self.chunks), out=self.places.pop(parameter))
        parameter.grad = None

    def average(self, reduce, group=None):
        """Average the gradients by `reduce(chunks, group)` and keep this rank's chunk for `give`; return all of them.

        A parameter that got no gradient counts as negative zeros: negative zero plus anything is that thing, so only
        the sum for a parameter without a gradient on any rank is negative zero, and its shards are left as they are.
        """
        for untouched in self.places.values():
            untouched.fill_(-0.0)
        chunks = self.gradient.tensor_split(len(self.chunks))
        reduce(chunks, group)
        whole, self.gradient, self.averages = self.gradient, None, chunks[self.index].clone()
        return whole

    def give(self):
        """Add the averages to the shards' `.grad`: when the pass is over, so that one that broke off leaves none."""
        mine = self.averages
        for parameter, (_, inside) in self.pieces.items():
            if not (inside.start == inside.stop or (parameter in self.places and negative_zero(mine[inside.start]))):
                shard = self.shards[parameter]
                gradient = Part.mark(like(mine[inside], shard), len(self.chunks))
                shard.grad = gradient if shard.grad is None else shard.grad.add_(gradient)
        self.forget()

    def forget(self):
        """Drop the gradients that are on their way, if there are any."""
        self.gradient, self.averages, self.places = None, None, {}
        with as_plain_tensors():
            for parameter in self.parameters:
                parameter.grad = None


def like(piece, tensor):
    """A view of the vector `piece` with as many dimensions as `tensor`, for those who let weights of matrices decay."""
    return piece.view(-1, *[1] * (tensor.dim() - 1))


def negative_zero(number):
    """Whether a tensor of one element is -0.0."""
    return number == 0 and (number.real if number.is_complex() else number).signbit()


def flats(parameters, group=None, kind=Flat):
    """Lay `parameters` out as one `Flat` for each dtype and device, the frozen ones by themselves."""
    alike = {}
    for parameter in parameters:
        alike.setdefault((parameter.dtype, parameter.device, parameter.requires_grad), []).append(parameter)
    return [kind(members, group) for members in alike.values()]


# An optimizer's state lies in pieces on every rank; a state dict has it whole, as one device would


def meet(what, group=None):
    """Wait until all ranks of `group` have come to this call; RuntimeError names those that have not in two minutes."""
    group = group or dist.group.WORLD
    if "gloo" in dist.get_backend_config(group):
        try:
            dist.monitored_barrier(group, min(PATIENCE, timeout_of(group)), wait_all_ranks=True)
        except RuntimeError as error:
            raise RuntimeError(f"{what} needs all ranks together: {error}") from None


def whole_state(optimizer, flats, order, group=None):
    """The "state" of `optimizer` as if nothing were sharded, the same on all ranks; all of them call this.

    The optimizer has the shards of the parameters in `order`, which are numbered so. Tensors as long as their shard are
    joined; all else, such as Adam's step count, is the same on every rank.
    """
    meet("the state dict of a sharded optimizer", group)
    shards = {parameter: shard for flat in flats for parameter, shard in flat.shards.items()}
    mine, ranks, state = {}, [None] * dist.get_world_size(group), {}
    for number, parameter in enumerate(order):
        shard = shards[parameter]
        if shard.numel():
            pieces = partial(as_piece, shape=shard.shape)
            mine[number] = tree_map_only(torch.Tensor, pieces, optimizer.state.get(shard, {}))
    dist.all_gather_object(ranks, mine, group=group)  # tensors of a GPU would be unpacked on that GPU
    in_order = ranks[-1:] + ranks[:-1]  # rank 0 has chunk 1, and the last rank chunk 0
    for number, parameter in enumerate(order):
        known = [entries[number] for entries in in_order if entries.get(number)]
        for key, value in known[0].items() if known else ():
            if isinstance(value, torch.Tensor) and value.dim() == 1:
                value = torch.cat([entries[key] for entries in known]).view(parameter.shape).to(parameter.device)
            state.setdefault(number, {})[key] = value
    return state


def as_piece(tensor, shape):
    """A tensor of an optimizer's state on the CPU; as a vector if it has the `shape` of its shard."""
    tensor = tensor.as_subclass(torch.Tensor).detach().cpu()
    return tensor.reshape(-1) if tensor.shape == shape else tensor


def load_whole_state_dict(optimizer, flats, order, state_dict):
    """Give `optimizer` this rank's pieces of an ordinary optimizer's `state_dict`.

    Raises ValueError, with nothing changed, if the state dict is of other groups or of parameters of other sizes.
    """
    home = {parameter: flat for flat in flats for parameter in flat.parameters}
    saved = [number for members in state_dict["param_groups"] for number in members["params"]]
    pieces = {
        number: {key: piece(home[parameter], parameter, key, value, number) for key, value in entries.items()}
        for number, parameter in zip(saved, order, strict=False)  # torch refuses other groups itself
        if (entries := state_dict["state"].get(number))
    }
    optimizer.load_state_dict({**state_dict, "state": pieces})


def piece(flat, parameter, key, value, number):
    """This rank's piece of the `value` that the state of parameter `number` has under `key`."""
    length = parameter.numel()
    if not isinstance(value, torch.Tensor) or key == "step" or (value.dim() == 0 and length != 1):
        return deepcopy(value)
    if value.numel() != length:
        raise ValueError(
            f'"{key}" of parameter {number} has {value.numel()} elements in the state dict, but the parameter '
            f"has {length}: it was made for another model"
        )
    return like(value.reshape(-1)[flat.pieces[parameter][0]], parameter).clone()
