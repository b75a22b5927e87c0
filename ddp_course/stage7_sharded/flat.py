"""Parameters, gradients and state of an optimizer, end to end and cut into a chunk per rank."""

import sys
import threading
from copy import deepcopy
from datetime import timedelta

import torch
import torch.distributed as dist

from manyranks.torch_inside import tree_map_only

from .. import communication, wire
from ..base.objects import of_all_ranks
from ..base.torch_private import allow_foreach, as_plain_tensors, timeout_of
from ..stage3_paramserver import views_into
from ..stage4_ring import allgather, reduce_scatter
from ..stage6_ddp.unused import count_users
from .parts import PartOfParameter, refuse_with

gather_chunks = wire.collective(allgather)
NOTICE = 10.0  # A rank that has waited for the others for so many seconds says so.
sum_chunks = wire.collective(reduce_scatter)
NO_GRAPH = (
    "no loss leads to the shards, as whole parameters have computed it, so their gradients would be"
    " zeros or none: call backward() without `inputs`, and read shard.grad, the average; freeze"
    " parameters before the model is wrapped"
)


class Shard(PartOfParameter):
    """This rank's elements of a parameter that is cut into shards, for an optimizer.

    The elements lie in the memory of the flat tensor, and must stay there.
    """

    refusal = (
        f"{PartOfParameter.refusal}. If this happens in forward(), a block is used by its parts:"
        " name those that are called in `blocks`"
    )
    no_hooks = "hooks on shards would never be called; add them to the parameters before wrapping"
    register_hook = register_post_accumulate_grad_hook = refuse_with(no_hooks)

    @classmethod
    def check(cls, name, function, args):
        """Raise RuntimeError for a function to which no part may be given, or that differentiates.

        A shard is in no graph.
        """
        if function in (torch.autograd.grad, torch.autograd.backward):
            raise RuntimeError(NO_GRAPH)
        super().check(name, function, args)

    @classmethod
    def takes(cls, tensor, values):
        """Return False for a shard, as the memory that it has now is what is trained."""
        return not isinstance(tensor, Shard)

    def refuse_average(self, name, group):
        """Raise ValueError, as each rank has other elements."""
        raise ValueError(
            f"{name or 'the model'} is sharded by FullyShardedDataParallel, which averages"
            " gradients itself; use it alone"
        )


allow_foreach(Shard)


class Flat:
    """Parameters of one dtype and device end to end in `full`, which is cut into K `chunks`.

    `own_chunk` is this rank's chunk. The parameters become views into `full`. `pieces[p]` is a pair
    of slices: the part of parameter p that lies in this rank's chunk, as a range of p's elements
    and as a range of the chunk, both empty if there is none. `shards[p]` is that part as a
    parameter of its own, for an optimizer, with as many dimensions as p. All shards together are
    `shard`, which is the memory of the chunk, or a copy that stays when the chunk is freed.
    """

    def __init__(self, parameters, group=None, copied=False):
        rank, world_size, _, _ = wire.neighbours(group)
        self.parameters = parameters
        self.drop_gradients()
        with as_plain_tensors():
            self.full = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.chunks = self.full.tensor_split(world_size)
        # Stage 4's reduce-scatter leaves the sum of chunk r+1 on rank r.
        self.index = (rank + 1) % world_size
        self.own_chunk = self.chunks[self.index]
        self.shard = self.own_chunk.clone() if copied else self.own_chunk
        self.pieces = {}
        self.shards = {}
        low = self.own_chunk.storage_offset()
        for parameter, view in self.views(self.full).items():
            start = view.storage_offset()
            first, last = (
                min(max(low, end), low + len(self.own_chunk))
                for end in (start, start + parameter.numel())
            )
            self.pieces[parameter] = (
                slice(first - start, last - start),
                slice(first - low, last - low),
            )
            elements = with_dimensions_of(self.shard[first - low : last - low], parameter)
            self.shards[parameter] = Shard(elements, requires_grad=parameter.requires_grad)
            parameter.data = view

    def views(self, flat):
        """Return each parameter's part of `flat`, which is as long as `full`, in its shape."""
        return dict(zip(self.parameters, views_into(flat, self.parameters), strict=True))

    # The next methods move gradients: from the parameters, divided by K, into one message, and from
    # the sum of the messages to the shards.

    def make_room_for_gradients(self):
        """Make room for the gradients in one message.

        `places` has the views for the gradients that are missing. A parameter that gets no gradient
        on this rank adds zeros to the sum.
        """
        self.gradient = torch.zeros_like(self.full)
        self.places = {p: view for p, view in self.views(self.gradient).items() if p.requires_grad}

    def put_gradient(self, parameter):
        """Move a finished gradient, divided by K, to its place in the message."""
        gradient = parameter.grad
        gradient = gradient.to_dense() if gradient.is_sparse else gradient.as_subclass(torch.Tensor)
        place = self.places.pop(parameter)
        torch.mul(gradient, 1 / len(self.chunks), out=place)
        parameter.grad = None

    def average(self, group=None):
        """Reduce-scatter the gradients, and keep this rank's chunk for `hand_out_averages`.

        On a GPU return the message, so that whoever waits for this holds its memory until then.
        """
        chunks = self.gradient.tensor_split(len(self.chunks))
        sum_chunks(chunks, group)
        message = self.gradient
        self.gradient = None
        self.places = {}
        self.averages = chunks[self.index].clone()
        return message if communication.is_queued(message.device) else None

    def hand_out_averages(self, used):
        """Add the averages to the `.grad` of the shards whose parameters some rank has `used`.

        This comes after the pass, so that a pass that failed leaves no gradients.
        """
        for parameter, (_, inside) in self.pieces.items():
            if parameter not in used or inside.start == inside.stop:
                continue
            shard = self.shards[parameter]
            average = with_dimensions_of(self.averages[inside], shard)
            if shard.grad is None:
                shard.grad = average
            else:
                shard.grad.add_(average)
        self.drop_gradients()

    def drop_gradients(self):
        """Drop the gradients that are on their way, if there are any."""
        self.gradient = None
        self.averages = None
        self.places = None


def with_dimensions_of(piece, tensor):
    """Return a view of the vector `piece` with as many dimensions as `tensor`.

    Training loops choose weight decay by the number of dimensions.
    """
    return piece.view(-1, *[1] * (tensor.dim() - 1))


def used_on_any_rank(parameters, used, device, group=None):
    """Return those of `parameters` that are among `used` on some rank.

    The ranks add up a bitmap, as in stage 6. All other parameters must keep the gradient that they
    have, even None: a gradient of zeros would let weight decay and momentum change them.
    """
    bitmap = [int(parameter in used) for parameter in parameters]
    users = count_users(bitmap, device, group)()
    return {p for p, count in zip(parameters, users, strict=True) if count}


# Every rank has pieces of an optimizer's state. The functions that follow make the whole state, as
# on one device, from these pieces, and pieces from a whole state.


def wait_for_all_ranks(what, group=None):
    """Wait until all ranks of `group` have come to this call.

    Raises RuntimeError, which names those that have not in two minutes.
    """
    group = group or dist.group.WORLD
    if "gloo" in dist.get_backend_config(group):
        words = f"{what} needs all ranks together; this one has waited for {NOTICE:g} s"
        notice = threading.Timer(NOTICE, print, [words], {"file": sys.stderr, "flush": True})
        notice.start()
        try:
            # `dist.monitored_barrier` refuses a group that has NCCL beside gloo.
            group.monitored_barrier(
                min(timedelta(minutes=2), timeout_of(group)), wait_all_ranks=True
            )
        except RuntimeError as error:
            raise RuntimeError(f"{what} needs all ranks together: {error}") from None
        finally:
            notice.cancel()


def shards_of(optimizer, flats):
    """Return (flat, parameter, shard) for each shard in `optimizer`, in the optimizer's order.

    Raises ValueError if the optimizer has other parameters.
    """
    homes = {
        shard: (flat, parameter, shard)
        for flat in flats
        for parameter, shard in flat.shards.items()
    }
    shards = [shard for members in optimizer.param_groups for shard in members["params"]]
    if not all(shard in homes for shard in shards):
        raise ValueError(
            "the optimizer has other parameters; make it from parameters() of the wrapper, after"
            " wrapping"
        )
    return [homes[shard] for shard in shards]


def whole_state(optimizer, flats, group=None):
    """Return the state of an `optimizer` of shards as if nothing were sharded; all ranks call this.

    Tensors with dimensions are joined from all ranks' pieces. Everything else, such as Adam's count
    of steps, is the same on every rank.
    """
    wait_for_all_ranks("the state dict of a sharded optimizer", group)
    members = shards_of(optimizer, flats)
    state = {}
    own = []
    for _, _, shard in members:
        entries = optimizer.state.get(shard, {}) if shard.numel() else {}
        own.append(tree_map_only(torch.Tensor, whole_on_cpu, entries))
    everyone = of_all_ranks(own, group)
    # Rank 0 has chunk 1, and the last rank has chunk 0.
    in_order = everyone[-1:] + everyone[:-1]
    for number, (_, parameter, _) in enumerate(members):
        pieces = [entries[number] for entries in in_order if entries[number]]
        if not pieces:
            continue
        for key, value in pieces[0].items():
            if isinstance(value, torch.Tensor) and value.dim():
                value = torch.cat([piece[key].reshape(-1) for piece in pieces])
                value = value.view(parameter.shape).to(parameter.device)
            state.setdefault(number, {})[key] = value
    return state


def whole_on_cpu(part):
    """Return a part as an ordinary tensor on the CPU, for ranks that put all parts together."""
    return part.as_subclass(torch.Tensor).cpu()


def load_whole_state_dict(optimizer, flats, state_dict):
    """Give an `optimizer` of shards this rank's pieces of an ordinary optimizer's `state_dict`.

    Raises torch's errors, with nothing changed, if it has other groups, or parameters of other
    sizes.
    """
    saved = [number for members in state_dict["param_groups"] for number in members["params"]]
    state = {}
    for number, (flat, parameter, shard) in zip(saved, shards_of(optimizer, flats), strict=False):
        for key, value in state_dict["state"].get(number, {}).items():
            if (
                isinstance(value, torch.Tensor)
                and key != "step"
                and (value.dim() or not parameter.dim())
            ):
                elements = value.reshape(parameter.shape).reshape(-1)
                # Without the clone, deepcopy would copy the whole tensor.
                value = with_dimensions_of(elements[flat.pieces[parameter][0]], shard).clone()
            state.setdefault(number, {})[key] = deepcopy(value)
    optimizer.load_state_dict({**state_dict, "state": state})
