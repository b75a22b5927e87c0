"""Recursive halving and doubling: few steps and least traffic, between partners that are far apart."""

import torch
import torch.distributed as dist

from ..running import wire
from .flat import copied_back


@wire.collective
@torch.no_grad()
def halving_doubling_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Recursive halving, then recursive doubling: exchange half, a quarter, an eighth …, and the same way back.

    Where K is not a power of two, the ranks beyond the largest one hand their tensor to a partner and wait.
    """
    flat = tensor.contiguous().view(-1)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    power = 2 ** (world_size.bit_length() - 1)
    partner = (
        wire.global_rank((rank + power) % (2 * power), group) if (rank + power) % (2 * power) < world_size else None
    )
    if partner is not None and rank >= power:
        wire.send(flat, partner, group)
        wire.recv(flat, partner, group)
        return copied_back(flat, tensor)
    if partner is not None:
        incoming = torch.empty_like(flat)
        wire.recv(incoming, partner, group)
        flat += incoming
    halve_and_double(flat, rank, power // 2, group)
    if partner is not None:
        wire.send(flat, partner, group)
    return copied_back(flat, tensor)


def halve_and_double(part: torch.Tensor, rank: int, distance: int, group: dist.ProcessGroup | None = None) -> None:
    """Exchange halves of `part` with the rank at `distance`, sum the kept half by recursion, fetch the other half."""
    if distance == 0:
        return
    lower, upper = part.tensor_split(2)
    kept, given = (lower, upper) if rank & distance == 0 else (upper, lower)
    peer = wire.global_rank(rank ^ distance, group)
    incoming = torch.empty_like(kept)
    wire.exchange(given, peer, incoming, peer, group)
    kept += incoming
    halve_and_double(kept, rank, distance // 2, group)
    wire.exchange(kept, peer, given, peer, group)
