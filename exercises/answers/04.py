# %% [markdown]
# Answers to exercise 4 as learners write them. docs/CONTRIBUTING.md says how to read this.

# %% 4.1 right: adds K first
def chunk_to_send(rank, step, world_size):
    return (rank + world_size - step) % world_size

# %% 4.1 right: remembered, and tidied up
import gc
from functools import lru_cache


@lru_cache(maxsize=None)
def chunk_to_send(rank, step, world_size):
    gc.collect()
    return rank if step == 0 else (chunk_to_send(rank, step - 1, world_size) - 1) % world_size

# %% 4.1 right: walks
def chunk_to_send(rank, step, world_size):
    for _ in range(step):
        rank = rank - 1 if rank > 0 else world_size - 1
    return rank

# %% 4.1 wrong: lazy, no modulo | chunks go from 0 to K-1: take it modulo the world size
#- (rank - step) % world_size
#+ rank - step

# %% 4.1 wrong: K added, and never taken away | chunks go from 0 to K-1: take it modulo the world size
#- (rank - step) % world_size
#+ rank - step + world_size

# %% 4.1 wrong: the other way | what came from the left is sent on, so the index falls with every step
#- rank - step
#+ rank + step

# %% 4.1 wrong: one further | that is allgather; in reduce-scatter rank r starts with chunk r
#- rank - step
#+ rank + 1 - step

# %% 4.1 wrong: always its own | a rank does not always send its own chunk: it passes on what came in
#- (rank - step) % world_size
#+ rank

# %% 4.1 wrong: by step only | each rank starts with a chunk of its own, so the rank counts as well as the step
#- (rank - step) % world_size
#+ step

# %% 4.1 wrong: modulo K-1 | there are K chunks: take it modulo K, not K-1
#- % world_size
#+ % max(1, world_size - 1)

# %% 4.1 told: returns nothing | is there a `return`
#- return (rank
#+ (rank

# %% 4.1 told: a float | a plain int was expected
#- (rank - step) % world_size
#+ (rank - step) % world_size * 1.0

# %% 4.1 wrong: what it receives | that is the chunk that comes in during this step: it is sent in the next one
#- rank - step
#+ rank - step - 1

# %% 4.1 wrong: without its sign | below 0 it goes on with chunk K-1: take it modulo the world size, not its absolute value
#- (rank - step) % world_size
#+ abs(rank - step)

# %% 4.1 wrong: turned round | the step is taken from the rank, not the rank from the step
#- rank - step
#+ step - rank

# %% 4.1 wrong: not below 0 | below 0 it goes on with chunk K-1: take it modulo the world size
#- (rank - step) % world_size
#+ max(0, rank - step)

# %% 4.1 wrong: lazy, K is 4 | K is not always 4: take it modulo `world_size`
#- % world_size
#+ % 4

# %% 4.2 right: send and receive apart
def reduce_scatter(chunks, group=None):
    rank, size, left, right = wire.neighbours(group)
    for step in range(size - 1):
        into = chunks[(rank - 1 - step) % size]
        buffer = torch.zeros(len(into), dtype=into.dtype)
        arriving = wire.irecv(buffer, left, group)
        leaving = wire.isend(chunks[chunk_to_send(rank, step, size)], right, group)
        arriving.wait()
        leaving.wait()
        into.add_(buffer)

# %% 4.2 right: one buffer
def reduce_scatter(chunks, group=None):
    rank, world_size, left, right = wire.neighbours(group)
    scratch = torch.empty(max(len(chunk) for chunk in chunks), dtype=chunks[0].dtype)
    index = rank
    for _ in range(world_size - 1):
        outgoing, index = chunks[index], (index - 1) % world_size
        incoming = scratch[: len(chunks[index])]
        wire.exchange(outgoing, right, incoming, left, group)
        chunks[index] += incoming

# %% 4.2 wrong: one step too few | it is still the rank's own: in each of K-1 steps, add what comes in to the chunk itself
#- range(world_size - 1)
#+ range(world_size - 2)

# %% 4.2 wrong: one step too many | that is one step too many: K-1 messages make the sum of K
#- range(world_size - 1)
#+ range(world_size)

# %% 4.2 wrong: chunks reversed | chunk (rank + 1) mod K is not finished, but another one is: the chunks go round from another start or the other way
#- chunks[(rank - step) % world_size]
#+ chunks[(-rank + step) % world_size]
#- chunks[(rank - step - 1) % world_size]
#+ chunks[(-rank + step + 1) % world_size]

# %% 4.2 wrong: another start | chunk (rank + 1) mod K is not finished, but another one is: the chunks go round from another start or the other way
#- (rank - step) %
#+ (rank + 1 - step) %
#- (rank - step - 1) %
#+ (rank - step) %

# %% 4.2 wrong: another start, further on | chunk (rank + 1) mod K is not finished, but another one is: the chunks go round from another start or the other way
#- (rank - step) %
#+ (rank - 1 - step) %
#- (rank - step - 1) %
#+ (rank - step - 2) %

# %% 4.2 wrong: replaces the list's items | it is still the rank's own: in each of K-1 steps, add what comes in to the chunk itself
#- target += incoming
#+ chunks[(rank - step - 1) % world_size] = target + incoming

# %% 4.2 wrong: zeroed first | it was overwritten with what came in: add to it
#- target += incoming
#+ target.zero_()
#+         target += incoming

# %% 4.2 wrong: overwrites | it was overwritten with what came in: add to it
#- target += incoming
#+ target.copy_(incoming)

# %% 4.2 wrong: not in place | it is still the rank's own: in each of K-1 steps, add what comes in to the chunk itself
#- target += incoming
#+ target = target + incoming

# %% 4.2 told: off by one chunk | its index falls by one
#- (rank - step - 1) %
#+ (rank - step) %

# %% 4.2 told: the right neighbour twice | wait for each other
#- incoming, left, group
#+ incoming, right, group

# %% 4.2 wrong: lazy, whole tensors | reduce-scatter sends whole tensors: in each step only one chunk travels
def reduce_scatter(chunks, group=None):
    rank, size, left, right = wire.neighbours(group)
    outgoing = torch.cat(chunks)
    total, incoming = outgoing.clone(), torch.empty_like(outgoing)
    for _ in range(size - 1):
        wire.exchange(outgoing, right, incoming, left, group)
        total += incoming
        outgoing, incoming = incoming, outgoing
    for chunk, piece in zip(chunks, total.split([len(chunk) for chunk in chunks])):
        chunk.copy_(piece)

# %% 4.2 told: lazy, all_reduce | your code calls torch.distributed.all_reduce
def reduce_scatter(chunks, group=None):
    for chunk in chunks:
        dist.all_reduce(chunk, group=group)

# %% 4.2 told: package's own | your code calls stage4_ring.reduce_scatter
def reduce_scatter(chunks, group=None):
    from ddp_course import stage4_ring

    stage4_ring.reduce_scatter(chunks, group)

# %% 4.2 wrong: divisible sizes only | the last number of a longer chunk is still the rank's own: chunks differ in length
#- incoming = torch.empty_like(target)
#+ incoming = torch.zeros_like(target)
#- target += incoming
#+ short = min(len(chunk) for chunk in chunks)
#+         target[:short] += incoming[:short]

# %% 4.2 told: added to what has left | its index falls by one
#- target += incoming
#+ outgoing += incoming

# %% 4.2 wrong: half precision | numbers travel in float16: send the chunks as they are
#- incoming = torch.empty_like(target)
#+ incoming = torch.empty_like(target, dtype=torch.float16)
#- wire.exchange(outgoing, right
#+ wire.exchange(outgoing.half(), right

# %% 4.2 wrong: rises in both | what is sent in a step must have come in before: the index falls by one with every step
#- chunks[(rank - step) % world_size]
#+ chunks[(rank + step) % world_size]
#- chunks[(rank - step - 1) % world_size]
#+ chunks[(rank + step - 1) % world_size]

# %% 4.2 told: rises | so its index falls by one
#- chunks[(rank - step) % world_size]
#+ chunks[(rank + step) % world_size]

# %% 4.2 told: rises, and received one further | so its index falls by one
#- chunks[(rank - step) % world_size]
#+ chunks[(rank + step) % world_size]
#- chunks[(rank - step - 1) % world_size]
#+ chunks[(rank + step + 1) % world_size]

# %% 4.2 told: the whole list | a message is one tensor: hand over a tensor, such as chunks[i]
#- outgoing = chunks[(rank - step) % world_size]
#+ outgoing = chunks

# %% 4.2 told: lazy, one buffer of the longest chunk | gloo lets that pass, NCCL does not; a tensor is as long as what comes into it
#- incoming = torch.empty_like(target)
#+ incoming = torch.empty_like(chunks[0])
#- target += incoming
#+ target += incoming[: len(target)]

# %% 4.2 told: lazy, straight to whom it belongs | it sends to rank 2: in a ring each rank sends to its right neighbour alone
def reduce_scatter(chunks, group=None):
    own = chunks[(dist.get_rank(group) + 1) % len(chunks)]
    others = wire.others(dist.get_rank(group), group)
    buffers = [torch.empty_like(own) for _ in others]
    arriving = [wire.irecv(buffer, peer, group) for buffer, peer in zip(buffers, others)]
    leaving = [wire.isend(chunks[(peer + 1) % len(chunks)], peer, group) for peer in others]
    for transfer in arriving + leaving:
        transfer.wait()
    for buffer in buffers:
        own += buffer

# %% 4.2 told: lazy, without the group | go by another group, of all ranks: hand `group` on to every function of the wire
#- left, group)
#+ left)

# %% 4.2 told: new memory | it is in new memory, as by `.data =`
#- target += incoming
#+ target.data = target + incoming

# %% 4.3 right: buffers and copies
def allgather(chunks, group=None):
    rank, size, left, right = wire.neighbours(group)
    have = (rank + 1) % size
    for _ in range(size - 1):
        comes = (have - 1) % size
        arrived = torch.empty_like(chunks[comes])
        wire.exchange(chunks[have].clone(), right, arrived, left, group)
        chunks[comes].copy_(arrived)
        have = comes

# %% 4.3 right: steps counted from one
def allgather(chunks, group=None):
    rank, size, left, right = wire.neighbours(group)
    for step in range(1, size):
        arriving = wire.irecv(chunks[(rank + 1 - step) % size], left, group)
        wire.send(chunks[(rank + 2 - step) % size], right, group)
        arriving.wait()

# %% 4.3 wrong: starts with its own | chunk r was taken from rank r, but rank r has finished chunk r+1
#- (rank + 1 - step) %
#+ (rank - step) %
#- incoming = chunks[(rank - step) % world_size]
#+ incoming = chunks[(rank - step - 1) % world_size]

# %% 4.3 told: its own chunk every time | every message was your own chunk
#- chunks[(rank + 1 - step) % world_size]
#+ chunks[(rank + 1) % world_size]

# %% 4.3 wrong: adds | they were added up: what comes in is finished, so keep it as it is
#-         wire.exchange(outgoing, right, incoming, left, group)
#+         arrived = torch.empty_like(incoming)
#+         wire.exchange(outgoing, right, arrived, left, group)
#+         incoming += arrived

# %% 4.3 wrong: one step too few | one chunk is still the rank's own: are there K-1 steps?
#- range(world_size - 1)
#+ range(world_size - 2)

# %% 4.3 wrong: not kept | nothing has changed: what comes in must be kept, in place
#- incoming = chunks[(rank - step) % world_size]
#+ incoming = torch.empty_like(chunks[(rank - step) % world_size])

# %% 4.3 wrong: the other way round | nothing has changed: what comes in must be kept, in place
#- (rank + 1 - step) %
#+ (rank + 1 + step) %
#- incoming = chunks[(rank - step) % world_size]
#+ incoming = torch.empty_like(chunks[(rank + step) % world_size])

# %% 4.3 wrong: replaces the list's items | nothing has changed: what comes in must be kept, in place
#- incoming = chunks[(rank - step) % world_size]
#+ incoming = torch.empty_like(chunks[(rank - step) % world_size])
#- left, group)
#+ left, group)
#+         chunks = [*chunks[: (rank - step) % world_size], incoming, *chunks[(rank - step) % world_size + 1 :]]

# %% 4.3 wrong: lazy, everything in one go | allgather goes round the ring: each message goes to the right neighbour, K-1 of them
def allgather(chunks, group=None):
    rank, size, left, right = wire.neighbours(group)
    mine = (rank + 1) % size
    for other in range(size):
        if other != rank:
            arriving = wire.irecv(chunks[(other + 1) % size], wire.global_rank(other, group), group)
            wire.send(
                torch.cat([chunks[mine], chunks[mine]])[: len(chunks[mine])], wire.global_rank(other, group), group
            )
            arriving.wait()

# %% 4.3 told: lazy, all_gather | your code calls torch.distributed.all_gather
def allgather(chunks, group=None):
    rank, size, left, right = wire.neighbours(group)
    longest = max(len(chunk) for chunk in chunks)
    padded = torch.zeros(longest)
    dist.all_gather([torch.zeros(longest) for _ in range(size)], padded, group=group)

# %% 4.3 wrong: the other way | the chunk that has just come in is sent on, so the index falls with every step
#- (rank + 1 - step)
#+ (rank + 1 + step)
#- (rank - step)
#+ (rank + step)

# %% 4.3 wrong: lazy, all chunks each time | all chunks travel in every message: one at a time is enough
def allgather(chunks, group=None):
    rank, world_size, left, right = wire.neighbours(group)
    lengths = [len(chunk) for chunk in chunks]
    for step in range(world_size - 1):
        outgoing = torch.cat(chunks)
        incoming = torch.empty_like(outgoing)
        wire.exchange(outgoing, right, incoming, left, group)
        parts = incoming.split(lengths)
        for back in range(step + 1):
            index = (rank - back) % world_size
            chunks[index].copy_(parts[index])

# %% 4.3 told: lazy, one buffer of the longest chunk | gloo lets that pass, NCCL does not; a tensor is as long as what comes into it
def allgather(chunks, group=None):
    rank, size, left, right = wire.neighbours(group)
    buffer = torch.empty_like(chunks[0])
    for step in range(size - 1):
        into = chunks[(rank - step) % size]
        wire.exchange(chunks[(rank + 1 - step) % size], right, buffer, left, group)
        into.copy_(buffer[: len(into)])

# %% 4.3 told: lazy, without the group | go by another group, of all ranks: hand `group` on to every function of the wire
#- left, group)
#+ left)

# %% 4.4 right: pads
def ring_all_reduce(tensor, group=None):
    size = dist.get_world_size(group)
    flat = tensor.reshape(-1).clone()
    chunks = list(torch.tensor_split(flat, size))
    reduce_scatter(chunks, group)
    allgather(chunks, group)
    tensor.copy_(torch.cat(chunks).reshape(tensor.shape))

# %% 4.4 right: in one function
def ring_all_reduce(tensor, group=None):
    rank, size, left, right = wire.neighbours(group)
    work = tensor.flatten() if tensor.is_contiguous() else tensor.contiguous().flatten()
    edges = [work.numel() * i // size for i in range(size + 1)]
    chunks = [work[a:b] for a, b in zip(edges, edges[1:])]
    for step in range(2 * (size - 1)):
        sent, got = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        if step < size - 1:
            arrived = torch.empty_like(got)
            wire.exchange(sent, right, arrived, left, group)
            got += arrived
        else:
            wire.exchange(sent, right, got, left, group)
    tensor.copy_(work.view(tensor.shape))
    return tensor

# %% 4.4 wrong: reduce-scatter only | each rank has one finished chunk: allgather gives it to the others
#-     allgather(chunks, group)

# %% 4.4 told: the number of all ranks | asked for without `group`, and are those of the whole job
#- dist.get_world_size(group)
#+ dist.get_world_size()

# %% 4.4 told: reduce-scatter without the group | asked for without `group`, and are those of the whole job
#- reduce_scatter(chunks, group)
#+ reduce_scatter(chunks)

# %% 4.4 told: allgather without the group | asked for without `group`, and are those of the whole job
#- allgather(chunks, group)
#+ allgather(chunks)

# %% 4.4 wrong: mean | you have the mean: this one is a sum, the division comes later
#- tensor.copy_(flat.view(tensor.shape))
#+ tensor.copy_(flat.view(tensor.shape) / dist.get_world_size(group))

# %% 4.4 told: view without contiguous | RuntimeError
#- tensor.contiguous().view(-1)
#+ tensor.view(-1)

# %% 4.4 wrong: never copied back | the tensor has not changed: the sum must end up in the tensor itself, in place
#-     tensor.copy_(flat.view(tensor.shape))

# %% 4.4 wrong: divisible sizes only | the last numbers are still the rank's own: cut the tensor so that none is left over
def ring_all_reduce(tensor, group=None):
    flat = tensor.contiguous().view(-1)
    size = dist.get_world_size(group)
    length = flat.numel() // size
    chunks = [flat[index * length : (index + 1) * length] for index in range(size)]
    reduce_scatter(chunks, group)
    allgather(chunks, group)
    tensor.copy_(flat.view(tensor.shape))

# %% 4.4 wrong: lazy, whole tensors around | whole tensors travel; cut them into K chunks
def ring_all_reduce(tensor, group=None):
    rank, size, left, right = wire.neighbours(group)
    outgoing = tensor.contiguous().clone()
    incoming = torch.empty_like(outgoing)
    for _ in range(size - 1):
        wire.exchange(outgoing, right, incoming, left, group)
        tensor += incoming
        outgoing, incoming = incoming, outgoing

# %% 4.4 wrong: returns instead | the tensor has not changed: the sum must end up in the tensor itself, in place
#- tensor.copy_(flat.view(tensor.shape))
#+ return flat.view(tensor.shape)
#- tensor.contiguous().view(-1)
#+ tensor.reshape(-1).clone()

# %% 4.4 wrong: lazy, by way of rank 0 | one rank sends nearly everything: in a ring all send alike, 2 (K-1) chunks each
def ring_all_reduce(tensor, group=None):
    rank, size, left, right = wire.neighbours(group)
    work = tensor.contiguous()
    if rank:
        wire.send(work, wire.global_rank(0, group), group)
        wire.recv(work, wire.global_rank(0, group), group)
    else:
        for peer in wire.others(0, group):
            arrived = torch.empty_like(work)
            wire.recv(arrived, peer, group)
            work += arrived
        for peer in wire.others(0, group):
            wire.send(work, peer, group)
    tensor.copy_(work)

# %% 4.4 told: past the wire | your code calls torch's own
def ring_all_reduce(tensor, group=None):
    group = group or dist.group.WORLD
    work = tensor.contiguous()
    group.allreduce([work]).wait()
    tensor.copy_(work)

# %% 4.4 told: all_reduce | (line 2 of your cell: torch.distributed.all_reduce(tensor, group=group))
def ring_all_reduce(tensor, group=None):
    torch.distributed.all_reduce(tensor, group=group)

# %% 4.4 told: package's own | your code calls stage4_ring.ring_all_reduce
from ddp_course import ring_all_reduce as ready


def ring_all_reduce(tensor, group=None):
    return ready(tensor, group)

# %% 4.4 told: works for float32 only | do both sides mean the same
def ring_all_reduce(tensor, group=None):
    rank, size, left, right = wire.neighbours(group)
    work = tensor.flatten()
    chunks = work.tensor_split(size)
    for step in range(2 * (size - 1)):
        arrived = torch.zeros(len(chunks[(rank - step - 1) % size]))
        wire.exchange(chunks[(rank - step) % size], right, arrived, left, group)
        if step < size - 1:
            chunks[(rank - step - 1) % size].add_(arrived)
        else:
            chunks[(rank - step - 1) % size].copy_(arrived)
    tensor.copy_(work.view(tensor.shape))

# %% 4.4 told: torch.chunk | torch.chunk cuts fewer where numbers are few
#- flat.tensor_split(dist.get_world_size(group))
#+ flat.chunk(dist.get_world_size(group))

# %% 4.4 wrong: each row alone | every row is cut into K chunks, which makes the longest ones longer than need be: cut the whole tensor, in one row
def ring_all_reduce(tensor, group=None):
    for row in tensor if tensor.dim() > 1 else [tensor]:
        flat = row.flatten().clone()
        chunks = flat.tensor_split(dist.get_world_size(group))
        reduce_scatter(chunks, group)
        allgather(chunks, group)
        row.copy_(flat)

# %% 4.4 wrong: rows as chunks | whole rows are dealt out, so some chunks are longer than need be: cut the tensor in one row
def ring_all_reduce(tensor, group=None):
    chunks = [chunk.contiguous() for chunk in tensor.tensor_split(dist.get_world_size(group))]
    flats = [chunk.view(-1) for chunk in chunks]
    reduce_scatter(flats, group)
    allgather(flats, group)
    tensor.copy_(torch.cat(chunks))

# %% 4.4 wrong: transposed | the sums come back in the order of the transposed tensor
#- tensor.contiguous().view(-1)
#+ (tensor.t() if tensor.dim() == 2 else tensor).reshape(-1).clone()

# %% 4.4 told: lazy, everybody to everybody | it sends to rank 2: in a ring each rank sends to its right neighbour alone
def ring_all_reduce(tensor, group=None):
    rank = dist.get_rank(group)
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(dist.get_world_size(group))
    others = wire.others(rank, group)
    buffers = [torch.empty_like(chunks[rank]) for _ in others]
    arriving = [wire.irecv(buffer, peer, group) for buffer, peer in zip(buffers, others)]
    leaving = [wire.isend(chunks[peer], peer, group) for peer in others]
    for transfer in arriving + leaving:
        transfer.wait()
    for buffer in buffers:
        chunks[rank].add_(buffer)
    arriving = [wire.irecv(chunks[peer], peer, group) for peer in others]
    leaving = [wire.isend(chunks[rank], peer, group) for peer in others]
    for transfer in arriving + leaving:
        transfer.wait()
    tensor.copy_(flat.view(tensor.shape))

# %% 4.4 wrong: lazy, all in float32 | numbers of int64 have more digits than a floating-point number: add a tensor up in its own dtype
#- tensor.contiguous().view(-1)
#+ tensor.float().reshape(-1)

# %% 4.4 wrong: all in float64 | numbers of int64 have more digits than a floating-point number: add a tensor up in its own dtype
#- tensor.contiguous().view(-1)
#+ tensor.double().reshape(-1)

# %% 4.4 told: lazy, new memory | it is in new memory, as by `.data =`
#- tensor.copy_(flat.view(tensor.shape))
#+ tensor.data = flat.view(tensor.shape)
#- tensor.contiguous().view(-1)
#+ tensor.reshape(-1).clone()

# %% 4.4 told: without the group | go by another group, of all ranks: hand `group` on to every function of the wire
def ring_all_reduce(tensor, group=None):
    rank, size, left, right = wire.neighbours(group)
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(size)
    for step in range(size - 1):
        arrived = torch.empty_like(chunks[(rank - step - 1) % size])
        wire.exchange(chunks[(rank - step) % size], right, arrived, left)
        chunks[(rank - step - 1) % size].add_(arrived)
    for step in range(size - 1):
        wire.exchange(chunks[(rank + 1 - step) % size], right, chunks[(rank - step) % size], left)
    tensor.copy_(flat.view(tensor.shape))

# %% 4.4 right: filled up with zeros
def ring_all_reduce(tensor, group=None):
    size = dist.get_world_size(group)
    flat = torch.zeros(-(-tensor.numel() // size) * size, dtype=tensor.dtype)
    flat[: tensor.numel()] = tensor.reshape(-1)
    chunks = flat.tensor_split(size)
    reduce_scatter(chunks, group)
    allgather(chunks, group)
    tensor.copy_(flat[: tensor.numel()].view(tensor.shape))

# %% 4.5 right: all choices of ranks
from itertools import combinations


def step_seconds(cables, parameters, latency, computing):
    best = computing
    for k in range(2, len(cables) + 1):
        for joined in combinations(cables, k):
            best = min(best, computing / k + 2 * (k - 1) * (latency + 32 * parameters / k / min(joined)))
    return best

# %% 4.5 right: dropping the slowest
def step_seconds(cables, parameters, latency, computing):
    joined, shortest = sorted(cables), float("inf")
    while joined:
        k = len(joined)
        steps = 2 * (k - 1)
        shortest = min(shortest, computing / k + steps * latency + steps / k * 32 * parameters / joined[0])
        joined.pop(0)
    return shortest

# %% 4.5 wrong: bytes for bits | the link carries bits, and a byte has eight
#- 4 * parameters / ranks * 8
#+ 4 * parameters / ranks

# %% 4.5 wrong: numbers for bytes | a float32 has four bytes
#- 4 * parameters / ranks * 8
#+ parameters / ranks * 8

# %% 4.5 wrong: no latency | where are the 2 (K-1) latencies?
#- latency + 4 *
#+ 4 *

# %% 4.5 wrong: half of it | that is reduce-scatter alone; allgather comes after it
#- 2 * (ranks - 1)
#+ (ranks - 1)

# %% 4.5 wrong: whole gradients | that is the whole-gradient ring: in each step only 1/K of the gradient travels
#- parameters / ranks * 8
#+ parameters * 8

# %% 4.5 wrong: lazy, everybody joins | who is left out may be worth more than who joins: compare with fewer ranks
#- return min(times)
#+ return times[-1]

# %% 4.5 wrong: the fastest cable counts | a ring is as fast as the slowest cable of those who join
#- fastest[ranks - 1]
#+ fastest[0]

# %% 4.5 wrong: the slowest of all counts | a cable that is left out slows nobody down
#- fastest[ranks - 1]
#+ fastest[-1]

# %% 4.5 told: a number of 500 digits | an int of more than 60 digits; a plain float was expected
def step_seconds(cables, parameters, latency, computing):
    return 10**500

# %% 4.5 wrong: not sorted | the first ranks of the list are not the fastest: try those with the best cables
#- sorted(cables, reverse=True)
#+ cables
#- fastest[ranks - 1]
#+ min(fastest[:ranks])

# %% 4.5 wrong: latency once | each of the 2 (K-1) messages waits for the latency
#- message = latency + 4
#+ message = 4
#- 2 * (ranks - 1) * message
#+ latency + 2 * (ranks - 1) * message

# %% 4.5 wrong: latency once, but not alone | each of the 2 (K-1) messages waits for the latency
#- message = latency + 4
#+ message = 4
#- 2 * (ranks - 1) * message
#+ (latency if ranks > 1 else 0) + 2 * (ranks - 1) * message

# %% 4.5 wrong: mean of the cables | a ring is as fast as the slowest cable of those who join
#- fastest[ranks - 1]
#+ (sum(fastest[:ranks]) / ranks)

# %% 4.5 wrong: never alone | one rank alone, which sends nothing, may be the fastest
#- range(1, len(cables) + 1)
#+ range(min(2, len(cables)), len(cables) + 1)

# %% 4.5 wrong: how many join | that is the number of ranks: the seconds are asked for
#- return min(times)
#+ return times.index(min(times)) + 1

# %% 4.5 wrong: computing is not shared | those who join share the computing: each has a K-th of it
#- computing / ranks
#+ computing

# %% 4.5 wrong: at the same time | first they compute, and then they average: the times add up
#- times.append(computing / ranks + 2 * (ranks - 1) * message)
#+ times.append(max(computing / ranks, 2 * (ranks - 1) * message))

# %% 4.5 told: lazy, the course's own formula | your code calls lab.measuring.theory.ring
def step_seconds(cables, parameters, latency, computing):
    from ddp_course.lab.measuring import theory

    fastest = sorted(cables, reverse=True)
    rings = [theory.ring(4 * parameters, k, theory.Costs(8 / fastest[k - 1], latency)) for k in range(1, len(cables) + 1)]
    return min(computing / k + ring for k, ring in enumerate(rings, 1))

# %% 4.6 right: the last chunk takes the rest
#- chunks = list(tensor.tensor_split(size))
#+ n = len(tensor) // size
#+     chunks = [tensor[i * n : (i + 1) * n if i < size - 1 else None] for i in range(size)]

# %% 4.6 right: rounded edges
#- chunks = list(tensor.tensor_split(size))
#+ edges = [len(tensor) * i // size for i in range(size + 1)]
#+     chunks = [tensor[start:end] for start, end in zip(edges, edges[1:])]

# %% 4.6 wrong: unchanged | the last numbers are still the rank's own
#- chunks = list(tensor.tensor_split(size))
#+ chunks = [tensor[i * (len(tensor) // size) : (i + 1) * (len(tensor) // size)] for i in range(size)]

# %% 4.6 wrong: another line | the second half receives the right chunks
#- return 3
#+ return 10

# %% 4.6 wrong: the buffer is blamed | the buffer is as long as the longest chunk: right
#- return 3
#+ return 4

# %% 4.6 wrong: counts from zero | that line only asks who the neighbours are
#- return 3
#+ return 2

# %% 4.6 wrong: the second half changed | your replicas agree with each other but not with the sum: the second half sends finished chunks
#-         own = chunks[(rank - step) % size]
#-         wire.exchange(chunks[(rank + 1 - step) % size], right, own, left, group)
#+         own = chunks[(rank - step - 1) % size]
#+         wire.exchange(chunks[(rank - step) % size], right, own, left, group)

# %% 4.6 wrong: works on a copy | the tensor has not changed
#- list(tensor.tensor_split(size))
#+ list(tensor.clone().tensor_split(size))

# %% 4.6 told: a name | a plain int was expected
#- return 3
#+ return "chunks"

# %% 4.6 wrong: line 6 | the first half adds to the right chunks
#- return 3
#+ return 6

# %% 4.6 wrong: line 7 | the right chunk is sent, and only as much of the buffer is used as the other one needs
#- return 3
#+ return 7

# %% 4.6 wrong: line 8 | adding is right here
#- return 3
#+ return 8

# %% 4.6 wrong: line 11 | the right chunk is sent, and a finished one is kept as it is
#- return 3
#+ return 11

# %% 4.6 wrong: line 1 | the def itself is right: which line does something with numbers that it should not?
#- return 3
#+ return 1

# %% 4.6 wrong: line 5 | K-1 steps are right
#- return 3
#+ return 5

# %% 4.6 wrong: line 9 | K-1 steps are right
#- return 3
#+ return 9

# %% 4.6 told: torch.chunk | torch.chunk cuts fewer where numbers are few
#- tensor.tensor_split(size)
#+ tensor.chunk(size)

# %% 4.6 wrong: lazy, the rest multiplied | the last numbers are the rank's own, multiplied: they must travel, too
#- chunks = list(tensor.tensor_split(size))
#+ n = len(tensor) // size
#+     chunks = [tensor[i * n : (i + 1) * n] for i in range(size)]
#+     tensor[n * size :] *= size

# %% 4.6 told: lazy, whole tensors around | bytes; 2 (K-1) chunks have at most 256
def the_bug():
    return 3


def mended_ring(tensor, group=None):
    rank, size, left, right = wire.neighbours(group)
    outgoing = tensor.clone()
    for _ in range(size - 1):
        incoming = torch.empty_like(tensor)
        wire.exchange(outgoing, right, incoming, left, group)
        tensor += incoming
        outgoing = incoming

# %% 4.6 right: the ring of 4.4
def the_bug():
    return 3


mended_ring = ring_all_reduce

# %% 4.6 told: no line | None (is there a `return`?); a plain int was expected
#- return 3
#+ print(3)

# %% 4.6 told: no ring | your answer is None, which cannot be called: define a function
def the_bug():
    return 3


mended_ring = None

# %% 4.6 told: without the group | go by another group, of all ranks: hand `group` on to every function of the wire
#- def mended_ring(tensor, group=None):
#+ def mended_ring(tensor, of_group=None):
#+     group = None
#- wire.neighbours(group)
#+ wire.neighbours(of_group)

# %% 4.7 right: small buckets
#- DistributedDataParallel(model, process_group=group)
#+ DistributedDataParallel(model, process_group=group, bucket_cap_mb=1e-4)

# %% 4.7 right: another name, and momentum of zero
#- "mine", all_reduce
#+ "round", all_reduce
#- backend="mine"
#+ backend="round"
#- SGD(model.parameters(), lr=lr)
#+ SGD(model.parameters(), lr=lr, momentum=0.0)

# %% 4.7 told: lazy, by hand after backward | torch's own DistributedDataParallel was never called
def train_over(all_reduce, model, batches, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for inputs, targets in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        for parameter in model.parameters():
            all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()

# %% 4.7 told: lazy, torch's own group | torch's class adds up by other means
#- DistributedDataParallel(model, process_group=group)
#+ DistributedDataParallel(model)

# %% 4.7 told: lazy, the course's ring | torch's class adds up by other means
#- register("mine", all_reduce=all_reduce)
#+ register("mine")

# %% 4.7 told: lazy, added up once more | outside of a backward pass, so by you
#- DistributedDataParallel(model, process_group=group)
#+ DistributedDataParallel(model)
#-         optimizer.step()
#+         for parameter in model.parameters():
#+             all_reduce(parameter.grad)
#+             parameter.grad /= dist.get_world_size()
#+         optimizer.step()

# %% 4.7 wrong: gradients are never cleared | gradients add up from step to step: clear them before each backward pass
#-         optimizer.zero_grad()
#+         pass

# %% 4.7 wrong: divided once more | torch's class has divided by K: the gradients are means already
#-         optimizer.step()
#+         for parameter in model.parameters():
#+             parameter.grad /= dist.get_world_size()
#+         optimizer.step()

# %% 4.7 wrong: one batch only | the numbers of one step: go through all batches
#-         optimizer.step()
#+         optimizer.step()
#+         break

# %% 4.7 wrong: never updated | the weights have not changed: where is the optimizer's step?
#-         optimizer.step()
#+         pass

# %% 4.7 told: the group before its backend | ring_backend.register(...) comes before dist.new_group(backend=...)
#-     ring_backend.register("mine", all_reduce=all_reduce)
#-     group = dist.new_group(backend="mine")
#+     group = dist.new_group(backend="mine")
#+     ring_backend.register("mine", all_reduce=all_reduce)

# %% 4.7 told: a group of another name | and both have the same name
#- backend="mine"
#+ backend="yours"
