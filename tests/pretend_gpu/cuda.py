"""The functions of `torch.cuda` that the course and torch itself call, for pretended GPUs."""

import types

import torch

from . import memory, tensors
from .streams import (
    GPUS,
    Event,
    Stream,
    StreamContext,
    clocks,
    contexts,
    current_stream,
    host_waits,
    index_of,
    merge,
    native,
    open_context,
    physical,
    queue_work,
    set_device,
    set_stream,
    visible,
)


def synchronize(device=None):
    """Let the processor wait for all streams of a GPU."""
    index = open_context(index_of(device))
    known = {}
    for key, clock in list(clocks.items()):
        if key[0] == index:
            merge(known, clock)
    host_waits(known, "synchronize")


def exchange_device(index):
    """Make a GPU current without using it yet; return the one before."""
    before = native.pretend_device()
    if index >= 0:
        native.pretend_set_device(index)
    return before


def maybe_exchange_device(index):
    """Do what `exchange_device` does: `torch.compile` wants two functions."""
    return exchange_device(index)


def properties(device=None):
    """Return the properties that all pretended GPUs have."""
    index = index_of(device)
    if not 0 <= index < visible():
        raise AssertionError("Invalid device id")
    return types.SimpleNamespace(
        name="Pretended GPU",
        uuid=f"pretended-{physical(index)}",
        total_memory=memory.SIZE,
        multi_processor_count=1,
        major=9,
        minor=0,
    )


def reset_peak(device=None):
    """Count the peak of memory anew."""
    memory.peak[index_of(device)] = memory.used[index_of(device)]


def set_rng_state(state, device=None):
    """Set the state of a GPU's random generator."""
    tensors.generators[index_of(device)] = state


def sleep(cycles):
    """Put a piece of work on the stream that keeps it busy."""
    stream = current_stream()
    queue_work((open_context(stream.device_index), stream.stream_id))


def use_of(counter):
    """Return a function that reads a counter of bytes for a GPU."""

    def read(device=None):
        return counter[index_of(device)]

    return read


def current_device():
    """Return the number of the GPU that is current."""
    return native.pretend_device()


def default_stream(device=None):
    """Return the stream on which work is done unless another one is chosen."""
    return Stream(device, number=0)


def mem_get_info(device=None):
    """Return the bytes that are free on a GPU, and all that it has."""
    return memory.SIZE - memory.used[index_of(device)], memory.SIZE


def get_rng_state(device=None):
    """Return the state of a GPU's random generator."""
    return tensors.generator_state(index_of(device))


def get_rng_state_all():
    """Return the states of all GPUs' random generators."""
    return [tensors.generator_state(index) for index in range(visible())]


def get_device_name(device=None):
    """Return the name of a GPU."""
    return properties(device).name


def get_device_capability(device=None):
    """Return the capability of an H100: no code asks for more."""
    return 9, 0


def get_amp_supported_dtype():
    """Return the dtypes of mixed precision."""
    return [torch.float16, torch.bfloat16]


def is_available():
    """Return whether this process sees a GPU."""
    return visible() > 0


def is_initialized():
    """Return whether this process has used a GPU."""
    return bool(contexts)


def is_bf16_supported(*_, **__):
    """Return that bfloat16 can be computed with."""
    return True


def can_device_access_peer(one, other):
    """Return whether one GPU reads another's memory: all do."""
    return one != other


def do_nothing():
    """Take the place of what has nothing to do without a driver."""


def is_in_bad_fork():
    """Return that this process may use GPUs."""
    return False


STREAMS = {
    "Stream": Stream,
    "Event": Event,
    "StreamContext": StreamContext,
    "stream": StreamContext,
    "current_stream": current_stream,
    "default_stream": default_stream,
    "set_stream": set_stream,
    "synchronize": synchronize,
    "_sleep": sleep,
}
DEVICES = {
    "set_device": set_device,
    "current_device": current_device,
    "is_available": is_available,
    "is_initialized": is_initialized,
    "device_count": visible,
    "init": do_nothing,
    "_lazy_init": do_nothing,
    "_is_in_bad_fork": is_in_bad_fork,
    "_exchange_device": exchange_device,
    "_maybe_exchange_device": maybe_exchange_device,
    "get_device_name": get_device_name,
    "get_device_capability": get_device_capability,
    "get_device_properties": properties,
    "get_amp_supported_dtype": get_amp_supported_dtype,
    "is_bf16_supported": is_bf16_supported,
    "can_device_access_peer": can_device_access_peer,
}
MEMORY = {
    "memory_allocated": use_of(memory.used),
    "memory_reserved": use_of(memory.used),
    "max_memory_allocated": use_of(memory.peak),
    "max_memory_reserved": use_of(memory.peak),
    "reset_peak_memory_stats": reset_peak,
    "mem_get_info": mem_get_info,
    "empty_cache": do_nothing,
}
GENERATORS = {
    "manual_seed": tensors.seed_all,
    "manual_seed_all": tensors.seed_all,
    "get_rng_state": get_rng_state,
    "get_rng_state_all": get_rng_state_all,
    "set_rng_state": set_rng_state,
}


def install():
    """Put the functions into torch."""
    for functions in (STREAMS, DEVICES, MEMORY, GENERATORS):
        for name, function in functions.items():
            setattr(torch.cuda, name, function)
    torch.cuda.nccl.version = lambda: (2, 30, 0)
    torch.backends.cuda.is_built = lambda: True
    torch.version.cuda = "13.0"
    # `torch.compile` imports this class where torch was built for CUDA.
    torch._C._cuda_CUDAAllocator_AllocatorState = type("AllocatorState", (), {})
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.Tensor.is_pinned = lambda self, *_: False
    assert GPUS > 0
