# %% [markdown]
# Answers to exercise 3 as learners write them. docs/CONTRIBUTING.md says how to read this.

# %% 3.1 right: all receives at once
def collect(tensor, server=0, group=None):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank == server:
        buffers = [torch.empty_like(tensor) for _ in range(size - 1)]
        others = [peer for peer in range(size) if peer != server]
        transfers = [wire.irecv(buffer, peer, group) for buffer, peer in zip(buffers, others)]
        for transfer, buffer in zip(transfers, buffers):
            transfer.wait()
            tensor.add_(buffer)
    else:
        wire.isend(tensor, server, group).wait()

# %% 3.1 right: last peer first
def collect(tensor, server=0, group=None):
    if dist.get_rank(group) == server:
        for peer in reversed(wire.others(server, group)):
            part = tensor.new_empty(tensor.shape)
            wire.recv(part, peer, group)
            tensor.copy_(tensor + part)
    else:
        wire.send(tensor.clone(), server, group)

# %% 3.1 wrong: not in place | the server has only its own tensor: add what it receives to it, in place
#- tensor += incoming
#+ tensor = tensor + incoming

# %% 3.1 wrong: overwrites | the server has only what came last: add, do not overwrite
#- tensor += incoming
#+ tensor.copy_(incoming)

# %% 3.1 told: server is always rank 0 | a rank sends to itself
#- != server:
#+ != 0:

# %% 3.1 wrong: does not wait | the server adds up one tensor several times: wait for each before adding it
def collect(tensor, server=0, group=None):
    if dist.get_rank(group) != server:
        return wire.send(tensor, server, group)
    incoming = torch.empty_like(tensor)
    for peer in wire.others(server, group):
        transfer = wire.irecv(incoming, peer, group)
        transfer.wait()
    for _ in wire.others(server, group):
        tensor += incoming

# %% 3.1 told: works for two ranks only | wait for each other
#- wire.others(server, group):
#+ wire.others(server, group)[:1]:

# %% 3.1 wrong: divides already | the server has the mean: here it only adds up, the division comes later
#-         tensor += incoming
#+         tensor += incoming
#+     tensor /= dist.get_world_size(group)

# %% 3.1 told: lazy, dist.reduce | your code calls torch.distributed.reduce
def collect(tensor, server=0, group=None):
    dist.reduce(tensor, server, group=group)

# %% 3.1 told: receives from itself too | wait for each other
#- for peer in wire.others(server, group):
#+ for peer in range(dist.get_world_size(group)):
#+         if peer == server and dist.get_world_size(group) == 1:
#+             continue
#+         peer = (peer + 1) % 2 if peer == server else peer

# %% 3.1 told: works for float32 only | do both sides mean the same
#- torch.empty_like(tensor)
#+ torch.empty(tensor.shape)

# %% 3.1 wrong: rank 0 is the server | rank 0 has the sum, but the server is another rank
def collect(tensor, server=0, group=None):
    if dist.get_rank(group) != 0:
        wire.send(tensor, 0, group)
        return
    incoming = torch.empty_like(tensor)
    for peer in wire.others(0, group):
        wire.recv(incoming, peer, group)
        tensor += incoming

# %% 3.1 wrong: adds after the loop | only one of the received tensors was added: add each when it has come
#-         tensor += incoming
#+         continue
#+     if wire.others(server, group):
#+         tensor += incoming

# %% 3.1 wrong: the others lose theirs | the others' tensors have changed: they keep theirs
#-         wire.send(tensor, server, group)
#+         wire.send(tensor, server, group)
#+         tensor.zero_()

# %% 3.1 told: sends once for each rank | does each of the others send once
#-         wire.send(tensor, server, group)
#+         for _ in wire.others(server, group):
#+             wire.send(tensor, server, group)

# %% 3.1 wrong: lazy, everybody collects | every rank collects, so each sends to all others: only the server needs the sum
def collect(tensor, server=0, group=None):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    total = tensor.clone()
    for shift in range(1, size):
        incoming = torch.empty_like(tensor)
        wire.exchange(tensor, (rank + shift) % size, incoming, (rank - shift) % size, group)
        total += incoming
    if rank == server:
        tensor.copy_(total)

# %% 3.1 told: lazy, a buffer for any length | gloo lets that pass, NCCL does not; a tensor is as long as what comes into it
#- incoming = torch.empty_like(tensor)
#+ incoming = tensor.new_empty(1000)
#- tensor += incoming
#+ tensor += incoming[: len(tensor)]

# %% 3.1 told: a list is sent | a message is one tensor: hand over a tensor
#- wire.send(tensor, server, group)
#+ wire.send([tensor], server, group)

# %% 3.2 right: all sends at once
def send_back(tensor, server=0, group=None):
    if dist.get_rank(group) == server:
        for transfer in [wire.isend(tensor, peer, group) for peer in wire.others(server, group)]:
            transfer.wait()
    else:
        wire.irecv(tensor, server, group).wait()

# %% 3.2 right: receive and copy
def send_back(tensor, server=0, group=None):
    if dist.get_rank(group) == server:
        for peer in range(dist.get_world_size(group) - 1, -1, -1):
            if peer != server:
                wire.send(tensor, peer, group)
    else:
        arrived = torch.zeros_like(tensor)
        wire.recv(arrived, server, group)
        tensor[:] = arrived

# %% 3.2 wrong: adds | they added what came from the server: it is finished, so it replaces theirs
#-         wire.recv(tensor, server, group)
#+         arrived = torch.empty_like(tensor)
#+         wire.recv(arrived, server, group)
#+         tensor += arrived

# %% 3.2 wrong: not in place | they still have their own tensor: receive into the tensor itself, in place, and wait for it
#-         wire.recv(tensor, server, group)
#+         tensor = torch.empty_like(tensor)
#+         wire.recv(tensor, server, group)

# %% 3.2 told: rank 0 is the server | receives from itself
#- != server:
#+ != 0:

# %% 3.2 wrong: from rank 0 | they have rank 0's tensor, but the server is another rank
def send_back(tensor, server=0, group=None):
    if dist.get_rank(group) == 0:
        for peer in wire.others(0, group):
            wire.send(tensor, peer, group)
    else:
        wire.recv(tensor, 0, group)

# %% 3.2 told: first peer only | wait for each other
#- in wire.others(server, group):
#+ in wire.others(server, group)[:1]:

# %% 3.2 told: never sends | wait for each other
#-         wire.send(tensor, peer, group)
#+         pass

# %% 3.2 wrong: nothing at all | they still have their own tensor: receive into the tensor itself, in place, and wait for it
def send_back(tensor, server=0, group=None):
    return tensor

# %% 3.2 told: lazy, dist.broadcast | your code calls torch.distributed.broadcast
def send_back(tensor, server=0, group=None):
    dist.broadcast(tensor, server, group=group)

# %% 3.2 wrong: the other way | the server has taken what the others sent: it sends, and they receive
def send_back(tensor, server=0, group=None):
    if dist.get_rank(group) != server:
        wire.send(tensor, server, group)
        return
    for peer in wire.others(server, group):
        wire.recv(tensor, peer, group)

# %% 3.2 wrong: lazy, handed on | the tensor is handed on from rank to rank: in this task the server sends it to each of the others
def send_back(tensor, server=0, group=None):
    rank, size, left, right = wire.neighbours(group)
    if rank != server:
        wire.recv(tensor, left, group)
    if (rank + 1) % size != server:
        wire.send(tensor, right, group)

# %% 3.3 right: divide at the end
def average(tensor, server=0, group=None):
    collect(tensor, server, group)
    send_back(tensor, server, group)
    tensor.div_(dist.get_world_size(group))

# %% 3.3 right: the server divides
def average(tensor, server=0, group=None):
    collect(tensor, server, group)
    if dist.get_rank(group) == server:
        tensor *= 1 / dist.get_world_size(group)
    send_back(tensor, server, group)

# %% 3.3 wrong: no division | you have the sum: is there a division by K?
#-     tensor /= dist.get_world_size(group)

# %% 3.3 wrong: divided twice | it was divided by K twice
#-     send_back(tensor, server, group)
#+     send_back(tensor, server, group)
#+     tensor /= dist.get_world_size(group)

# %% 3.3 wrong: only rank 0 divides at the end | you have the sum: is there a division by K?
def average(tensor, server=0, group=None):
    collect(tensor, server, group)
    send_back(tensor, server, group)
    if dist.get_rank(group) == 0:
        tensor /= dist.get_world_size(group)

# %% 3.3 wrong: K is 4 | it was divided by 4: K is the size of the group
#- dist.get_world_size(group)
#+ 4

# %% 3.3 wrong: world size of the job | it was divided by 4: K is the size of the group
#- dist.get_world_size(group)
#+ dist.get_world_size()

# %% 3.3 wrong: never sent back | the rank's own tensor was divided: has the sum come back from the server?
#-     send_back(tensor, server, group)

# %% 3.3 wrong: not in place | the tensors have not changed: the mean must end up in the tensor itself, in place
#-     tensor /= dist.get_world_size(group)
#+     tensor = tensor / dist.get_world_size(group)

# %% 3.3 told: without the group | is `group` passed on?
#-     collect(tensor, server, group)
#-     send_back(tensor, server, group)
#+     collect(tensor, server)
#+     send_back(tensor, server)

# %% 3.3 told: lazy, all_reduce | your code calls torch.distributed.all_reduce
def average(tensor, server=0, group=None):
    dist.all_reduce(tensor, group=group)
    tensor /= dist.get_world_size(group)

# %% 3.3 told: package's own | your code calls stage3_paramserver.average_on_server
def average(tensor, server=0, group=None):
    from ddp_course import average_on_server

    average_on_server([tensor], server, group)

# %% 3.3 wrong: divided by the others | it was divided by K-1: the server's own tensor counts too
#- dist.get_world_size(group)
#+ max(1, dist.get_world_size(group) - 1)

# %% 3.3 wrong: lazy, everyone to everyone | each rank sends to all others: only the server needs all tensors, and one answer goes back to each
def average(tensor, server=0, group=None):
    total = tensor.clone()
    for shift in range(1, dist.get_world_size(group)):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        incoming = torch.empty_like(tensor)
        wire.exchange(tensor, (rank + shift) % size, incoming, (rank - shift) % size, group)
        total += incoming
    tensor.copy_(total / dist.get_world_size(group))

# %% 3.3 wrong: whole numbers | `//` rounds down: divide by `/`
#- tensor /= dist.get_world_size(group)
#+ tensor /= 1
#-     send_back(tensor, server, group)
#+     tensor //= dist.get_world_size(group)
#+     send_back(tensor, server, group)

# %% 3.3 wrong: rank 0 is the server | rank 0 collects and sends back, but the server is another rank
#-     collect(tensor, server, group)
#-     send_back(tensor, server, group)
#+     collect(tensor, 0, group)
#+     send_back(tensor, 0, group)

# %% 3.4 right: as long as it helps
def ranks_that_pay(computing, parameters, bits_per_second, most):
    passing = 2 * 32 * parameters / bits_per_second
    ranks = 1
    while ranks < most and computing / ranks - computing / (ranks + 1) > passing:
        ranks += 1
    return ranks

# %% 3.4 right: a table
def ranks_that_pay(computing, parameters, bits_per_second, most):
    seconds = [computing / k + (k - 1) * 8 * parameters / (bits_per_second / 8) for k in range(1, most + 1)]
    return seconds.index(min(seconds)) + 1

# %% 3.4 wrong: bytes for bits | the link carries bits, and a byte has eight
#-  * 8 / bits
#+  / bits

# %% 3.4 wrong: numbers for bytes | a float32 has four bytes
#- parameters * 4 * 8
#+ parameters * 8

# %% 3.4 wrong: one way | that is one way only: the averages travel back
#- 2 * (ranks - 1)
#+ (ranks - 1)

# %% 3.4 wrong: computing is not shared | K ranks share the computing: each has a K-th of it
#- computing / ranks
#+ computing

# %% 3.4 wrong: the ring's time | that is the ring's time; the server's link carries everything
#- (ranks - 1) * parameters
#+ (ranks - 1) / ranks * parameters

# %% 3.4 wrong: lazy, always all | more ranks are not always better: each sends its gradient through the same link
#- min(range(1, most + 1), key=step)
#+ most

# %% 3.4 wrong: the root, cut off | the best number is mostly no whole one: of the two whole numbers beside the root, which takes less?
def ranks_that_pay(computing, parameters, bits_per_second, most):
    root = int((computing * bits_per_second / (64 * parameters)) ** 0.5)
    return max(1, min(root, most))

# %% 3.4 wrong: one fewer than there are | `most` ranks may all take part: range(1, most) ends before it
#- most + 1
#+ max(2, most)

# %% 3.4 wrong: more than there are | there are only `most` ranks
#- most + 1
#+ 1000

# %% 3.4 wrong: powers of two | the number of ranks need be no power of two
#- range(1, most + 1)
#+ [2**power for power in range(20) if 2**power <= most]

# %% 3.4 wrong: eight bytes | a float32 has four bytes
#- parameters * 4 * 8
#+ parameters * 8 * 8

# %% 3.4 told: lazy, the course's own formula | your code calls lab.measuring.theory.parameter_server
def ranks_that_pay(computing, parameters, bits_per_second, most):
    from ddp_course.lab.measuring import theory

    costs = theory.Costs(8 / bits_per_second, 0.0)
    return min(range(1, most + 1), key=lambda k: computing / k + theory.parameter_server(4 * parameters, k, costs))

# %% 3.4 wrong: lazy, the root, rounded | the best number is mostly no whole one: of the two whole numbers beside the root, which takes less?
def ranks_that_pay(computing, parameters, bits_per_second, most):
    root = round((computing * bits_per_second / (64 * parameters)) ** 0.5)
    return max(1, min(root, most))
