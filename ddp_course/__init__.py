"""Distributed Data Parallel training, built from nothing. Read the stages in this order:

    stage1_single        one device: forward, backward, update
    stage2_dataparallel  one process, K devices
    stage3_paramserver   K processes, one of them collects and averages
    stage4_ring          no server: the ring all-reduce
    stage5_bucketed      the ring hidden behind the backward pass
    stage6_ddp           everything a real one needs
    stage7_sharded       each rank keeps a part of the state only
    stage8_pipeline      the model is split, not the data
    stage9_tensor        layers are split too, and a mesh combines the ways

`launch` brings K ranks to life from a script or a notebook cell.
"""

from importlib import import_module

from . import ladder

_HOME = {
    "launch": "running.launching.launch",
    "rank_device": "running.devices",
    "DataParallel": "stage2_dataparallel",
    "average_on_server": "stage3_paramserver",
    "broadcast_parameters": "stage3_paramserver",
    "whole_gradient_ring": "stage4_ring",
    "ring_all_reduce": "stage4_ring",
    "reduce_scatter": "stage4_ring",
    "allgather": "stage4_ring",
    "average_on_ring": "stage4_ring",
    "BucketedDDP": "stage5_bucketed",
    "DistributedDataParallel": "stage6_ddp",
    "SyncBatchNorm": "stage6_ddp",
    "ShardedOptimizer": "stage7_sharded",
    "FullyShardedDataParallel": "stage7_sharded",
    "Link": "running.links",
    "Device": "running.devices",
    "load_ipython_extension": "running.launching.magic",
}
_ELSEWHERE = {  # so that a notebook needs one line of imports
    "torch": "torch",
    "dist": "torch.distributed",
    "show": "ddp_course.showing",
    "wire": "ddp_course.running.wire",
    "links": "ddp_course.running.links",
    "checkpoint": "ddp_course.running.checkpoint",
    "timeline": "ddp_course.measuring.timeline",
    "timing": "ddp_course.measuring.timing",
    "finite": "ddp_course.measuring.finite",
    "stragglers": "ddp_course.measuring.stragglers",
    "train": "ddp_course.train",
    "capstone": "ddp_course.capstone",
    "facts": "ddp_course.measuring.facts",
    "plans": "ddp_course.measuring.plans",
    "predict": "ddp_course.measuring.predict",
    "audit": "ddp_course.measuring.audit",
    "script": "ddp_course.script",
    "one_host": "ddp_course.measuring.simulate.one_host",
    "devices": "ddp_course.running.devices",
    "published": "ddp_course.measuring.simulate.published",
    "theory": "ddp_course.measuring.theory",
    "simulate": "ddp_course.measuring.simulate",
    "compare": "ddp_course.commands.compare",
    "doctor": "ddp_course.commands.doctor",
    "claims": "ddp_course.measuring.claims",
}
_MODULES = {*ladder.MODULES, "collectives", "communicate_less", "errors", "ladder", "problems"}
__all__ = sorted([*_HOME, *_MODULES, *_ELSEWHERE])


def __getattr__(name):
    """Import on first use: `import ddp_course` stays instant, and a rank loads only what it needs."""
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name in _ELSEWHERE:
        return import_module(_ELSEWHERE[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return __all__
