"""The functions of `torch.cuda` that the course, its lessons and torch itself call, for pretended
GPUs.
"""

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
    return lambda device=None: counter[index_of(device)]


def functions():
    """Return {name in torch.cuda: function}."""
    return {
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(device, number=0),
        "set_stream": set_stream,
        "set_device": set_device,
        "current_device": lambda: native.pretend_device(),
        "synchronize": synchronize,
        "is_available": lambda: visible() > 0,
        "is_initialized": lambda: bool(contexts),
        "device_count": visible,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "_exchange_device": exchange_device,
        # `torch.compile` wants two functions here.
        "_maybe_exchange_device": lambda index: exchange_device(index),
        "_sleep": sleep,
        "memory_allocated": use_of(memory.used),
        "memory_reserved": use_of(memory.used),
        "max_memory_allocated": use_of(memory.peak),
        "max_memory_reserved": use_of(memory.peak),
        "reset_peak_memory_stats": reset_peak,
        "mem_get_info": lambda device=None: (
            memory.SIZE - memory.used[index_of(device)],
            memory.SIZE,
        ),
        "empty_cache": lambda: None,
        "manual_seed": tensors.seed_all,
        "manual_seed_all": tensors.seed_all,
        "get_rng_state": lambda device=None: tensors.generator_state(index_of(device)),
        "get_rng_state_all": lambda: [tensors.generator_state(i) for i in range(visible())],
        "set_rng_state": set_rng_state,
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": properties,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda *_, **__: True,
        "can_device_access_peer": lambda one, other: one != other,
    }


def install():
    """Put the functions into torch."""
    for name, function in functions().items():
        setattr(torch.cuda, name, function)
    torch.cuda.nccl.version = lambda: (2, 30, 0)
    torch.backends.cuda.is_built = lambda: True
    torch.version.cuda = "13.0"
    # `torch.compile` imports this class where torch was built for CUDA.
    torch._C._cuda_CUDAAllocator_AllocatorState = type("AllocatorState", (), {})
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.Tensor.is_pinned = lambda self, *_: False
    assert GPUS > 0
