"""What else an all-reduce can be. Each sums `tensor` over the ranks of `group` in place, like `ring_all_reduce`.

For p bytes over K ranks, links of bandwidth b and latency a, additions free:

    ring (stage 4)     2(K-1) a     + 2(K-1)/K p/b     least traffic; many steps
    tree               2 log2(K) a  + 2 log2(K) p/b    few steps, whole tensors: for small messages
    halving-doubling   2 log2(K) a  + 2(K-1)/K p/b     few steps and least traffic; partners are far apart
    hierarchical       a ring inside each host around a ring between the hosts: 1/R of the bytes between hosts
    pipelined ring     as the ring, with the additions hidden under the transfers

Sources: Thakur, Rabenseifner and Gropp, Int. J. High Performance Computing Applications 19 (2005), for tree and
halving-doubling; Jia et al., arXiv:1807.11205 (2018), for the hierarchical one.
"""

import os

import torch
import torch.distributed as dist

from .running import streams, wire

SEGMENT = 2**20  # bytes of the pipelined ring's segments: small enough to stay in the processor's cache until added


@wire.collective
@torch.no_grad()
def tree_all_reduce(tensor, group=None):
    """Sum up a binomial tree to rank 0, and copy the result down the same tree.

    In round d = 1, 2, 4, … every rank that is an odd multiple of d sends all it has to the rank d below.
    """
    flat = tensor.contiguous().view(-1)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    incoming, distances = torch.empty_like(flat), [2**i for i in range(max(1, world_size - 1).bit_length())]
    for distance in distances:
        if rank % (2 * distance) == distance:
            wire.send(flat, wire.global_rank(rank - distance, group), group)
            break
        if rank % (2 * distance) == 0 and rank + distance < world_size:
            wire.recv(incoming, wire.global_rank(rank + distance, group), group)
            flat += incoming
    for distance in reversed(distances):
        if rank % (2 * distance) == 0 and rank + distance < world_size:
            wire.send(flat, wire.global_rank(rank + distance, group), group)
        elif rank % (2 * distance) == distance:
            wire.recv(flat, wire.global_rank(rank - distance, group), group)
    return copied_back(flat, tensor)


@wire.collective
@torch.no_grad()
def halving_doubling_all_reduce(tensor, group=None):
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


def halve_and_double(part, rank, distance, group=None):
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


@wire.collective
@torch.no_grad()
def hierarchical_all_reduce(tensor, group=None, ranks_per_host=None):
    """Two levels: scatter-reduce inside each host, a ring of the hosts for each chunk, allgather inside each host.

    Hosts are runs of `ranks_per_host` consecutive ranks (default: LOCAL_WORLD_SIZE, else all on one host); the number
    must divide K, or ValueError. Only 2(H-1)/H p/R bytes of a rank cross between the H hosts of R ranks.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    size = min(world_size, ranks_per_host or int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    if world_size % size:
        raise ValueError(f"{world_size} ranks cannot be divided into hosts of {size}; choose ranks_per_host to fit")
    host, place = divmod(rank, size)
    inside = [host * size + i for i in range(size)]
    across = [i * size + place for i in range(world_size // size)]
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(size)
    finished = scatter_reduce_among(chunks, inside, group)
    pieces = chunks[finished].tensor_split(len(across))
    scatter_reduce_among(pieces, across, group)
    allgather_among(pieces, across, group)
    allgather_among(chunks, inside, group)
    return copied_back(flat, tensor)


def scatter_reduce_among(chunks, members, group=None):
    """Stage 4's scatter-reduce in the ring of the ranks `members`; return the index of the chunk finished here."""
    size, place = len(members), members.index(dist.get_rank(group))
    left, right = (wire.global_rank(members[(place + step) % size], group) for step in (-1, 1))
    scratch = torch.empty_like(chunks[0])
    for step in range(size - 1):
        target = chunks[(place - step - 1) % size]
        wire.exchange(chunks[(place - step) % size], right, scratch[: len(target)], left, group)
        target += scratch[: len(target)]
    return (place + 1) % size


def allgather_among(chunks, members, group=None):
    """Stage 4's allgather in the ring of the ranks `members`."""
    size, place = len(members), members.index(dist.get_rank(group))
    left, right = (wire.global_rank(members[(place + step) % size], group) for step in (-1, 1))
    for step in range(size - 1):
        wire.exchange(chunks[(place + 1 - step) % size], right, chunks[(place - step) % size], left, group)


@wire.collective
@torch.no_grad()
def pipelined_ring_all_reduce(tensor, group=None):
    """Stage 4's ring, chunk by chunk in the same order, but each chunk travels as several segments.

    A segment is passed on as soon as it is added, while the next one is still on its way.
    """
    flat = tensor.contiguous().view(-1)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if world_size == 1:
        return tensor
    chunks = flat.tensor_split(world_size)
    parts = max(1, -(-len(chunks[0]) * flat.element_size() // SEGMENT))
    steps = range(2 * (world_size - 1))
    arriving = [segment for s in steps for segment in chunks[(rank - 1 - s) % world_size].tensor_split(parts)]
    to_add = len(arriving) // 2  # those of the scatter-reduce; those of the allgather are kept as they come
    with streams.to_neighbours(group, tensor.device) as links:
        scratch = flat.new_empty(links.ahead, max(map(len, arriving)))
        places = [scratch[n % links.ahead, : len(s)] if n < to_add else s for n, s in enumerate(arriving)]
        for segment in chunks[rank].tensor_split(parts):
            links.send(segment)
        for number, place in enumerate(links.received(places)):
            if number < to_add:
                arriving[number].add_(place)
            if number + parts < len(arriving):
                links.send(arriving[number])
    return copied_back(flat, tensor)


def copied_back(flat, tensor):
    """Return `tensor` with the values of `flat`, which is its own memory already if it is contiguous."""
    return tensor if tensor.is_contiguous() else tensor.copy_(flat.view(tensor.shape))
