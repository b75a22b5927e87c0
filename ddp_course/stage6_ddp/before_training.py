"""Checks before the first step that all ranks are about to train the same model.

A rank with one parameter more, or with another shape, would add up gradients that do not belong
together, or hang. These checks find such a rank before training begins, and name its parameter.
"""

import torch
import torch.distributed as dist

from manyranks.errors import MismatchError
from manyranks.torch_inside import is_wrapper

from .. import wire
from ..base.torch_private import default_group


def trainable(module, ignored):
    """Return {name: parameter} of all parameters that take part, each once.

    Several layers may share a parameter. `ignored` has the names of parameters that take no part.
    Raises RuntimeError if there is no parameter or one is not initialised, ValueError for parts of
    parameters and for several types of device.
    """
    parameters = dict(module.named_parameters())
    for name in ignored:
        parameters.pop(name, None)
    for name, parameter in parameters.items():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise RuntimeError(
                f"parameter {name} is not initialised yet; run one batch through the model first"
            )
        if is_wrapper(type(parameter)):
            raise ValueError(
                f"parameter {name} is a {type(parameter).__name__}, which has its elements in"
                " other tensors, on several ranks perhaps: give an ordinary one, by full_tensor()"
            )
    device_types = {parameter.device.type for parameter in parameters.values()}
    if len(device_types) > 1:
        raise ValueError(
            "the model's parameters are on different types of device:"
            f" {', '.join(sorted(device_types))}"
        )
    trained = {name: value for name, value in parameters.items() if value.requires_grad}
    if not trained:
        raise RuntimeError(
            "DistributedDataParallel has nothing to do: no parameter of the module requires a"
            " gradient"
        )
    return trained


def sparse_parameters(module):
    """Return the weights of embeddings with `sparse=True`, whose gradients will be sparse."""
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {
        layer.weight for layer in module.modules() if isinstance(layer, embeddings) and layer.sparse
    }


def same_on_all_ranks(parameters, group=None):
    """Raise MismatchError, a RuntimeError, on all ranks unless all have the same {name: parameter}.

    Number, shape, dtype and strides are compared with rank 0's, in order; names only serve the
    message.
    """
    forms = []
    for name, parameter in parameters.items():
        # The gradient's strides count: `empty_like` packs them as autograd does.
        gradient = torch.empty_like(parameter, device="meta")
        form = f"shape {tuple(gradient.shape)}, {gradient.dtype}, strides {gradient.stride()}"
        forms.append((name, form))
    forms_of_ranks = [None] * dist.get_world_size(group)
    with wire.naming_absent(group):
        dist.all_gather_object(forms_of_ranks, forms, group=group)
    for rank, forms_of_rank in enumerate(forms_of_ranks):
        difference = first_difference(forms_of_ranks[0], forms_of_rank, rank)
        if difference:
            raise MismatchError(f"all ranks must have the same model, but {difference}")


def first_difference(expected, actual, rank):
    """Return in words how a rank's parameters differ from rank 0's; None if they do not.

    Both lists have the (name, form) of each parameter.
    """
    for index, ((name, form), (other_name, other_form)) in enumerate(
        zip(expected, actual, strict=False)
    ):
        if form != other_form:
            return (
                f"parameter {index} ({name}) has {form} on rank 0, and ({other_name}) {other_form}"
                f" on rank {rank}"
            )
    shorter, longer = sorted([expected, actual], key=len)
    if len(shorter) == len(longer):
        return None
    extra = ", ".join(name for name, _ in longer[len(shorter) :])
    return (
        f"rank 0 has {len(expected)} parameters and rank {rank} has {len(actual)}; only one of"
        f" them has {extra}"
    )


def group_of(process_group, device_mesh):
    """Return the process group for which the two arguments stand.

    Raises RuntimeError for both at once, and for a mesh of several dimensions.
    """
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is None:
        return process_group or default_group()
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    return device_mesh.get_group(mesh_dim=0)


def devices_of(parameters, device_ids, output_device):
    """Return the arguments [the inputs' GPU] and the outputs' GPU, checked, or None for both.

    Raises ValueError for several devices, or a GPU without the model on it.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    devices = {parameter.device for parameter in parameters.values()}
    on_one_gpu = len(devices) == 1 and devices != {torch.device("cpu")}
    if (device_ids or output_device) and not on_one_gpu:
        raise ValueError(
            "device_ids and output_device only work with modules on a single GPU; leave them out"
        )
    if not device_ids:
        return None, None
    if output_device is None:
        output_device = device_ids[0]
    return list(device_ids), output_device


def refuse_modules(module):
    """Raise ValueError for a layer that torch has sharded, or its SyncBatchNorm on the CPU."""
    # Classes are known by the names of their modules, as importing torch's FSDP takes a while.
    homes = {each.__module__ for layer in module.modules() for each in type(layer).__mro__}
    if any(home.startswith("torch.distributed.fsdp") for home in homes):
        raise ValueError(
            "torch's FSDP has sharded a part of the model, and averages gradients itself; use it"
            " alone"
        )
    on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
    if on_cpu and any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in module.modules()):
        raise ValueError(
            "SyncBatchNorm layers only work with GPU modules; stage6_ddp.SyncBatchNorm runs"
            " anywhere"
        )
