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

`launch` starts K ranks from a script or a notebook cell: it is from `manyranks`, the library that
runs them. `lab` has what the notebooks show and measure.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from manyranks import own_code

own_code.register(__name__, __path__[0], ["lab.measuring.comparison", "collectives"])

# People and checkers see the types here; at run time a name is imported on its first use.
if TYPE_CHECKING:
    from manyranks import Device as Device
    from manyranks import Link as Link
    from manyranks import every_order as every_order
    from manyranks import launch as launch
    from manyranks import load_ipython_extension as load_ipython_extension
    from manyranks import rank_device as rank_device

    from .stage2_dataparallel import DataParallel as DataParallel
    from .stage3_paramserver import average_on_server as average_on_server
    from .stage3_paramserver import broadcast_parameters as broadcast_parameters
    from .stage4_ring import allgather as allgather
    from .stage4_ring import average_on_ring as average_on_ring
    from .stage4_ring import reduce_scatter as reduce_scatter
    from .stage4_ring import ring_all_reduce as ring_all_reduce
    from .stage4_ring import whole_gradient_ring as whole_gradient_ring
    from .stage5_bucketed import BucketedDDP as BucketedDDP
    from .stage6_ddp import DistributedDataParallel as DistributedDataParallel
    from .stage6_ddp import SyncBatchNorm as SyncBatchNorm
    from .stage7_sharded import FullyShardedDataParallel as FullyShardedDataParallel
    from .stage7_sharded import ShardedOptimizer as ShardedOptimizer

_HOMES = {
    "BucketedDDP": "ddp_course.stage5_bucketed",
    "DataParallel": "ddp_course.stage2_dataparallel",
    "Device": "manyranks",
    "DistributedDataParallel": "ddp_course.stage6_ddp",
    "FullyShardedDataParallel": "ddp_course.stage7_sharded",
    "Link": "manyranks",
    "ShardedOptimizer": "ddp_course.stage7_sharded",
    "SyncBatchNorm": "ddp_course.stage6_ddp",
    "allgather": "ddp_course.stage4_ring",
    "average_on_ring": "ddp_course.stage4_ring",
    "average_on_server": "ddp_course.stage3_paramserver",
    "broadcast_parameters": "ddp_course.stage3_paramserver",
    "every_order": "manyranks",
    "launch": "manyranks",
    "load_ipython_extension": "manyranks",
    "rank_device": "manyranks",
    "reduce_scatter": "ddp_course.stage4_ring",
    "ring_all_reduce": "ddp_course.stage4_ring",
    "whole_gradient_ring": "ddp_course.stage4_ring",
}
__all__ = list(_HOMES)

if not TYPE_CHECKING:  # Otherwise a checker would accept any name.

    def __getattr__(name):
        """Import on first use: a rank loads only what it needs."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


def __dir__():
    return __all__
