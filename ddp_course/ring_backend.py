"""The learner's own ring under torch's own training.

torch's DistributedDataParallel and `fully_shard` ask a *process group* for their collectives. The
group of this module answers with functions of your own; torch cannot tell it from gloo or NCCL.

    register("ring", all_reduce=my_ring)
    group = dist.new_group(backend="ring")  # on all ranks
    model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)

Each collective is over when its call returns, so nothing overlaps with the backward pass.
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from .base.torch_private import GroupOverAnother, group_like
from .stage4_ring import allgather, reduce_scatter, ring_all_reduce


def register(
    name: str = "ring",
    all_reduce: Callable = ring_all_reduce,
    reduce_scatter: Callable = reduce_scatter,
    allgather: Callable = allgather,
) -> None:
    """Have `dist.new_group(backend=name)` make groups whose collectives are these functions.

    `all_reduce(tensor, group=…)` sums a tensor in place; `reduce_scatter(chunks, group=…)` and
    `allgather(chunks, group=…)` are the halves of a ring: rank r sums up, and then hands out, chunk
    r+1. Their messages go over `group`, a twin of the new group. If a name is registered again, the
    new functions are those of groups that are made from then on.
    """

    def make(told, options):
        beneath = group_like(None, told.global_ranks_in_group, told.group_id)
        return RingGroup(beneath, told.group_id, all_reduce, reduce_scatter, allgather)

    dist.Backend.register_backend(name, make, extended_api=True, devices=["cpu"])


class RingGroup(GroupOverAnother):
    """A process group that sums, scatters and gathers with functions of the ring.

    Operations that carry no gradients, such as a broadcast or a barrier, are done by the group
    beneath.
    """

    def __init__(self, beneath, name, all_reduce, reduce_scatter, allgather):
        super().__init__(beneath, name)
        self.ring = all_reduce
        self.first_half = reduce_scatter
        self.second_half = allgather

    def add_up(self, tensor: Tensor) -> None:
        """Sum a tensor in place."""
        self.ring(tensor, group=self.beneath)

    def add_up_own(self, output: Tensor, tensor: Tensor) -> None:
        """Put the sum over the ranks of this rank's K-th of `tensor` into `output`."""
        chunks = self.as_of_ring(list(tensor.clone().view(-1).tensor_split(self.size())))
        self.first_half(chunks, group=self.beneath)
        finished = chunks[(self.rank() + 1) % self.size()]
        output.view(-1).copy_(finished)

    def collect(self, output: Tensor, tensor: Tensor) -> None:
        """Put the `tensor` of each rank, in rank order, into `output`."""
        chunks = list(output.view(-1).tensor_split(self.size()))
        chunks[self.rank()].copy_(tensor.view(-1))
        self.second_half(self.as_of_ring(chunks), group=self.beneath)

    def as_of_ring(self, chunks: list[Tensor]) -> list[Tensor]:
        """Return the chunks so that the ring's chunk r+1, which rank r finishes, is torch's r."""
        return chunks[-1:] + chunks[:-1]
