"""Checks before the first step that the model and the arguments are such as can be trained here."""

import torch

from manyranks.torch_inside import is_wrapper

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
