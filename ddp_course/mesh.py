"""A mesh: the ranks of a job arranged along several axes, one for each way of training."""

import math

import torch
import torch.distributed as dist

from . import wire


def mesh(**axes: int) -> dict[str, dist.ProcessGroup]:
    """Arrange all ranks row by row, as in `mesh(data=2, pipeline=2)`.

    Return this rank's group along each axis, by the axis's name. All ranks call this. Raises
    ValueError unless the axes are whole numbers, 1 or more, that multiply to the number of ranks.
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
