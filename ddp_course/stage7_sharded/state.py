"""An optimizer's state between two forms: pieces on every rank, and whole as one device would have it."""

from copy import deepcopy
from datetime import timedelta

import torch
import torch.distributed as dist

from ..running.torch_inside import timeout_of
from .flat import gather_chunks, like

PATIENCE = timedelta(seconds=120)  # for ranks that have not come to a call that needs all of them


def meet(what, group=None):
    """Wait until all ranks of `group` have come to this call; RuntimeError names those that have not in two minutes."""
    group = group or dist.group.WORLD
    if "gloo" in dist.get_backend_config(group):
        try:
            dist.monitored_barrier(group, min(PATIENCE, timeout_of(group)), wait_all_ranks=True)
        except RuntimeError as error:
            raise RuntimeError(f"{what} needs all ranks together: {error}") from None


@torch.no_grad()
def gathered_state(flats, states, group=None):
    """Return {parameter: {key: value}} with whole tensors, all ranks alike, from `states` of this rank's pieces.

    A tensor as long as its piece is gathered; anything else, such as Adam's step count, is the same on all ranks.
    """
    gathered = {}
    for flat in flats:
        known = known_state(flat, states, group)
        for number, entries in sorted(known.items()):
            gathered[flat.parameters[number]] = dict(entries)
        for key in sorted({key for entries in known.values() for key in entries}):
            dtypes = [entries[key] for entries in known.values() if isinstance(entries.get(key), torch.dtype)]
            if dtypes:
                whole = gathered_entry(flat, states, key, dtypes[0], group)
                for number, entries in known.items():
                    if isinstance(entries.get(key), torch.dtype):
                        gathered[flat.parameters[number]][key] = whole[number].clone()
    return gathered


def known_state(flat, states, group=None):
    """What any rank knows of the state: {parameter's number: {key: value, or the dtype of a tensor in pieces}}."""
    mine = {}
    for number, parameter in enumerate(flat.parameters):
        shard = flat.shards[parameter]
        if shard.numel() and states.get(parameter):
            mine[number] = {
                key: value.dtype if isinstance(value, torch.Tensor) and value.shape == shard.shape else value
                for key, value in states[parameter].items()
            }
    everyone = [None] * len(flat.chunks)
    dist.all_gather_object(everyone, mine, group=group)
    return {number: entries for one in everyone for number, entries in one.items()}


def gathered_entry(flat, states, key, dtype, group=None):
    """Gather the tensors called `key` of all pieces; return whole ones, a view for each parameter of `flat`."""
    whole = torch.zeros(sum(map(len, flat.chunks)), dtype=dtype, device=flat.chunks[0].device)
    chunks = whole.tensor_split(len(flat.chunks))
    for parameter, (_, inside) in flat.pieces.items():
        if inside.start < inside.stop and key in states.get(parameter, {}):
            chunks[flat.index][inside] = states[parameter][key].as_subclass(torch.Tensor).reshape(-1)
    gather_chunks(chunks, group=group)
    return flat.views(whole)


def local_state(flats, order, state_dict, groups):
    """This rank's part of an ordinary optimizer's `state_dict`: {shard: {key: value}}, for the parameters in `order`.

    `groups` are the parameter groups it is for; they take over the settings of those in `state_dict`. As torch does,
    tensors are converted to the parameter's dtype, but for the step count. Raises ValueError, with nothing changed,
    if the state dict is of other groups or of parameters of other sizes.
    """
    sizes = [len(members["params"]) for members in state_dict["param_groups"]]
    if sizes != [len(members["params"]) for members in groups]:
        raise ValueError(
            f"the state dict has parameter groups of {sizes} parameters, but this optimizer has groups of "
            f"{[len(members['params']) for members in groups]}"
        )
    home = {parameter: flat for flat in flats for parameter in flat.parameters}
    saved = [number for members in state_dict["param_groups"] for number in members["params"]]
    taken = {}
    for number, parameter in zip(saved, order, strict=True):
        if number in state_dict["state"]:
            entries = state_dict["state"][number]
            taken[home[parameter].shards[parameter]] = piece(home[parameter], parameter, entries, number)
    for members, settings in zip(groups, state_dict["param_groups"], strict=True):
        members.update({key: value for key, value in settings.items() if key != "params"})
    return taken


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
