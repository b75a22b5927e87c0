"""Install the pretended GPUs into torch, once in each process, when torch has been imported."""

import atexit
import functools
import os
import sys
import time

import torch

_keep = []


def install():
    """Make `torch.cuda` and the backend "nccl" work on pretended GPUs."""
    import torch.distributed  # all of torch is there before it is changed
    import torch.optim.optimizer as optimizer
    import torch.profiler
    import torch.utils._foreach_utils as foreach

    from . import cuda, memory, nccl, profiler, streams, tensors

    streams.start()
    cuda.install()
    torch.__future__.set_swap_module_params_on_conversion(True)  # module.to() keeps its parameters
    torch.nn.Module.load_state_dict = copying(torch.nn.Module.load_state_dict)
    for module in (optimizer, foreach):
        if tensors.PretendTensor not in module._foreach_supported_types:
            module._foreach_supported_types.append(tensors.PretendTensor)
    torch.UntypedStorage.resize_ = memory.resizing(torch.UntypedStorage.resize_)
    torch.serialization.add_safe_globals([tensors.rebuild])
    torch.load = tensors.load_by(torch.load)
    library = torch.library.Library("aten", "IMPL")
    _keep.append(library)
    tensors.register(library)
    nccl.install()
    profiler.install()
    os.register_at_fork(before=functools.partial(warm_up, streams))
    # Autograd's threads let go of their last tensors meanwhile: that needs Python.
    atexit.register(time.sleep, 0.1)


def copying(original):
    """`load_state_dict`, which copies into the parameters as ever, also if hooks hold them."""

    @functools.wraps(original)
    def load_state_dict(*args, **kwargs):
        torch.__future__.set_swap_module_params_on_conversion(False)
        try:
            return original(*args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(True)

    return load_state_dict


def warm_up(streams):
    """Before a fork, run an operation if none was run yet.

    For the first one torch imports DTensor, which takes half as long as torch itself, and each
    child would do it again.
    """
    if "torch.distributed.tensor" in sys.modules or not streams.visible():
        return
    log = os.environ.pop("PRETEND_LOG", None)
    torch.ones(1, device="cuda:0") + 1
    if log is not None:
        os.environ["PRETEND_LOG"] = log
    streams.contexts.clear()
    streams.clocks.clear()
    streams.host.clear()
