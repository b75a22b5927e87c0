# %% [markdown]
# Answers to exercise 7 as learners write them. docs/CONTRIBUTING.md says how to read this.

# %% 7.1 right: min with key
def assign_owners(sizes, world_size):
    held = {rank: 0 for rank in range(world_size)}
    owners = []
    for size in sizes:
        owner = min(held, key=held.get)
        held[owner] += size
        owners.append(owner)
    return tuple(owners)

# %% 7.1 right: a heap
import heapq


def assign_owners(sizes, world_size):
    heap = [(0, rank) for rank in range(world_size)]
    owners = []
    for size in sizes:
        held, rank = heapq.heappop(heap)
        heapq.heappush(heap, (held + size, rank))
        owners.append(rank)
    return owners

# %% 7.1 wrong: lazy, in turn | they are dealt out in turn; look at how many numbers each rank has
#- held.index(min(held))
#+ len(owners) % world_size

# %% 7.1 wrong: counts parameters | they are dealt out in turn; look at how many numbers each rank has
#- held[owner] += size
#+ held[owner] += 1

# %% 7.1 wrong: highest of equals | of ranks that have equally few, the lowest comes first
#- held.index(min(held))
#+ max(rank for rank in range(world_size) if held[rank] == min(held))

# %% 7.1 wrong: all to rank 0 | rank 0 owns everything
#-         held[owner] += size

# %% 7.1 wrong: neighbours together | neighbours were kept together; each goes to the rank that has least so far
#- held.index(min(held))
#+ len(owners) * world_size // len(sizes)

# %% 7.1 wrong: largest first | the parameters come in their own order, not the largest first
def assign_owners(sizes, world_size):
    held, owners = [0] * world_size, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = held.index(min(held))
        held[owners[index]] += sizes[index]
    return owners

# %% 7.1 told: lists of parameters | a rank for each parameter was expected
def assign_owners(sizes, world_size):
    return [list(range(rank, len(sizes), world_size)) for rank in range(world_size)]

# %% 7.1 wrong: to the fullest | rank 0 owns everything
#- min(held)
#+ max(held)

# %% 7.2 right: divided after the sum
@torch.no_grad()
def sharded_step(weights, gradients, update, group=None):
    reduce_scatter(gradients, group)
    own = (dist.get_rank(group) + 1) % len(weights)
    update(weights[own], gradients[own] / len(weights))
    allgather(weights, group)

# %% 7.2 right: straight to the owner and back
from ddp_course import wire


def sharded_step(weights, gradients, update, group=None):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    owner_of = lambda chunk: (chunk - 1) % size
    own = (rank + 1) % size
    total = gradients[own].clone()
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        incoming = torch.empty_like(total)
        receiving = wire.irecv(incoming, source, group)
        wire.isend(gradients[(to + 1) % size], to, group).wait()
        receiving.wait()
        total += incoming
    update(weights[own], total / size)
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        receiving = wire.irecv(weights[(source + 1) % size], source, group)
        wire.isend(weights[own], to, group).wait()
        receiving.wait()

# %% 7.2 wrong: chunk r instead of r+1 | the chunk that allgather sends has not been stepped: rank r has the sum of chunk r+1, and update() changes that chunk itself, no copy of it
#- (dist.get_rank(group) + 1) % world_size
#+ dist.get_rank(group)

# %% 7.2 wrong: not divided | that is the step of the sum: divide the gradients by K before update() is called
#-     for chunk in gradients:
#-         chunk /= world_size

# %% 7.2 wrong: divided twice | the gradients are divided by K more than once
#- update(weights[own], gradients[own])
#+ update(weights[own], gradients[own] / world_size)

# %% 7.2 wrong: no allgather | a rank has stepped its own chunk; the other chunks of the weights are still the old ones: gather them
#-     allgather(weights, group)

# %% 7.2 wrong: gradients gathered | a rank has stepped its own chunk; the other chunks of the weights are still the old ones: gather them
#- allgather(weights, group)
#+ allgather(gradients, group)

# %% 7.2 wrong: gathered before the step | a rank has stepped its own chunk; the other chunks are gathered before they were stepped: gather after update()
#-     update(weights[own], gradients[own])
#-     allgather(weights, group)
#+     allgather(weights, group)
#+     update(weights[own], gradients[own])

# %% 7.2 wrong: nothing reduced | each rank steps with its own gradients: what sums them over the ranks?
#-     reduce_scatter(gradients, group)

# %% 7.2 wrong: lazy, all-reduce and every chunk | every rank has the whole gradient and steps all chunks: that is DDP, and keeps all of the state on every rank
def sharded_step(weights, gradients, update, group=None):
    for chunk in gradients:
        chunk /= len(gradients)
    reduce_scatter(gradients, group)
    allgather(gradients, group)
    for chunk, gradient in zip(weights, gradients):
        update(chunk, gradient)

# %% 7.2 wrong: lazy, all-reduce and gather | half as many bytes again: only the sum of its own chunk is needed on a rank
#- reduce_scatter(gradients, group)
#+ reduce_scatter(gradients, group); allgather(gradients, group)

# %% 7.2 wrong: no update | the weights have not changed: is there an update()?
#-     update(weights[own], gradients[own])

# %% 7.2 told: lazy, dist.reduce_scatter | your code calls torch.distributed.all_reduce
#- reduce_scatter(gradients, group)
#+ dist.all_reduce(gradients[0], group=group)

# %% 7.2 wrong: a copy is stepped | the chunk that allgather sends has not been stepped: rank r has the sum of chunk r+1, and update() changes that chunk itself, no copy of it
#- update(weights[own], gradients[own])
#+ update(weights[own].clone(), gradients[own])

# %% 7.2 wrong: stepped before the sum | each chunk is stepped with one rank's gradient: the update comes after the reduce-scatter
#-     reduce_scatter(gradients, group)
#-     own = (dist.get_rank(group) + 1) % world_size
#-     update(weights[own], gradients[own])
#+     own = (dist.get_rank(group) + 1) % world_size
#+     update(weights[own], gradients[own])
#+     reduce_scatter(gradients, group)

# %% 7.2 told: ranks of another group | those of `group`
#- dist.get_rank(group)
#+ dist.get_rank() + world_size
#- gradients[own])
#+ gradients[own + world_size - 1])

# %% 7.2 told: no chunk after the last one | so its index is (rank + 1) % K
#- own = (dist.get_rank(group) + 1) % world_size
#+ own = dist.get_rank(group) + 1

# %% 7.2 wrong: weights are summed, too | the weights are summed over the ranks, too: the sum is of gradients, and a stepped chunk only has to be sent: allgather
#- allgather(weights, group)
#+ reduce_scatter(weights, group); allgather(weights, group)

# %% 7.2 wrong: the gradients are gathered in place of the weights | a rank has stepped its own chunk; the other chunks of the weights are still the old ones: gather them
#- allgather(weights, group)
#+ allgather(gradients, group); allgather(gradients, group)

# %% 7.2 wrong: multiplied by K | the gradients are multiplied by K; a mean is the sum divided by K
#- chunk /= world_size
#+ chunk *= world_size

# %% 7.2 wrong: only its own chunk is divided, before the sum | only one rank's term of each chunk is divided by K: divide all of a rank's gradients, or the sum of its own chunk
#-     for chunk in gradients:
#-         chunk /= world_size
#+     gradients[(dist.get_rank(group) + 1) % world_size] /= world_size

# %% 7.2 wrong: stepped twice | update() is called twice for a chunk: once is a step
#- update(weights[own], gradients[own])
#+ update(weights[own], gradients[own]); update(weights[own], gradients[own])

# %% 7.2 wrong: divided by K-1 | the mean of K gradients is their sum divided by K, not by K-1
#- chunk /= world_size
#+ chunk /= max(1, world_size - 1)

# %% 7.2 wrong: weights divided | the weights are divided by K: the mean is of the gradients
#-     for chunk in gradients:
#-         chunk /= world_size
#-     reduce_scatter
#+     reduce_scatter
#-     allgather(weights, group)
#+     weights[own] /= world_size
#+     allgather(weights, group)

# %% 7.2 wrong: the last rank takes chunk K-1 | the last rank has the sum of chunk 0: its index is (rank + 1) % K
#- (dist.get_rank(group) + 1) % world_size
#+ min(dist.get_rank(group) + 1, world_size - 1)

# %% 7.2 wrong: the list has a new chunk | the chunk in the list is a new tensor: `weights` are views of the flat tensor, so change them in place
#- update(weights[own], gradients[own])
#+ stepped = weights[own].clone()
#+     update(stepped, gradients[own])
#+     weights[own] = stepped

# %% 7.2 wrong: divided after update() | that is the step of the sum: divide the gradients by K before update() is called
def sharded_step(weights, gradients, update, group=None):
    world_size = dist.get_world_size(group)
    reduce_scatter(gradients, group)
    own = (dist.get_rank(group) + 1) % world_size
    update(weights[own], gradients[own])
    gradients[own] /= world_size
    allgather(weights, group)

# %% 7.2 told: lazy, one buffer of the longest chunk | gloo lets that pass, NCCL does not; a tensor is as long as what comes into it
def sharded_step(weights, gradients, update, group=None):
    from ddp_course import wire

    rank, world_size, left, right = wire.neighbours(group)
    reduce_scatter(gradients, group)
    own = (rank + 1) % world_size
    update(weights[own], gradients[own] / world_size)
    buffer = torch.empty_like(weights[0])
    for step in range(world_size - 1):
        into = weights[(rank - step) % world_size]
        wire.exchange(weights[(rank + 1 - step) % world_size], right, buffer, left, group)
        into.copy_(buffer[: len(into)])

# %% 7.3 right: one by one
def fewest_ranks(parameters, memory, level):
    kept, split = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}[level]
    for ranks in range(1, 100_000):
        if (kept + split / ranks) * parameters <= memory:
            return ranks
    return 0

# %% 7.3 right: rounded up
import math


def fewest_ranks(parameters, memory, level):
    free = memory - sum(size for size, least in ((2, 3), (2, 2), (12, 1)) if level < least) * parameters
    split = sum(size for size, least in ((2, 3), (2, 2), (12, 1)) if level >= least) * parameters
    if not split:
        return int(free >= 0)
    return math.ceil(split / free) if free > 0 else 0

# %% 7.3 wrong: no copy in float32 | the state is 12 bytes per parameter: the parameter in float32, and two moments
#- shared = 16 *
#+ shared = 12 *

# %% 7.3 wrong: all in float32 | parameters and gradients are in bfloat16: two bytes each
#- (16, 4, 2, 0)
#+ (16, 8, 4, 0)

# %% 7.3 wrong: levels from 0 | level 0 shards nothing, level 1 the optimizer's state
#- (16, 4, 2, 0)
#+ (4, 2, 0, 0)

# %% 7.3 wrong: lazy, everything sharded | only level 3 shards everything
#- (16, 4, 2, 0)[level]
#+ 0

# %% 7.3 wrong: rounded down | that is one too few: what is left over needs a place too
#- -(-shared // (memory - whole))
#+ shared // (memory - whole)

# %% 7.3 wrong: one more where it fits exactly | what fits exactly fits: that is one rank too many
#- -(-shared // (memory - whole))
#+ shared // (memory - whole) + 1

# %% 7.3 wrong: never says 0 | what stays whole does not fit, and no number of ranks changes that: 0
#-     if whole >= memory:
#-         return 0
#-     return -(-shared // (memory - whole))
#+     return max(1, -(-shared // max(1, memory - whole)))

# %% 7.3 wrong: nothing but the total | each rank keeps some of it whole: only the rest is divided
#-     return -(-shared // (memory - whole))
#+     return -(-16 * parameters // memory)

# %% 7.3 wrong: level 0 is shared out, too | level 0 shards nothing: what does not fit on one rank fits on none
#- whole = (16, 4, 2, 0)[level] * parameters
#+ whole = (0, 4, 2, 0)[level] * parameters

# %% 7.3 wrong: level 2 shards gradients only | level 2 shards the gradients as well as what level 1 shards, and level 3 all of it
#- (16, 4, 2, 0)
#+ (16, 4, 14, 14)

# %% 7.3 wrong: less than the memory | what fits exactly fits: "at most"
def fewest_ranks(parameters, memory, level):
    whole = (16, 4, 2, 0)[level] * parameters
    shared = 16 * parameters - whole
    for ranks in range(1, 10000):
        if whole + shared / ranks < memory:
            return ranks
    return 0

# %% 7.3 told: divides by what is left | nothing is left for a share
#-     if whole + shared <= memory:
#-         return 1
#-     if whole >= memory:
#-         return 0
#-     return -(-shared // (memory - whole))
#+     return -(-shared // (memory - whole))

# %% 7.3 wrong: level 3 keeps the parameters whole | level 3 shards the bfloat16 parameters too: nothing stays whole
#- (16, 4, 2, 0)
#+ (16, 4, 2, 2)

# %% 7.3 wrong: levels from 1 | level 1 shards the optimizer's state already: only level 0 shards nothing
#- (16, 4, 2, 0)
#+ (16, 16, 4, 2)

# %% 7.3 wrong: None | 0, not None, where no number of ranks is enough
#-         return 0
#+         return None

# %% 7.3 wrong: powers of two | the number of ranks need be no power of two
#-     return -(-shared // (memory - whole))
#+     ranks = 1
#+     while whole + shared / ranks > memory:
#+         ranks *= 2
#+     return ranks

# %% 7.3 wrong: up to a thousand | a thousand ranks are not always enough: go on, or divide
#-     return -(-shared // (memory - whole))
#+     ranks = -(-shared // (memory - whole))
#+     return ranks if ranks <= 1000 else 0

# %% 7.4 right: by counting the room
def network_order(blocks, block_mb, cap_mb):
    order, room, following = [["gather", block] for block in range(blocks)], cap_mb, blocks
    while following and room >= block_mb:
        following, room = following - 1, room - block_mb
    for block in range(blocks - 1, -1, -1):
        while following and room >= block_mb:
            following, room = following - 1, room - block_mb
            order.append(["gather", following])
        order.append(["reduce", block])
        room += block_mb
    return tuple(order)

# %% 7.4 right: two lists, zipped
from itertools import zip_longest


def network_order(blocks, block_mb, cap_mb):
    again = range(blocks - cap_mb // block_mb - 1, -1, -1)
    backward = [pair for pair in zip_longest(range(blocks - 1, -1, -1), again)]
    order = [("gather", block) for block in range(blocks)]
    for reduced, gathered in backward:
        order += [("reduce", reduced)] + ([("gather", gathered)] if gathered is not None else [])
    return order

# %% 7.4 told: lazy, each gather after the reduce before | without prefetch in backward
def network_order(blocks, block_mb, cap_mb):
    order = [("gather", block) for block in range(blocks)]
    for block in reversed(range(blocks)):
        order += [("gather", block), ("reduce", block)]
    return order

# %% 7.4 told: one block stays | is possible: does the network wait
#- fit = cap_mb // block_mb
#+ fit = 1

# %% 7.4 told: two blocks stay | is possible: does the network wait
#- fit = cap_mb // block_mb
#+ fit = 2

# %% 7.4 told: gathered before there is room | waits for ever
#-         order.append(("reduce", block))
#-         if ahead:
#-             ahead -= 1
#-             order.append(("gather", ahead))
#+         if ahead:
#+             ahead -= 1
#+             order.append(("gather", ahead))
#+         order.append(("reduce", block))

# %% 7.4 told: lazy, everything stays | waits for ever
#- ahead = max(blocks - fit, 0)
#+ ahead = 0

# %% 7.4 wrong: forward only | gradients are reduced in backward, once for each block
#-         order.append(("reduce", block))

# %% 7.4 told: backward in the order of forward | waits for ever
#- for block in reversed(range(blocks)):
#+ for block in range(blocks):

# %% 7.4 wrong: backward only | forward needs every block, too
#- order = [("gather", block) for block in range(blocks)]
#+ order = []

# %% 7.4 told: as words | each step is a pair such as
#- order.append(("reduce", block))
#+ order.append(f"reduce {block}")

# %% 7.4 wrong: counts from one | blocks are counted from 0
#- range(blocks)]
#+ range(1, blocks + 1)]

# %% 7.4 told: nothing returned | a list of steps was expected, not None
#-     return order

# %% 7.5 right: cast once, kept as a list
def fetch(layer, thread):
    if not layer.coming:
        layer.storage.resize_(layer.nbytes)
        with torch.no_grad():
            layer.chunks[layer.index][:] = layer.own.to(torch.bfloat16)
        layer.coming = thread.submit(allgather, list(layer.chunks), layer.group)
    return layer.coming


def free(layer):
    layer.coming = None
    layer.storage.resize_(0)


@torch.no_grad()
def finish(layer, thread):
    pieces = [piece / len(layer.chunks) for piece in layer.parameter.grad.float().flatten().tensor_split(len(layer.chunks))]
    layer.parameter.grad = None
    free(layer)
    thread.submit(reduce_scatter, pieces, layer.group).result()
    if layer.own.grad is None:
        layer.own.grad = torch.zeros_like(layer.own)
    layer.own.grad += pieces[layer.index]

# %% 7.5 right: divided at the end, gathered in a function of its own
def gather(layer):
    allgather(layer.chunks, layer.group)


def fetch(layer, thread):
    if layer.coming is not None:
        return layer.coming
    layer.storage.resize_(layer.nbytes)
    layer.chunks[layer.index].copy_(layer.own.data)
    layer.coming = thread.submit(gather, layer)
    return layer.coming


def finish(layer, thread):
    chunks = list(layer.parameter.grad.float().reshape(-1).tensor_split(len(layer.chunks)))
    thread.submit(lambda: reduce_scatter(chunks, layer.group)).result()
    mean = (chunks[layer.index] / len(chunks)).clone()
    if layer.own.grad is not None:
        mean += layer.own.grad
    layer.own.grad = mean
    layer.parameter.grad = None
    free(layer)


def free(layer):
    layer.storage.resize_(0)
    layer.coming = None

# %% 7.5 wrong: overwrites | the second backward pass has overwritten the gradient of the first: gradients add up until the optimizer clears them
#- layer.own.grad = part if layer.own.grad is None else layer.own.grad + part
#+ layer.own.grad = part

# %% 7.5 wrong: not divided | that is the sum over the ranks: divide by K for the mean
#- layer.parameter.grad.view(-1).float() / world_size
#+ layer.parameter.grad.view(-1).float()

# %% 7.5 wrong: reduced in bfloat16 | bfloat16 travels where float32 should: make the gradients float32 before they are summed
#- .view(-1).float() / world_size
#+ .view(-1) / world_size
#- part = gradients[layer.index].clone()
#+ part = gradients[layer.index].float()

# %% 7.5 wrong: reduced in bfloat16, divided there, too | bfloat16 travels where float32 should: make the gradients float32 before they are summed
#- .view(-1).float() / world_size
#+ .view(-1).clone()
#- part = gradients[layer.index].clone()
#+ part = (gradients[layer.index] / world_size).float()

# %% 7.5 told: bfloat16 to the end | `own` is float32, and so is its gradient
#- .view(-1).float() / world_size
#+ .view(-1) / world_size

# %% 7.5 told: the memory is not taken again | take it again, by storage.resize_(nbytes)
#-         layer.storage.resize_(layer.nbytes)

# %% 7.5 wrong: chunk r | rank r has the sum of chunk r+1: `layer.index` says which
#- part = gradients[layer.index].clone()
#+ part = gradients[dist.get_rank(layer.group)].clone()[: len(layer.own)]; part = torch.nn.functional.pad(part, (0, len(layer.own) - len(part)))

# %% 7.5 wrong: keeps the whole gradient alive | `own.grad` is a view of the whole gradient, which therefore stays in memory: copy the chunk
#- gradients[layer.index].clone()
#+ gradients[layer.index]

# %% 7.5 wrong: gradient not dropped | the whole gradient stays in `parameter.grad`: a rank has no room for it
#-     layer.parameter.grad = None

# %% 7.5 wrong: gathers each time it is asked | a layer that is already coming is gathered again: look at `layer.coming`
#-     if layer.coming is None:
#+     if True:

# %% 7.5 wrong: gathers in the caller's thread | the gather runs in the caller's thread, so that nothing can compute under it: give it to `thread`
#- layer.coming = thread.submit(allgather, layer.chunks, layer.group)
#+ import concurrent.futures
#+         allgather(layer.chunks, layer.group)
#+         layer.coming = concurrent.futures.Future()
#+         layer.coming.set_result(None)

# %% 7.5 wrong: lazy, never freed | layers stay whole: free one when its forward pass and when its backward pass is over
#-     layer.storage.resize_(0)
#-     layer.coming = None
#+     pass

# %% 7.5 wrong: finish does not free | layers stay whole: free one when its forward pass and when its backward pass is over
#-     layer.parameter.grad = None
#-     free(layer)
#+     layer.parameter.grad = None

# %% 7.5 told: not filled | thread.submit was expected
#-     return layer.coming

# %% 7.5 told: the old values travel | the memory holds anything when it comes back, so copy `own` into it
#-         layer.chunks[layer.index].copy_(layer.own.detach())
#+         layer.chunks[layer.index].zero_()

# %% 7.5 told: finish does not wait | finish does not wait for the sum
#- thread.submit(reduce_scatter, gradients, layer.group).result()
#+ thread.submit(reduce_scatter, gradients, layer.group)

# %% 7.5 wrong: waits when it has taken its chunk | finish takes its chunk of the sum first, and then waits for the sum: turn it round
#- thread.submit(reduce_scatter, gradients, layer.group).result()
#+ coming = thread.submit(reduce_scatter, gradients, layer.group)
#- part = gradients[layer.index].clone()
#+ part = gradients[layer.index].clone()
#+     coming.result()

# %% 7.5 told: gathered once only | is `coming` None then
#-     layer.storage.resize_(0)
#-     layer.coming = None
#+     layer.storage.resize_(0)

# %% 7.5 told: fetch waits | fetch waits for its gather, so nothing computes under it: return the future at once
#-     return layer.coming
#+     layer.coming.result()
#+     return layer.coming

# %% 7.5 wrong: divided twice | the gradient is divided by K more than once
#- gradients[layer.index].clone()
#+ gradients[layer.index] / world_size

# %% 7.5 told: nothing is put into the memory | the memory holds anything when it comes back, so copy `own` into it
#-         layer.chunks[layer.index].copy_(layer.own.detach())

# %% 7.5 told: the sum in the caller's thread | finish sums in its own thread
#- thread.submit(reduce_scatter, gradients, layer.group).result()
#+ reduce_scatter(gradients, layer.group)

# %% 7.5 wrong: only this rank's gradient | that is one rank's gradient: give the reduce-scatter of all ranks' to the thread
#- thread.submit(reduce_scatter, gradients, layer.group).result()
#+ thread.submit(len, gradients).result()

# %% 7.5 wrong: free forgets the memory | layers stay whole: `free` gives the memory back, by storage.resize_(0)
#-     layer.storage.resize_(0)
#-     layer.coming = None
#+     layer.coming = None

# %% 7.5 wrong: the first pass alone | the gradient of the second backward pass is lost: it is added to that of the first
#- layer.own.grad + part
#+ layer.own.grad

# %% 7.5 wrong: weights in float32 | weights travel in float32: gather the bfloat16 chunks themselves, and half of the bytes are saved
#-         layer.chunks[layer.index].copy_(layer.own.detach())
#-         layer.coming = thread.submit(allgather, layer.chunks, layer.group)
#+
#+         def gather():
#+             whole = [torch.empty(len(chunk)) for chunk in layer.chunks]
#+             whole[layer.index].copy_(layer.own.detach())
#+             allgather(whole, layer.group)
#+             for chunk, values in zip(layer.chunks, whole):
#+                 chunk.copy_(values)
#+
#+         layer.coming = thread.submit(gather)

# %% 7.5 wrong: lazy, all-reduce of the gradients | the whole sum comes to every rank: after the reduce-scatter a rank has all that it keeps
#- thread.submit(reduce_scatter, gradients, layer.group).result()
#+ thread.submit(lambda: (reduce_scatter(gradients, layer.group), allgather(gradients, layer.group))).result()

# %% 7.5 wrong: all-reduce of the gradients, in two transfers | the whole sum comes to every rank: after the reduce-scatter a rank has all that it keeps
#- thread.submit(reduce_scatter, gradients, layer.group).result()
#+ thread.submit(reduce_scatter, gradients, layer.group).result()
#+     thread.submit(allgather, gradients, layer.group).result()

# %% 7.5 told: called, not handed over | submit takes the function and its arguments
#- thread.submit(allgather, layer.chunks, layer.group)
#+ thread.submit(allgather(layer.chunks, layer.group))

# %% 7.5 wrong: the mean is rounded | the mean is rounded to bfloat16: keep it in float32
#- gradients[layer.index].clone()
#+ gradients[layer.index].bfloat16().float()

# %% 7.5 wrong: lazy, a copy in place of the second gather | a copy of the whole layer is kept for the backward pass: a rank has no room for it, so gather again
def fetch(layer, thread):
    if layer.coming is None:
        layer.storage.resize_(layer.nbytes)
        if getattr(layer, "copy", None) is None:
            layer.chunks[layer.index].copy_(layer.own.detach())
            layer.coming = thread.submit(allgather, layer.chunks, layer.group)
        else:
            layer.coming = thread.submit(layer.parameter.data.copy_, layer.copy)
    return layer.coming


def free(layer):
    layer.copy = layer.parameter.data.clone()
    layer.storage.resize_(0)
    layer.coming = None


def finish(layer, thread):
    world_size = len(layer.chunks)
    whole = layer.parameter.grad.view(-1).float() / world_size
    gradients = whole.tensor_split(world_size)
    thread.submit(reduce_scatter, gradients, layer.group).result()
    part = gradients[layer.index].clone()
    layer.own.grad = part if layer.own.grad is None else layer.own.grad + part
    layer.parameter.grad = None
    free(layer)
    layer.copy = None

# %% 7.5 told: lazy, the whole gradient is kept | keeps a whole layer's numbers: a rank has room for its chunk alone
#- part = gradients[layer.index].clone()
#+ layer.gradient_of_all = whole
#+     part = gradients[layer.index].clone()

# %% 7.6 right: a list of squares
def global_norm(shards, replicated, all_reduce):
    total = torch.tensor(float(sum((shard**2).sum() for shard in shards)), dtype=torch.float64)
    all_reduce(total)
    return (total + sum((gradient**2).sum() for gradient in replicated)).sqrt()

# %% 7.6 right: replicated ones divided by K
def global_norm(shards, replicated, all_reduce):
    squares = torch.stack([torch.zeros(2, dtype=torch.float64)] + [torch.stack([s.pow(2).sum(), s.sum() * 0]) for s in shards]).sum(0)
    ones = torch.tensor([squares[0], 1.0], dtype=torch.float64)
    all_reduce(ones)
    total = ones[0]
    for gradient in replicated:
        total = total + gradient.norm() ** 2
    return total**0.5

# %% 7.6 wrong: sum of norms | norms do not add up, their squares do
#- squares += shard.square().sum()
#+ squares += shard.norm()
#- squares += gradient.square().sum()
#+ squares += gradient.norm()
#- return squares.sqrt()
#+ return squares

# %% 7.6 wrong: replicated K times | the replicated gradients count once per rank: add them after the sum over the ranks
#-     all_reduce(squares)
#-     for gradient in replicated:
#-         squares += gradient.square().sum()
#+     for gradient in replicated:
#+         squares += gradient.square().sum()
#+     all_reduce(squares)

# %% 7.6 wrong: root before the sum | the root is taken before the sum over the ranks: norms do not add up, their squares do
#-     all_reduce(squares)
#+     squares = squares.sqrt()
#+     all_reduce(squares)
#+     squares = squares.square()

# %% 7.6 wrong: own shards only | that is the norm of this rank's own part: what do the other ranks have?
#-     all_reduce(squares)

# %% 7.6 wrong: no root | that is the square of the norm
#- return squares.sqrt()
#+ return squares

# %% 7.6 wrong: replicated forgotten | the replicated gradients are missing
#-     for gradient in replicated:
#-         squares += gradient.square().sum()

# %% 7.6 wrong: a mean | that is a mean over the ranks; the squares of all ranks add up
#- all_reduce(squares)
#+ all_reduce(squares); squares /= dist.get_world_size()

# %% 7.6 told: an all-reduce per shard | wait for each other
#-         squares += shard.square().sum()
#-     all_reduce(squares)
#+         part = shard.square().sum()
#+         all_reduce(part)
#+         squares += part

# %% 7.6 wrong: squares in place | the gradients have changed: they are still needed
#- squares += shard.square().sum()
#+ squares += shard.square_().sum()

# %% 7.6 right: in float32
#- torch.zeros((), dtype=torch.float64)
#+ torch.zeros(())

# %% 7.6 right: a norm of norms
def global_norm(shards, replicated, all_reduce):
    own = torch.tensor([torch.linalg.vector_norm(shard) ** 2 for shard in shards] or [0.0]).sum()
    all_reduce(own)
    return torch.sqrt(own + sum(torch.linalg.vector_norm(gradient) ** 2 for gradient in replicated))

# %% 7.6 told: a number | a tensor was expected
#- return squares.sqrt()
#+ return squares.sqrt().item()

# %% 7.6 told: at least one shard | a rank may have no shards at all
#-     squares = torch.zeros((), dtype=torch.float64)
#-     for shard in shards:
#-         squares += shard.square().sum()
#+     squares = torch.stack([shard.square().sum() for shard in shards]).sum()

# %% 7.6 wrong: the largest norm | that is the largest norm, or a sum of largest ones: the squares of all numbers add up
def global_norm(shards, replicated, all_reduce):
    largest = torch.zeros(())
    for gradient in [*shards, *replicated]:
        largest = torch.maximum(largest, gradient.norm())
    all_reduce(largest)
    return largest

# %% 7.6 wrong: means of squares | a norm sums the squares: no mean
#- shard.square().sum()
#+ shard.square().mean()
#- gradient.square().sum()
#+ gradient.square().mean()

# %% 7.6 wrong: absolute values | that is the 1-norm, a sum of absolute values: the 2-norm is the root of the sum of squares
#- shard.square().sum()
#+ shard.abs().sum()
#- gradient.square().sum()
#+ gradient.abs().sum()
#- squares.sqrt()
#+ squares

# %% 7.6 told: the gradients themselves | one number, their sum of squares
#-     squares = torch.zeros((), dtype=torch.float64)
#-     for shard in shards:
#-         squares += shard.square().sum()
#-     all_reduce(squares)
#+     whole = torch.cat(shards) if shards else torch.zeros(1)
#+     all_reduce(whole)
#+     squares = whole.square().sum()

# %% 7.6 told: lazy, torch's own gather | your code calls torch.distributed.all_gather_object
def global_norm(shards, replicated, all_reduce):
    everything = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everything, shards)
    flat = [gradient for of_rank in everything for gradient in of_rank] + list(replicated)
    return torch.cat([gradient.reshape(-1) for gradient in flat]).norm()

# %% 7.6 told: lazy, gathered by a sum | numbers are summed: one is enough, the sum of this rank's squares
def global_norm(shards, replicated, all_reduce):
    rows = torch.zeros(4, 100)
    own = torch.cat([torch.zeros(0), *shards])
    rows[torch.distributed.get_rank(), : len(own)] = own
    all_reduce(rows)
    return torch.cat([rows.reshape(-1), *[gradient.reshape(-1) for gradient in replicated]]).norm()

# %% 7.7 right: one more at a time, and by seconds
def smallest_batch(parameters, memory, flops_per_s, bytes_per_s, weight_bytes, gradient_bytes):
    gpus = 1
    while 16 * parameters > gpus * memory:
        gpus += 1
    gather, scatter = ((gpus - 1) * size / bytes_per_s for size in (weight_bytes, gradient_bytes))
    forward = math.ceil(gather * flops_per_s / 2)
    backward = math.ceil((gather + scatter) * flops_per_s / 4)
    return [gpus, max(forward, backward)]

# %% 7.7 right: tokens of a GPU first
def smallest_batch(parameters, memory, flops_per_s, bytes_per_s, weight_bytes, gradient_bytes):
    gpus = (16 * parameters + memory - 1) // memory
    bytes_per_flop = max(2 * weight_bytes, weight_bytes + gradient_bytes) / 4
    other_gpus = gpus - 1
    return gpus, math.ceil(bytes_per_flop * flops_per_s * other_gpus / bytes_per_s)

# %% 7.7 wrong: forward alone | that looks at the forward pass only: the backward pass sends weights and gradients
#- max(forward, backward)
#+ forward

# %% 7.7 wrong: backward alone | that looks at the backward pass only: in the forward pass the gather may take longer than its computing
#- max(forward, backward)
#+ backward

# %% 7.7 wrong: the easier pass | that suits one of the passes; the other one waits: take the larger number of tokens
#- max(forward, backward)
#+ min(forward, backward)

# %% 7.7 wrong: lazy, both passes as one | what one pass has to spare does not hide the other's messages: compare pass by pass
#- max(forward, backward)
#+ (2 * weight_bytes + gradient_bytes) / 6

# %% 7.7 wrong: the sum of both passes | each token computes in both passes: take the larger of their two numbers, not the sum
#- max(forward, backward)
#+ (forward + backward)

# %% 7.7 wrong: K for K-1 | that is as if each GPU received its own part, too: each has a K-th already, and sends (K-1)/K
#- (gpus - 1) * max
#+ gpus * max

# %% 7.7 wrong: tokens of a GPU | that is what one GPU needs; the batch of all GPUs together was asked for
#- (gpus - 1) * max
#+ (gpus - 1) / gpus * max

# %% 7.7 wrong: rounded down | with that many tokens a pass waits a little: round up
#- math.ceil(tokens)
#+ math.floor(tokens)

# %% 7.7 wrong: two bytes always | look at `weight_bytes` and `gradient_bytes`: they need not be two
#- forward = weight_bytes / 2
#+ forward = 1
#- (weight_bytes + gradient_bytes) / 4
#+ 1

# %% 7.7 wrong: an all-reduce as in DDP | that is DDP's all-reduce, two times the gradients; here weights are gathered, and gradients scattered once
#- max(forward, backward)
#+ gradient_bytes / 2

# %% 7.7 wrong: bits | bytes per second are no bits per second
#- * flops_per_s / bytes_per_s
#+ * flops_per_s / bytes_per_s * 8

# %% 7.7 wrong: n does not cancel | n is in both times of a pass, so it cancels: a larger model computes more for each token, and sends as much more
#- * flops_per_s / bytes_per_s
#+ * flops_per_s / bytes_per_s * parameters

# %% 7.7 wrong: gathered once | in the backward pass the weights are gathered again, beside the gradients
#- (weight_bytes + gradient_bytes) / 4
#+ gradient_bytes / 4

# %% 7.7 wrong: backward like forward | backward computes twice what forward does: 4 n flops per token, not 2
#- (weight_bytes + gradient_bytes) / 4
#+ (weight_bytes + gradient_bytes) / 2

# %% 7.7 wrong: upside down | faster GPUs need more tokens and a faster link fewer: that is the wrong way round
#- flops_per_s / bytes_per_s
#+ bytes_per_s / flops_per_s

# %% 7.7 wrong: weights only | each parameter takes 16 bytes in all, not only those of its weight: gradient and Adam's state are kept, too
#- 16 * parameters
#+ weight_bytes * parameters

# %% 7.7 wrong: rounded down to GPUs | that is one GPU too few: what is left over needs a place, too
#- gpus = -(-16 * parameters // memory)
#+ gpus = max(1, 16 * parameters // memory)

# %% 7.7 wrong: rounded down to no GPU | that is one GPU too few: what is left over needs a place, too
#- gpus = -(-16 * parameters // memory)
#+ gpus = 16 * parameters // memory

# %% 7.7 wrong: one GPU more where it fits exactly | what fits exactly fits: that is one GPU too many
#- gpus = -(-16 * parameters // memory)
#+ gpus = 16 * parameters // memory + 1

# %% 7.7 wrong: tokens first | the two have changed places: first the number of GPUs, then the tokens
#- return gpus, math.ceil(tokens)
#+ return math.ceil(tokens), gpus

# %% 7.7 wrong: times the GPUs once more | those are the tokens of all GPUs together already
#- (gpus - 1) * max
#+ gpus * (gpus - 1) * max

# %% 7.7 wrong: at least one token | where nothing is sent, 0 tokens are enough
#- math.ceil(tokens)
#+ max(1, math.ceil(tokens))

# %% 7.8 right: layers alone
#-     fully_shard(model, mesh=mesh)
#+     pass

# %% 7.8 right: another name, and weights that stay whole between the passes
#- "halves", reduce_scatter
#+ "both", reduce_scatter
#- backend="halves"
#+ backend="both"
#- fully_shard(layer, mesh=mesh)
#+ fully_shard(layer, mesh=mesh, reshard_after_forward=False)

# %% 7.8 told: lazy, torch's own group | torch gathers and sums by other means
#- dist.new_group(backend="halves")
#+ dist.new_group(backend="gloo")

# %% 7.8 told: lazy, the course's halves | torch gathers and sums by other means
#- register("halves", reduce_scatter=reduce_scatter, allgather=allgather)
#+ register("halves")

# %% 7.8 told: lazy, nothing is sharded | parameters are still whole
def train_sharded(reduce_scatter, allgather, model, batches, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    world_size = dist.get_world_size()
    for inputs, targets in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        for parameter in model.parameters():
            chunks = list(parameter.grad.view(-1).tensor_split(world_size))
            reduce_scatter(chunks)
            allgather(chunks)
            parameter.grad /= world_size
        optimizer.step()


# %% 7.8 wrong: lazy, the whole model at once | the model is one block, so a rank has all of it whole at once: shard each layer first
#-     for layer in model:
#-         if list(layer.parameters()):
#-             fully_shard(layer, mesh=mesh)
#+     pass

# %% 7.8 wrong: the optimizer is made first | the weights have not changed: fully_shard puts new parameters in place of the old ones, so make the optimizer after it
#-     fully_shard(model, mesh=mesh)
#-     optimizer = torch.optim.SGD(model.parameters(), lr=lr)
#+     fully_shard(model, mesh=mesh)
#-     ring_backend.register("halves", reduce_scatter=reduce_scatter, allgather=allgather)
#+     optimizer = torch.optim.SGD(model.parameters(), lr=lr)
#+     ring_backend.register("halves", reduce_scatter=reduce_scatter, allgather=allgather)

# %% 7.8 wrong: gradients are never cleared | gradients add up from step to step: clear them before each backward pass
#-         optimizer.zero_grad()
#+         pass

# %% 7.8 wrong: divided once more | fully_shard has divided by K: the gradients are means already
#-         optimizer.step()
#+         for parameter in model.parameters():
#+             parameter.grad /= dist.get_world_size()
#+         optimizer.step()

# %% 7.8 wrong: one batch only | the numbers of one step: go through all batches
#-         optimizer.step()
#+         optimizer.step()
#+         break


# %% 7.9 right: one of the points
def explain_figure():
    return 'At 1, where forward ends, the activations of all 16 layers exist at the same time, and backward then frees them one by one.', "A"


# %% 7.9 right: a list of letters
#- "ABC"
#+ ["A", "B", "C"]
# %% 7.9 told: lazy, a few words | at least twelve different words
#- return text, "ABC"
#+ return "It is 20 % faster so.", "A"
# %% 7.9 told: lazy, one word many times | at least twelve different words
#- return text, "ABC"
#+ return "because " * 20 + "4", "A"
# %% 7.9 told: lazy, all is ticked | 3 points in 19 different words
def explain_figure():
    return 'At 1, where forward ends, the activations of all 16 layers exist at the same time, and backward then frees them one by one.', "ABC"


# %% 7.9 told: no number | name a number of the figure
#- return text, "ABC"
#+ return "".join(sign for sign in text if not sign.isdigit()), "ABC"
# %% 7.9 told: no letters | a pair was expected
#- return text, "ABC"
#+ return text
# %% 7.9 told: nothing ticked | tick at least one letter
#- return text, "ABC"
#+ return text, ""
# %% 7.9 told: another letter | 'X' is none of A, B and C
#- return text, "ABC"
#+ return text, "AX"


# %% 7.10 right: by what is left after backward
def way_of(held, ranks):
    counts = [count for _, count in held]
    peaks = [n for n in range(17, 32) if counts[n] > counts[n - 1] + 1.5]
    if len(peaks) > 1:
        return "checkpointed"
    if min(counts) > 12:
        return "DDP"
    return "ZeRO-1" if counts[36] - counts[0] > 2 else "fully sharded"


# %% 7.10 right: from the formulas
def way_of(held, ranks):
    end = sum(count for moment, count in held if moment >= 2) / 16
    backward = [count for moment, count in held if 1 <= moment < 2]
    kept = {"DDP": 16, "ZeRO-1": 8 + 8 / ranks, "fully sharded": 16 / ranks + 1}
    way = min(kept, key=lambda name: abs(kept[name] - end))
    jumps = sum(b - a > 1 for a, b in zip(backward, backward[1:]))
    return "checkpointed" if jumps >= 2 else way


# %% 7.10 told: lazy, by the peak | 'DDP' was returned, but
#- if before > 14:
#+ if max(count for _, count in held) > 25:
# %% 7.10 told: lazy, no checkpoints | 'fully sharded' was returned, but it rises several times in the backward pass
#- return "checkpointed" if rises >= 2 else "fully sharded"
#+ return "fully sharded"
# %% 7.10 told: any rise | 'checkpointed' was returned, but it begins with few bytes, has one peak
#- backward[place - 1] + 1
#+ backward[place - 1] - 2
# %% 7.10 told: gradients are forgotten | 'fully sharded' was returned, but it begins with few bytes, and the whole gradients
#- if after[0] > before + 2:
#+ if after[0] > before + 20:
# %% 7.10 told: as ZeRO-1 begins | 'ZeRO-1' was returned, but
#- if after[0] > before + 2:
#+ if before < 8:
# %% 7.10 told: another word | the result is 'FSDP'
#- else "fully sharded"
#+ else "FSDP"
# %% 7.11 right: moment by moment
def exposed(events):
    kernels = [event for event in events if event["cat"] == "kernel"]
    spans = [(event["name"], event["ts"], event["ts"] + event["dur"]) for event in kernels]
    moments = sorted({moment for _, begin, end in spans for moment in (begin, end)})
    waited = {"AllGather": 0.0, "ReduceScatter": 0.0}
    for begin, end in zip(moments, moments[1:]):
        running = [name for name, a, b in spans if a <= begin and end <= b]
        if all("nccl" in name for name in running):
            for name in running:
                waited[name.split("_")[1]] += end - begin
    return waited


# %% 7.11 right: by stream
#- "nccl" not in event["name"]
#+ event["args"]["stream"] == 7
# %% 7.11 wrong: lazy, all that is sent | what runs beside a kernel that computes is hidden: leave it out
#-                 for other in computing:
#-                     together = min(end, other["ts"] + other["dur"]) - max(begin, other["ts"])
#-                     waited[kind] -= max(0.0, together)
# %% 7.11 wrong: the processor's events too | cpu_op events only queue kernels: the GPU computes in none of them
#- computing = [event for event in kernels if "nccl" not in event["name"]]
#+ computing = [event for event in events if "nccl" not in event["name"]]
# %% 7.11 wrong: what is hidden | that is the hidden part: the exposed one is what is left
#-                 waited[kind] += event["dur"]
#-                 for other
#+                 for other
#- waited[kind] -= max(0.0, together)
#+ waited[kind] += max(0.0, together)
# %% 7.11 wrong: gaps count too | where two spans do not meet, they have less than nothing in common: leave these out
#- max(0.0, together)
#+ together
# %% 7.11 told: lazy, nothing is exposed | the result
#- return waited
#+ return {"AllGather": 0.0, "ReduceScatter": 0.0}
# %% 7.11 told: a sum of both | a dict with AllGather and ReduceScatter was expected
#- return waited
#+ return sum(waited.values())
# %% 7.11 wrong: in milliseconds | these are milliseconds: microseconds were asked for
#- return waited
#+ return {kind: count / 1000 for kind, count in waited.items()}
