"""Recursive halving and doubling: few steps and least traffic."""

import torch
import torch.distributed as dist

from .. import wire
from .strides import copy_back, flat_memory


@wire.collective
@torch.no_grad()
def halving_doubling_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Sum `tensor` over the ranks of `group` in place, by recursive halving and doubling.

    Partners exchange a half, then a quarter, an eighth …, and the same on the way back. They are
    first neighbours, so that the largest parts go the shortest way, then at distance 2, 4 …. Where
    K is not a power of two, some of the first ranks form pairs, each of which acts as one rank: the
    odd rank sends its tensor to the even rank, and waits for the sum.
    """
    flat = flat_memory(tensor)
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    power = 2 ** (world_size.bit_length() - 1)  # the greatest power of two up to K
    # With so many ranks in pairs, `power` ranks are left.
    paired = 2 * (world_size - power)
    # Ranks 0 and 1 are a pair, as are 2 and 3, …: their numbers differ in the last bit.
    partner = wire.global_rank(rank ^ 1, group) if rank < paired else None
    if partner is not None and rank % 2:
        wire.send(flat, partner, group)
        wire.recv(flat, partner, group)
        return copy_back(flat, tensor)
    if partner is not None:
        incoming = torch.empty_like(flat)
        wire.recv(incoming, partner, group)
        flat += incoming
    ranks = [*range(0, paired, 2), *range(paired, world_size)]
    halve_and_double(flat, ranks, ranks.index(rank), distance=1, group=group)
    if partner is not None:
        wire.send(flat, partner, group)
    return copy_back(flat, tensor)


def halve_and_double(
    part: torch.Tensor,
    ranks: list[int],
    place: int,
    distance: int,
    group: dist.ProcessGroup | None,
) -> None:
    """Exchange halves of `part` with a partner, sum one's own by recursion, and fetch the other.

    This rank is at `place` in `ranks`, and its partner is `distance` places on or back.
    """
    if distance == len(ranks):
        return
    lower, upper = part.tensor_split(2)
    # Two partners' places differ in one bit, that of `distance`; the first keeps the lower half.
    is_first = place & distance == 0
    own, other = (lower, upper) if is_first else (upper, lower)
    peer = wire.global_rank(ranks[place ^ distance], group)
    incoming = torch.empty_like(own)
    wire.exchange(other, peer, incoming, peer, group)
    own += incoming
    halve_and_double(own, ranks, place, 2 * distance, group)
    wire.exchange(own, peer, other, peer, group)
