"""Ranks that run out of data early, while the others still wait for them in every collective.

Inside `with ddp.join():` a rank that is done does not leave. It *shadows* the others: for every forward and backward
pass of theirs it takes part in the same collectives, with zeros. The context manager and its protocol are
`torch.distributed.algorithms.Join`; this is what one shadowed iteration of DDP consists of.
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook


class Shadow(JoinHook):
    """The part of a rank without data. `divide_by_initial_world_size` chooses the divisor of the others' sum:

    True: by K, as if the missing shares were zero, so every sample of the epoch weighs the same.
    False: by the number of ranks that still have data, so the late samples weigh more.
    """

    def __init__(self, ddp, divide_by_initial_world_size=True):
        super().__init__()
        self.ddp, ddp.divides_by_initial_world_size, ddp.buffers_from = ddp, divide_by_initial_world_size, 0

    def main_hook(self):
        """Shadow one iteration: rebuilding, buffers, and if the others synchronise in it, all buckets."""
        ddp, reducer = self.ddp, self.ddp.reducer
        reducer.rebuild()
        if ddp.syncs_buffers():
            ddp.sync_buffers(common_rank(ddp, False))
        ddp.require_forward_param_sync = others_synchronise(ddp, False)
        if ddp.require_forward_param_sync:
            reducer.shadow()

    def post_hook(self, is_last_joiner):
        """All are done: the rank that trained last has the newest buffers, so its model goes to all."""
        self.ddp.sync_model(common_rank(self.ddp, is_last_joiner), self.ddp.forward_sync_buffers)
        self.ddp._join_config = type(self.ddp._join_config).construct_disabled_join_config()
        self.ddp.buffers_from = dist.get_world_size(self.ddp.process_group) - 1  # torch stays in join mode too


def common_rank(ddp, candidate):
    """Agree on one rank among those that are candidates: the highest."""
    rank = torch.tensor([dist.get_rank(ddp.process_group) if candidate else -1], device=ddp.device)
    dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=ddp.process_group)
    return rank.item()


def others_synchronise(ddp, mine):
    """Whether any rank synchronises its gradients in this iteration; a rank outside `no_sync` says so with `mine`."""
    votes = torch.full((1,), float(mine), device=ddp.device)
    dist.all_reduce(votes, group=ddp.process_group)
    return votes.item() > 0


def active_ranks(work):
    """The number of ranks that still have data, from the all-reduce that announced this iteration."""
    work.wait()  # the current stream waits for it; it would not wait for gloo's future
    return int(work.get_future().wait()[0].item())
