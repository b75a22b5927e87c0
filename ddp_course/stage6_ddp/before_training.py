"""Checks before the first step: what can be trained, and are all ranks about to train the same
model?

A rank with one parameter more, or with another shape, would add up gradients that do not belong
together, or hang. These checks find such a rank before training begins, and name its parameter.
"""

import torch
import torch.distributed as dist

from ..errors import MismatchError
from ..mesh import refuse_slices
from ..running import wire
from ..running.torch_inside import default_group, is_wrapper

# Stage 7's class, which cannot be imported here, has torch's name.
SHARDED = {"FullyShardedDataParallel", "FSDPModule"}


def trainable(module, ignored):
    """Return {name: parameter} of all parameters that take part, each once even if several layers
    share it. Raises RuntimeError if there is none or one is not initialised, ValueError for parts
    of parameters and for several types of device.
    """
    managed = {
        name: parameter for name, parameter in module.named_parameters() if name not in ignored
    }
    for name, parameter in managed.items():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise RuntimeError(
                f"parameter {name} is not initialised yet; run one batch through the model first"
            )
        if is_wrapper(type(parameter)):
            raise ValueError(
                f"parameter {name} is a {type(parameter).__name__}, which has its elements in"
                " other tensors, on several ranks perhaps: give an ordinary one, by full_tensor()"
            )
    kinds = {parameter.device.type for parameter in managed.values()}
    if len(kinds) > 1:
        raise ValueError(
            f"the model's parameters are on different types of device: {', '.join(sorted(kinds))}"
        )
    parameters = {name: parameter for name, parameter in managed.items() if parameter.requires_grad}
    if not parameters:
        raise RuntimeError(
            "DistributedDataParallel has nothing to do: no parameter of the module requires a"
            " gradient"
        )
    return parameters


def sparse_parameters(module):
    """The parameters whose gradients will be sparse tensors: those of embeddings made with
    `sparse=True`.
    """
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {
        layer.weight for layer in module.modules() if isinstance(layer, embeddings) and layer.sparse
    }


def same_on_all_ranks(parameters, group=None):
    """Raise MismatchError, a RuntimeError, on all ranks unless all have the same {name: parameter}.

    Compares number, shape, dtype and strides with rank 0's, in order; names only serve the message.
    Raises ValueError for slices of layers that these ranks share.
    """
    refuse_slices(parameters, group)
    gradients = {
        name: torch.empty_like(parameter, device="meta") for name, parameter in parameters.items()
    }
    forms = [
        (name, f"shape {tuple(gradient.shape)}, {gradient.dtype}, strides {gradient.stride()}")
        for name, gradient in gradients.items()
    ]
    ranks = [None] * dist.get_world_size(group)
    with wire.naming_absent(group):
        dist.all_gather_object(ranks, forms, group=group)
    for rank, parameters_of_rank in enumerate(ranks):
        difference = first_difference(ranks[0], parameters_of_rank, rank)
        if difference:
            raise MismatchError(f"all ranks must have the same model, but {difference}")


def first_difference(expected, actual, rank):
    """The words for how rank `rank`'s parameters differ from rank 0's; None if they do not."""
    for index, ((name, form), (own_name, own)) in enumerate(zip(expected, actual, strict=False)):
        if form != own:
            return (
                f"parameter {index} ({name}) has {form} on rank 0, and ({own_name}) {own} on rank"
                f" {rank}"
            )
    if len(expected) != len(actual):
        longer = max(expected, actual, key=len)
        extra = ", ".join(name for name, *_ in longer[min(len(expected), len(actual)) :])
        return (
            f"rank 0 has {len(expected)} parameters and rank {rank} has {len(actual)}; only one of"
            f" them has {extra}"
        )
    return None


def group_of(process_group, device_mesh):
    """The process group that the two arguments stand for; RuntimeError for both at once, and for a
    mesh of several dimensions.
    """
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is None:
        return process_group or default_group()
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    return device_mesh.get_group(mesh_dim=0)


def devices_of(parameters, device_ids, output_device):
    """Check `device_ids` and `output_device`; return [the inputs' GPU] and the outputs' GPU, or
    None for both. Raises ValueError for several devices, or a GPU without a model on it.
    """
    devices = {parameter.device for parameter in parameters.values()}
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    if len(devices) > 1 or devices.pop().type == "cpu":
        if device_ids or output_device:
            raise ValueError(
                "device_ids and output_device only work with modules on a single GPU; leave"
                " them out"
            )
        return None, None
    if not device_ids:
        return None, None
    if output_device is None:
        output_device = device_ids[0]
    return list(device_ids), output_device


def refuse_modules(module):
    """Raise ValueError for a layer whose parameters are sharded, and for torch's SyncBatchNorm on
    the CPU.
    """
    kinds = {kind.__name__ for layer in module.modules() for kind in type(layer).__mro__}
    if kinds & SHARDED:
        raise ValueError(
            "the model contains a FullyShardedDataParallel, which averages gradients itself; use it"
            " alone"
        )
    on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
    if on_cpu and any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in module.modules()):
        raise ValueError(
            "SyncBatchNorm layers only work with GPU modules; stage6_ddp.SyncBatchNorm runs"
            " anywhere"
        )
