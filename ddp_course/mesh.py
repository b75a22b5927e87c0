"""A mesh: the ranks of a job arranged along several axes, one for each way of training."""

import torch
import torch.distributed as dist

from .running import wire


def mesh(**axes: int) -> dict[str, dist.ProcessGroup]:
    """Arrange all ranks row by row, as in `mesh(data=2, pipeline=2)`; return {axis: this rank's
    group along it}.

    All ranks call this. Raises ValueError unless the axes are whole numbers, 1 or more, that
    multiply to the number of ranks.
    """
    world_size = dist.get_world_size()
    if any(not isinstance(size, int) or size < 1 for size in axes.values()):
        raise ValueError(f"a mesh of {axes} cannot be: each axis is a whole number of 1 or more")
    if torch.Size(axes.values()).numel() != world_size:
        raise ValueError(
            f"{world_size} ranks cannot form a mesh of {axes}: its axes must multiply to"
            f" {world_size}"
        )
    ranks = torch.arange(world_size).view(*axes.values())
    groups = {}
    for position, (axis, size) in enumerate(axes.items()):
        lines = ranks.movedim(position, -1).reshape(-1, size)
        groups[axis] = wire.group_among(dist.group.WORLD, tuple(map(tuple, lines.tolist())))
    return groups
