"""The processor answers for the GPUs that a script asks for.

A script may say "cuda" and "nccl" wherever torch takes a device or a backend: its tensors are on
the processor, which stands for the emulated device. Some things differ: a tensor's `device` says
"cpu", a copy to the GPU takes no time, and no kernels are loaded. `torch.compile` is left out. A
script that calls CUDA itself, or kernels of its own, fails.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from ..clocks import streams
from ..devices.memory import Memory
from ..torch_inside import around, replaced

PROCESSOR = torch.device("cpu")
H100_CAPABILITY = (9, 0)
H100_MEMORY = 80e9  # bytes
H100_MULTIPROCESSORS = 132


def on_processor(value: Any) -> Any:
    """Return the processor for a GPU, and any other value as it is."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return PROCESSOR
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


class OnProcessor(TorchFunctionMode):
    """A mode in which functions of torch get the processor where they are given a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        first = args[0] if args else None
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return first
        if func is torch.device and on_processor(first) != first:
            # There is one processor, whatever the number of the GPU is.
            return PROCESSOR
        return redirected(func, *args, **(kwargs or {}))


def redirected(run: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return `run(…)` with the processor in place of GPUs."""
    changed = [on_processor(value) for value in args]
    named = {name: on_processor(value) for name, value in kwargs.items()}
    return run(*changed, **named)


def without(*names: str) -> Callable:
    """Return a hook around a function that leaves these arguments out, and GPUs too."""

    def hook(run: Callable, *args: Any, **kwargs: Any) -> Any:
        kept = {name: value for name, value in kwargs.items() if name not in names}
        return redirected(run, *args, **kept)

    return hook


def ddp(run: Callable, wrapper: Any, module: Any, *more: Any, **kwargs: Any) -> None:
    """Make torch's DDP of a module on the processor, which takes no numbers of devices."""
    kwargs.pop("device_ids", None)
    kwargs.pop("output_device", None)
    devices = [None, None][: len(more)]  # The first two arguments after the module are these, too.
    run(wrapper, module, *devices, *more[2:], **kwargs)


def autocast(run: Callable, context: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    """Make an autocast of the processor with the GPU's usual type."""
    if device_type == "cuda" and not args and kwargs.get("dtype") is None:
        kwargs["dtype"] = torch.float16
    run(context, on_processor(device_type), *args, **kwargs)


def compiled(run: Callable, model: Any = None, **options: Any) -> Any:
    """Return a model or a function as it is: it would be compiled for the processor."""
    # With options alone it is a decorator.
    return as_it_is if model is None else model


def as_it_is(function: Callable) -> Callable:
    """Return a function, in place of the compiled one."""
    return function


def memory_live(device: Any = None) -> int:
    """Return the bytes of live tensors, as `torch.cuda.memory_allocated` does."""
    return Memory.current.live if Memory.current else 0


def memory_peak(device: Any = None) -> int:
    """Return the most bytes that were live at once, as `torch.cuda.max_memory_allocated` does."""
    return Memory.current.peak if Memory.current else 0


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, in place of a function that only matters to a real GPU."""


def answers(device: Any, local_rank: int, per_host: int) -> dict[str, Any]:
    """Return functions that answer for those of `torch.cuda`, by their names."""
    # Where an emulated device has no such number, it answers with the H100's.
    major, minor = H100_CAPABILITY
    capacity = int(device.capacity or H100_MEMORY)
    properties = SimpleNamespace(
        name=str(device.name or device),
        total_memory=capacity,
        major=major,
        minor=minor,
        multi_processor_count=H100_MULTIPROCESSORS,
    )
    fixed = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": per_host,
        "current_device": local_rank,
        "get_device_name": properties.name,
        "get_device_capability": H100_CAPABILITY,
        "get_device_properties": properties,
    }
    functions: dict[str, Any] = {}
    for name, value in fixed.items():
        functions[name] = lambda *_, value=value, **__: value
    functions["mem_get_info"] = lambda *_: (capacity - memory_live(), capacity)
    for name in ("set_device", "empty_cache", "reset_peak_memory_stats", "init", "ipc_collect"):
        functions[name] = nothing
    for name in ("memory_allocated", "memory_reserved"):
        functions[name] = memory_live
        functions[f"max_{name}"] = memory_peak
    return functions


@contextmanager
def as_gpus(device: Any, local_rank: int, per_host: int) -> Iterator[None]:
    """Have the processor answer for this rank's GPU, an emulated `device`, within this block."""
    replacements = answers(device, local_rank, per_host)
    replacements["synchronize"] = nothing
    if device.streams:
        replacements.update(streams.FUNCTIONS, default_stream=lambda *_: streams.process.default)
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.cuda, **replacements))
        # A build of torch with CUDA would ask its driver for more, as a build without it does not.
        stack.enter_context(replaced(torch.accelerator, current_accelerator=nothing))
        for owner, name, hook in (
            (DeviceMesh, "__init__", redirected),
            (DistributedDataParallel, "__init__", ddp),
            (torch.autocast, "__init__", autocast),
            (torch.amp.GradScaler, "__init__", redirected),
            (torch, "set_default_device", redirected),
            (torch, "compile", compiled),
            (dist, "barrier", without("device_ids")),
            (dist, "new_group", without("backend", "device_id")),
        ):
            stack.enter_context(around(owner, name, hook))
        stack.enter_context(OnProcessor())
        yield
