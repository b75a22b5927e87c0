"""Lets ranks run out of data early, while the others still need them in every collective.

Inside `with ddp.join():` a rank that is done does not leave. It *shadows* the other ranks: in each
of their forward and backward passes it takes part in the same collectives, with zeros. The context
manager and its protocol are `torch.distributed.algorithms.Join`; this module has what a rank does
in one shadowed iteration of DDP.
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook


class Shadow(JoinHook):
    """What a rank without data does.

    `divide_by_initial_world_size` chooses the divisor of the other ranks' sum:

    - True: it is K, as if the missing shares were zero, so every sample of the epoch weighs the
      same.
    - False: it is the number of ranks that still have data, so the late samples weigh more.
    """

    def __init__(self, ddp, divide_by_initial_world_size):
        super().__init__()
        self.ddp = ddp
        ddp.divides_by_initial_world_size = divide_by_initial_world_size
        ddp.buffers_from = 0

    def main_hook(self):
        """Shadow one iteration: rebuild, broadcast and reduce if the other ranks do."""
        ddp = self.ddp
        ddp.reducer.rebuild()
        if ddp.syncs_buffers():
            ddp.sync_buffers(common_rank(ddp, candidate=False))
        ddp.require_forward_param_sync = any_synchronises(ddp, own=False)
        if ddp.require_forward_param_sync:
            ddp.reducer.shadow()

    def post_hook(self, is_last_joiner):
        """Give all ranks the model of a rank that trained last, which has the newest buffers."""
        self.ddp.sync_model(common_rank(self.ddp, is_last_joiner), self.ddp.forward_sync_buffers)
        self.ddp._join_config = type(self.ddp._join_config).construct_disabled_join_config()
        # From now on buffers are the last rank's, as in torch's class.
        self.ddp.buffers_from = dist.get_world_size(self.ddp.process_group) - 1


def common_rank(ddp, candidate):
    """Return the highest rank among the candidates; -1 if there is none."""
    own = dist.get_rank(ddp.process_group) if candidate else -1
    rank = torch.tensor([own], device=ddp.device)
    dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=ddp.process_group)
    return rank.item()


def any_synchronises(ddp, own):
    """Return whether any rank synchronises its gradients in this iteration.

    `own` is True on a rank that does: it has data, and is not in `no_sync`.
    """
    return common_rank(ddp, candidate=own) >= 0


def active_ranks(work):
    """Return the number of ranks with data, from the all-reduce that announced an iteration."""
    # This makes the current stream wait, which gloo's future would not do.
    work.wait()
    return int(work.get_future().wait()[0].item())
