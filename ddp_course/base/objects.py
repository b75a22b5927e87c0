"""Objects of all ranks, brought together on each of them."""

from typing import Any

import torch.distributed as dist


def of_all_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the `value` of each rank of `group`, in rank order; all ranks call this."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
