"""Parameters laid end to end and cut into one chunk for each rank; so are their gradients, and an optimizer's state."""

from copy import deepcopy
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from ..running import wire
from ..running.torch_inside import as_plain_tensors, timeout_of, tree_map_only
from .clipping import Part

PATIENCE = timedelta(seconds=120)  # a call that needs all ranks waits for so long


class Flat:
    """Parameters of one dtype and device end to end in `full`, which is cut into K `chunks`; `mine` is this rank's.

    The parameters become views into `full`. `pieces[p]` is a pair of slices: the part of parameter p that lies in
    this rank's chunk, as a range of p's elements and as a range of the chunk, both empty if there is none.
    `shards[p]` is that part as a parameter of its own, for an optimizer, with as many dimensions as p.
    """

    def __init__(self, parameters, group=None):
        self.parameters = parameters
        self.shapes = [parameter.shape for parameter in parameters]
        self.lengths = {parameter: parameter.numel() for parameter in parameters}
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
        pieces = flat.split(list(self.lengths.values()))
        return [piece.view(shape) for shape, piece in zip(self.shapes, pieces, strict=True)]

    def cut(self):
        """Find the part of each parameter that lies in this rank's chunk."""
        low, start, pieces = sum(len(chunk) for chunk in self.chunks[: self.index]), 0, {}
        for parameter, length in self.lengths.items():
            first = max(low, start)
            last = max(first, min(low + len(self.mine), start + length))
            pieces[parameter] = slice(first - start, last - start), slice(first - low, last - low)
            start += length
        return pieces

    def settle(self):
        """Go on with values that the parameters were given in other memory since, as by `.data = …` for an average.

        Raises RuntimeError for another dtype or device.
        """
        for parameter, view in zip(self.parameters, self.views(self.full), strict=True):
            if (parameter.dtype, parameter.device) != (view.dtype, view.device):
                raise RuntimeError(
                    f"a parameter is {parameter.dtype} on {parameter.device} now, was {view.dtype} on {view.device} "
                    "when its optimizer was made; convert and move a model before that"
                )
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.detach())
                parameter.data = view

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


@wire.collective
@torch.no_grad()
def gather_chunks(chunks, group=None):
    """Fill in the chunks of the other ranks; each rank sends (K-1)/K of the bytes in all `chunks`.

    As many messages and bytes as in stage 4's ring, but every owner sends its chunk to all others at once: there are
    many small blocks to gather, and nobody has to wait until a neighbour, who may be busy, has passed a chunk on.
    """
    rank, world_size, _, _ = wire.neighbours(group)
    others = [(other, wire.global_rank(other, group)) for other in range(world_size) if other != rank]
    mine = chunks[(rank + 1) % world_size]
    wire.exchange_all(
        [(mine, peer) for _, peer in others],
        [(chunks[(other + 1) % world_size], peer) for other, peer in others],
        group,
    )


@wire.collective
@torch.no_grad()
def sum_chunks(chunks, group=None):
    """Sum this rank's own chunk over the ranks, leave the others as they are. Same bytes as a gather.

    Every rank sends each chunk to its owner, who adds in the order of stage 4's ring: the same bits.
    """
    rank, world_size, _, _ = wire.neighbours(group)
    mine = chunks[(rank + 1) % world_size]
    parts = [torch.empty_like(mine) for _ in range(world_size - 1)]
    senders = [(rank + step) % world_size for step in range(1, world_size)]
    peers = [wire.global_rank(sender, group) for sender in senders]
    outgoing = [(chunks[(owner + 1) % world_size], peer) for owner, peer in zip(senders, peers, strict=True)]
    wire.exchange_all(outgoing, list(zip(parts, peers, strict=True)), group)
    for part in parts[1:]:
        parts[0] += part
    if parts:
        mine += parts[0]


# An optimizer's state lies in pieces on every rank; a state dict has it whole, as one device would


def meet(what, group=None):
    """Wait until all ranks of `group` have come to this call; RuntimeError names those that have not in two minutes."""
    group = group or dist.group.WORLD
    if "gloo" in dist.get_backend_config(group):
        try:
            dist.monitored_barrier(group, min(PATIENCE, timeout_of(group)), wait_all_ranks=True)
        except RuntimeError as error:
            raise RuntimeError(f"{what} needs all ranks together: {error}") from None


def whole_state_dict(optimizer, flats, order, groups, group=None):
    """Return the state dict of `optimizer` as if nothing were sharded, the same on all ranks; all of them call this.

    The optimizer has the shards of the parameters in `order`, and `groups` are the parameter groups to tell.
    """
    meet("the state dict of a sharded optimizer", group)
    state, start, numbered = {}, 0, []
    for flat in flats:
        state.update(whole_state(optimizer, flat, group))
    for members in groups:
        numbered.append({**members, "params": list(range(start, start + len(members["params"])))})
        start += len(members["params"])
    return {"state": {n: state[p] for n, p in enumerate(order) if state.get(p)}, "param_groups": numbered}


def whole_state(optimizer, flat, group=None):
    """What all ranks together know of the parameters of one `flat`: {parameter: {key: value}}.

    Tensors as long as their shard are joined; all else, such as Adam's step count, is the same on every rank.
    """
    mine, everyone = {}, [None] * len(flat.chunks)
    for number, parameter in enumerate(flat.parameters):
        shard = flat.shards[parameter]
        pieces = partial(as_piece, shape=shard.shape)
        if shard.numel():
            mine[number] = tree_map_only(torch.Tensor, pieces, optimizer.state.get(shard, {}))
    dist.all_gather_object(everyone, mine, group=group)  # tensors of a GPU would be unpacked on that GPU
    state, in_order = {}, everyone[-1:] + everyone[:-1]  # rank 0 has chunk 1, and the last rank chunk 0
    for number, (parameter, shape) in enumerate(zip(flat.parameters, flat.shapes, strict=True)):
        known = [entries[number] for entries in in_order if number in entries]
        for key, value in known[0].items() if known else ():
            if isinstance(value, torch.Tensor) and value.dim() == 1:
                value = torch.cat([entries[key] for entries in known]).view(shape).to(flat.full.device)
            state.setdefault(parameter, {})[key] = value
    return state


def as_piece(tensor, shape):
    """A tensor of an optimizer's state on the CPU; as a vector if it has the `shape` of its shard."""
    tensor = tensor.as_subclass(torch.Tensor).detach().cpu()
    return tensor.reshape(-1) if tensor.shape == shape else tensor


def load_whole_state_dict(optimizer, flats, order, groups, state_dict):
    """Give `optimizer` this rank's pieces of an ordinary optimizer's `state_dict`, and `groups` its settings.

    As torch does, tensors are converted to the parameter's dtype, but for the step count. Raises ValueError, with
    nothing changed, if the state dict is of other groups or of parameters of other sizes.
    """
    sizes = [len(members["params"]) for members in state_dict["param_groups"]]
    if sizes != [len(members["params"]) for members in groups]:
        raise ValueError(
            f"the state dict has parameter groups of {sizes} parameters, but this optimizer has groups of "
            f"{[len(members['params']) for members in groups]}"
        )
    home = {parameter: flat for flat in flats for parameter in flat.parameters}
    saved = [number for members in state_dict["param_groups"] for number in members["params"]]
    state = {
        home[parameter].shards[parameter]: piece(home[parameter], parameter, state_dict["state"][number], number)
        for number, parameter in zip(saved, order, strict=True)
        if number in state_dict["state"]
    }
    for members, settings in zip(groups, state_dict["param_groups"], strict=True):
        members.update({key: value for key, value in settings.items() if key != "params"})
    optimizer.state.clear()
    optimizer.state.update(state)


def piece(flat, parameter, entries, number):
    """This rank's piece of the state `entries` of one parameter, which is number `number` of the state dict."""
    outside, length = flat.pieces[parameter][0], flat.lengths[parameter]
    kept = {}
    for key, value in entries.items():
        whole = isinstance(value, torch.Tensor) and key != "step" and (value.dim() > 0 or length == 1)
        if whole and value.numel() != length:
            raise ValueError(
                f'"{key}" of parameter {number} has {value.numel()} elements in the state dict, but the parameter '
                f"has {length}: it was made for another model"
            )
        part = like(value.reshape(-1)[outside], parameter) if whole else value
        kept[key] = part.to(parameter.device, parameter.dtype, copy=True) if whole else deepcopy(value)
    return kept
