# %% [markdown]
# Answers to exercise 4 as learners write them. tests/answers.py says how to read this.

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


# %% 4.1 wrong: no modulo | take it modulo the world size
#- (rank - step) % world_size
#+ rank - step
# %% 4.1 wrong: K added, and never taken away | take it modulo the world size
#- (rank - step) % world_size
#+ rank - step + world_size
# %% 4.1 wrong: the other way | the index falls with every step
#- rank - step
#+ rank + step
# %% 4.1 wrong: one further | that is allgather
#- rank - step
#+ rank + 1 - step
# %% 4.1 wrong: always its own | it passes on what came in
#- (rank - step) % world_size
#+ rank
# %% 4.1 wrong: by step only | was expected
#- (rank - step) % world_size
#+ step
# %% 4.1 wrong: modulo K-1 | was expected
#- % world_size
#+ % max(1, world_size - 1)
# %% 4.1 wrong: returns nothing | is there a `return`
#- return (rank
#+ (rank
# %% 4.1 wrong: a float | a plain int was expected
#- (rank - step) % world_size
#+ (rank - step) % world_size * 1.0
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


# %% 4.2 wrong: one step too few | in each of K-1 steps
#- range(world_size - 1)
#+ range(world_size - 2)
# %% 4.2 wrong: one step too many | messages; 
#- range(world_size - 1)
#+ range(world_size)
# %% 4.2 wrong: chunks reversed | is not finished, but another one is
#- chunks[(rank - step) % world_size]
#+ chunks[(-rank + step) % world_size]
#- chunks[(rank - step - 1) % world_size]
#+ chunks[(-rank + step + 1) % world_size]
# %% 4.2 wrong: another start | is not finished, but another one is
#- (rank - step) %
#+ (rank + 1 - step) %
#- (rank - step - 1) %
#+ (rank - step) %
# %% 4.2 wrong: overwrites | add to it
#- target += incoming
#+ target.copy_(incoming)
# %% 4.2 wrong: not in place | add what comes in to the chunk itself
#- target += incoming
#+ target = target + incoming
# %% 4.2 wrong: off by one chunk | do both sides mean the same chunk
#- (rank - step - 1) %
#+ (rank - step) %
# %% 4.2 wrong: the right neighbour twice | wait for each other
#- incoming, left, group
#+ incoming, right, group
# %% 4.2 wrong: whole tensors | whole tensors
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


# %% 4.2 wrong: all_reduce | your code calls torch.distributed.all_reduce
def reduce_scatter(chunks, group=None):
    for chunk in chunks:
        dist.all_reduce(chunk, group=group)


# %% 4.2 wrong: package's own | your code calls stage4_ring.reduce_scatter
def reduce_scatter(chunks, group=None):
    from ddp_course import stage4_ring

    stage4_ring.reduce_scatter(chunks, group)


# %% 4.2 wrong: divisible sizes only | the last number of a longer chunk
#- incoming = torch.empty_like(target)
#+ incoming = torch.zeros_like(target)
#- target += incoming
#+ short = min(len(chunk) for chunk in chunks)
#+         target[:short] += incoming[:short]
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


# %% 4.3 wrong: starts with its own | rank r has finished chunk r+1
#- (rank + 1 - step) %
#+ (rank - step) %
#- incoming = chunks[(rank - step) % world_size]
#+ incoming = chunks[(rank - step - 1) % world_size]
# %% 4.3 wrong: adds | keep it as it is
#-         wire.exchange(outgoing, right, incoming, left, group)
#+         arrived = torch.empty_like(incoming)
#+         wire.exchange(outgoing, right, arrived, left, group)
#+         incoming += arrived
# %% 4.3 wrong: one step too few | are there K-1 steps
#- range(world_size - 1)
#+ range(world_size - 2)
# %% 4.3 wrong: not kept | what comes in must be kept
#- incoming = chunks[(rank - step) % world_size]
#+ incoming = torch.empty_like(chunks[(rank - step) % world_size])
# %% 4.3 wrong: the other way round | what comes in must be kept
#- (rank + 1 - step) %
#+ (rank + 1 + step) %
#- incoming = chunks[(rank - step) % world_size]
#+ incoming = torch.empty_like(chunks[(rank + step) % world_size])
# %% 4.3 wrong: replaces the list's items | what comes in must be kept
#- incoming = chunks[(rank - step) % world_size]
#+ incoming = torch.empty_like(chunks[(rank - step) % world_size])
#- left, group)
#+ left, group)
#+         chunks = [*chunks[: (rank - step) % world_size], incoming, *chunks[(rank - step) % world_size + 1 :]]
# %% 4.3 wrong: everything in one go | allgather
def allgather(chunks, group=None):
    rank, size, left, right = wire.neighbours(group)
    mine = (rank + 1) % size
    for other in range(size):
        if other != rank:
            arriving = wire.irecv(chunks[(other + 1) % size], wire.global_rank(other, group), group)
            wire.send(torch.cat([chunks[mine], chunks[mine]])[: len(chunks[mine])], wire.global_rank(other, group), group)
            arriving.wait()


# %% 4.3 wrong: all_gather | your code calls torch.distributed.all_gather
def allgather(chunks, group=None):
    rank, size, left, right = wire.neighbours(group)
    longest = max(len(chunk) for chunk in chunks)
    padded = torch.zeros(longest)
    dist.all_gather([torch.zeros(longest) for _ in range(size)], padded, group=group)


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


# %% 4.4 wrong: reduce-scatter only | allgather gives it to the others
#-     allgather(chunks, group)
# %% 4.4 wrong: mean | the division comes later
#- tensor.copy_(flat.view(tensor.shape))
#+ tensor.copy_(flat.view(tensor.shape) / dist.get_world_size(group))
# %% 4.4 wrong: view without contiguous | RuntimeError
#- tensor.contiguous().view(-1)
#+ tensor.view(-1)
# %% 4.4 wrong: never copied back | in place
#-     tensor.copy_(flat.view(tensor.shape))
# %% 4.4 wrong: divisible sizes only | so that none is left over
def ring_all_reduce(tensor, group=None):
    flat = tensor.contiguous().view(-1)
    size = dist.get_world_size(group)
    length = flat.numel() // size
    chunks = [flat[index * length : (index + 1) * length] for index in range(size)]
    reduce_scatter(chunks, group)
    allgather(chunks, group)
    tensor.copy_(flat.view(tensor.shape))


# %% 4.4 wrong: whole tensors around | whole tensors travel
def ring_all_reduce(tensor, group=None):
    rank, size, left, right = wire.neighbours(group)
    outgoing = tensor.contiguous().clone()
    incoming = torch.empty_like(outgoing)
    for _ in range(size - 1):
        wire.exchange(outgoing, right, incoming, left, group)
        tensor += incoming
        outgoing, incoming = incoming, outgoing


# %% 4.4 wrong: returns instead | in place
#- tensor.copy_(flat.view(tensor.shape))
#+ return flat.view(tensor.shape)
#- tensor.contiguous().view(-1)
#+ tensor.reshape(-1).clone()
# %% 4.4 wrong: all_reduce | your code calls torch.distributed.all_reduce
def ring_all_reduce(tensor, group=None):
    torch.distributed.all_reduce(tensor, group=group)


# %% 4.4 wrong: package's own | your code calls stage4_ring.ring_all_reduce
from ddp_course import ring_all_reduce as ready


def ring_all_reduce(tensor, group=None):
    return ready(tensor, group)


# %% 4.4 hidden: works for float32 only | do both sides mean the same
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


# %% 4.5 right: per step
def ring_seconds(world_size, parameters, bits_per_second, latency):
    steps = 2 * (world_size - 1)
    return steps * (latency + parameters * 32 / world_size / bits_per_second)


# %% 4.5 right: a loop
def ring_seconds(world_size, parameters, bits_per_second, latency):
    total = 0.0
    for _half in range(2):
        for _step in range(world_size - 1):
            total += latency + 4 * parameters / world_size * 8 / bits_per_second
    return total


# %% 4.5 wrong: bytes for bits | a byte has eight
#- 4 * parameters * 8
#+ 4 * parameters
# %% 4.5 wrong: numbers for bytes | a float32 has four bytes
#- 4 * parameters * 8
#+ parameters * 8
# %% 4.5 wrong: no latency | where are the 2 (K-1) latencies
#-  + 2 * (world_size - 1) * latency
# %% 4.5 wrong: one latency | every step pays a latency
#-  + 2 * (world_size - 1) * latency
#+  + latency
# %% 4.5 wrong: half of it | allgather comes after it
#- return 2 * (world_size - 1) / world_size * seconds + 2 * (world_size - 1) * latency
#+ return (world_size - 1) / world_size * seconds + (world_size - 1) * latency
# %% 4.5 wrong: whole gradients | that is the whole-gradient ring
#-  / world_size * seconds
#+  * seconds
# %% 4.5 wrong: K steps | K-1 are enough
#- return 2 * (world_size - 1) / world_size * seconds + 2 * (world_size - 1) * latency
#+ return 2 * seconds + 2 * world_size * latency
# %% 4.6 right: the last chunk takes the rest
#- chunks = list(tensor.tensor_split(size))
#+ n = len(tensor) // size
#+     chunks = [tensor[i * n : (i + 1) * n if i < size - 1 else None] for i in range(size)]
# %% 4.6 right: rounded edges
#- chunks = list(tensor.tensor_split(size))
#+ edges = [len(tensor) * i // size for i in range(size + 1)]
#+     chunks = [tensor[start:end] for start, end in zip(edges, edges[1:])]
# %% 4.6 wrong: unchanged | numbers are still the rank's own
#- chunks = list(tensor.tensor_split(size))
#+ chunks = [tensor[i * (len(tensor) // size) : (i + 1) * (len(tensor) // size)] for i in range(size)]
# %% 4.6 wrong: another line | the second half sends the right chunks
#- return 3
#+ return 10
# %% 4.6 wrong: the buffer is blamed | as long as the longest chunk
#- return 3
#+ return 4
# %% 4.6 wrong: counts from zero | only asks who the neighbours are
#- return 3
#+ return 2
# %% 4.6 wrong: the second half changed | replicas agree with each other but not with the sum
#- chunks[(rank + 1 - step) % size], chunks[(rank - step) % size]
#+ chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
# %% 4.6 wrong: works on a copy | the tensor has not changed
#- list(tensor.tensor_split(size))
#+ list(tensor.clone().tensor_split(size))
# %% 4.6 wrong: a name | a plain int was expected
#- return 3
#+ return "chunks"
