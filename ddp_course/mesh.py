"""A mesh: the ranks of a job arranged along several axes, one for each way of training."""

import math
from typing import Any

import torch
import torch.distributed as dist

from . import wire


def mesh(**axes: int) -> dict[str, dist.ProcessGroup]:
    """Arrange all ranks row by row, as in `mesh(data=2, pipeline=2)`; return {axis: this rank's
    group along it}.

    All ranks call this. Raises ValueError unless the axes are whole numbers, 1 or more, that
    multiply to the number of ranks.
    """
    world_size = dist.get_world_size()
    whole = all(isinstance(size, int) and size > 0 for size in axes.values())
    if not whole or math.prod(axes.values()) != world_size:
        raise ValueError(
            f"{world_size} ranks cannot form a mesh of {axes}: its axes must be whole numbers, 1 or"
            f" more, that multiply to {world_size}"
        )
    ranks = torch.arange(world_size).view(*axes.values())
    groups = {}
    for position, (axis, size) in enumerate(axes.items()):
        for line in ranks.movedim(position, -1).reshape(-1, size).tolist():
            if dist.get_rank() in line:
                groups[axis] = wire.group_of(dist.group.WORLD, tuple(line))
    return groups


def refuse_slices(parameters: dict[str, Any], group: wire.Group) -> None:
    """Raise ValueError for parameters that stage 9 has split over ranks of this `group`: they are
    different slices, of which there is no average.
    """
    members = set(dist.get_process_group_ranks(group))
    for name, parameter in parameters.items():
        if hasattr(parameter, "cut"):  # Stage 9 marks the parameters that it has split with this.
            sharing = dist.get_process_group_ranks(parameter.cut.all_reduce.group)
            if len(members.intersection(sharing)) > 1:  # This rank is in both groups.
                raise ValueError(
                    f"parameter {name} is split over ranks of this process group: average over the"
                    " mesh's data axis, as in DistributedDataParallel(model,"
                    ' process_group=mesh(data=…, tensor=…)["data"])'
                )
