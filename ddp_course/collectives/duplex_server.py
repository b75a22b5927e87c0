"""A server that uses both directions of its link at once."""

import torch
import torch.distributed as dist

from ..running import wire
from .flat import copied_back, flattened


@wire.collective
@torch.no_grad()
def duplex_server_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, pieces: int = 16
) -> torch.Tensor:
    """Sum by way of the group's first rank: it sends one piece of the sum back while the next one
    comes in.
    """
    flat = flattened(tensor)
    parts = flat.tensor_split(pieces)
    serving = dist.get_rank(group) == 0
    peers = wire.others(0, group) if serving else [wire.global_rank(0, group)]
    for coming in range(
        pieces + 1
    ):  # this piece goes to the server, while the piece before it comes back
        there = parts[coming : coming + 1]
        back = parts[coming - 1 : coming] if coming else ()
        if serving:
            arriving = [(torch.empty_like(part), peer) for part in there for peer in peers]
            wire.exchange_all([(part, peer) for part in back for peer in peers], arriving, group)
            for part, _ in arriving:
                there[0].add_(part)
        else:
            wire.exchange_all(
                [(part, peers[0]) for part in there], [(part, peers[0]) for part in back], group
            )
    return copied_back(flat, tensor)
