"""Distributed Data Parallel training, built from nothing. Read the stages in this order:

    stage1_single        one device: forward, backward, update
    stage2_dataparallel  one process, K devices
    stage3_paramserver   K processes, one of them collects and averages
    stage4_ring          no server: the ring all-reduce
    stage5_bucketed      the ring hidden behind the backward pass
    stage6_ddp           everything that a real DDP needs
    stage7_sharded       each rank keeps a part of the state only
    stage8_pipeline      the model is split, not the data
    stage9_tensor        layers are split too, and a mesh combines the ways

`launch` starts K ranks from a script or a notebook cell.
"""

from importlib import import_module

from . import ladder
from .running import own_code

own_code.register(__name__, __path__[0], ["measuring.comparison", "collectives"])

_NAMES = {  # Each module has these functions and classes, which are names of the package, too.
    "running.launching.launch": ("launch",),
    "running.launching.magic": ("load_ipython_extension",),
    "running.devices": ("Device", "rank_device"),
    "running.links": ("Link",),
    "measuring.on_your_gpus": ("on_your_gpus",),
    "orders.every": ("every_order",),
    "stage2_dataparallel": ("DataParallel",),
    "stage3_paramserver": ("average_on_server", "broadcast_parameters"),
    "stage4_ring": (
        "whole_gradient_ring",
        "ring_all_reduce",
        "reduce_scatter",
        "allgather",
        "average_on_ring",
    ),
    "stage5_bucketed": ("BucketedDDP",),
    "stage6_ddp": ("DistributedDataParallel", "SyncBatchNorm"),
    "stage7_sharded": ("ShardedOptimizer", "FullyShardedDataParallel"),
}
_TOP = (  # These modules lie beside this file.
    *ladder.MODULES,
    "checkpoint",
    "collectives",
    "communicate_less",
    "errors",
    "ladder",
    "problems",
    "script",
    "train",
    "wire",
)
_ROOMS = {  # These modules of rooms are names of the package, so that a notebook needs one import.
    "running": ("devices", "links"),
    "measuring": (
        "audit",
        "claims",
        "facts",
        "finite",
        "simulate",
        "theory",
        "timeline",
        "timing",
        "traces",
    ),
    "commands": ("compare", "doctor"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = {
    **{name: f"ddp_course.{name}" for name in _TOP},
    **{name: f"ddp_course.{room}.{name}" for room, names in _ROOMS.items() for name in names},
    "show": "ddp_course.showing",
}
__all__ = sorted([*_HOME, *_MODULES])


def __getattr__(name):
    """Import on first use: `import ddp_course` stays instant, and a rank loads only what it
    needs.
    """
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    if name in _MODULES:
        return import_module(_MODULES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return __all__
