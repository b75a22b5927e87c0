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


# %% 7.1 wrong: in turn | they are dealt out in turn; look at how many numbers each rank has
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
# %% 7.2 right: receives and sends posted at once
def sharded_step(parameters, owners, optimizer, group=None):
    optimizer.step()
    rank = dist.get_rank(group)
    transfers = []
    for parameter, owner in zip(parameters, owners):
        if owner == rank:
            transfers += [wire.isend(parameter.data, peer, group) for peer in wire.others(owner, group)]
        else:
            transfers.append(wire.irecv(parameter.data, owner, group))
    for transfer in transfers:
        transfer.wait()


# %% 7.2 right: into a buffer
@torch.no_grad()
def sharded_step(parameters, owners, optimizer, group=None):
    optimizer.step()
    for index, owner in enumerate(owners):
        if dist.get_rank(group) == owner:
            for peer in reversed(wire.others(owner, group)):
                wire.send(parameters[index].data, peer, group)
        else:
            fresh = torch.empty_like(parameters[index])
            wire.recv(fresh, owner, group)
            parameters[index].copy_(fresh)


# %% 7.2 wrong: nothing sent | each rank has stepped only its own parameters: after the step, send them to the others, which keep what comes in
#-     for parameter, owner in zip(parameters, owners):
#+     for parameter, owner in []:
# %% 7.2 wrong: no step | the parameters have not changed: is there a step()?
#-     optimizer.step()
# %% 7.2 wrong: sent before the step | each rank has stepped only its own parameters: after the step, send them to the others, which keep what comes in
def sharded_step(parameters, owners, optimizer, group=None):
    for parameter, owner in zip(parameters, owners):
        if dist.get_rank(group) == owner:
            for peer in wire.others(owner, group):
                wire.send(parameter.detach(), peer, group)
        else:
            wire.recv(parameter.detach(), owner, group)
    optimizer.step()


# %% 7.2 told: rank 0 is the owner | receives from itself
#- == owner:
#+ == 0:
# %% 7.2 wrong: not kept | each rank has stepped only its own parameters: after the step, send them to the others, which keep what comes in
#- wire.recv(parameter.detach(), owner, group)
#+ wire.recv(parameter.detach().clone(), owner, group)
# %% 7.2 told: first other only | wait for each other
#- in wire.others(owner, group):
#+ in wire.others(owner, group)[:1]:
# %% 7.2 wrong: gradients sent | where a parameter should be is its gradient: send the parameter itself, after the step
#- wire.send(parameter.detach(), peer, group)
#+ wire.send(parameter.grad, peer, group)
# %% 7.2 wrong: every rank steps everything | nothing is sent: each rank steps all parameters, so none of the state is split
def sharded_step(parameters, owners, optimizer, group=None):
    everything = optimizer.__dict__.setdefault("whole", torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    everything.step()


# %% 7.2 told: dist.broadcast | your code calls torch.distributed.broadcast
def sharded_step(parameters, owners, optimizer, group=None):
    optimizer.step()
    for parameter, owner in zip(parameters, owners):
        dist.broadcast(parameter.detach(), owner, group=group)


# %% 7.3 right: a sum
def bytes_per_rank(parameters, world_size, level):
    shares = [world_size if level >= least else 1 for least in (3, 2, 1)]
    return sum(each * parameters / share for each, share in zip((4, 4, 8), shares))


# %% 7.3 right: a table
def bytes_per_rank(parameters, world_size, level):
    kept, split = {0: (16, 0), 1: (8, 8), 2: (4, 12), 3: (0, 16)}[level]
    return (kept + split / world_size) * parameters


# %% 7.3 wrong: one moment | Adam keeps two numbers per parameter: 8 bytes of state
#- 8 * parameters
#+ 4 * parameters
# %% 7.3 wrong: no gradients | where are the gradients?
#- return weights + gradients + state
#+ return weights + state
# %% 7.3 wrong: numbers | float32 has four bytes
#- 4 * parameters, 4 * parameters, 8 * parameters
#+ parameters, parameters, 2 * parameters
# %% 7.3 wrong: levels from 0 | level 0 shards nothing, level 1 the optimizer's state
#- level >= 1
#+ level >= 0
#- level >= 2
#+ level >= 1
#- level >= 3
#+ level >= 2
# %% 7.3 wrong: nothing sharded | nothing is sharded
#- return weights + gradients + state
#+ return 16 * parameters
# %% 7.3 wrong: everything sharded | everything is divided by K at every level
#- return weights + gradients + state
#+ return 16 * parameters / world_size
# %% 7.3 wrong: no state | where is the optimizer's state?
#- return weights + gradients + state
#+ return weights + gradients
