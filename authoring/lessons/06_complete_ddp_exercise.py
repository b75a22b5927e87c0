# %% [markdown]
# # Exercise 6: everything a real one needs
#
# Small parts without which a DDP works only in lessons, two scripts to mend, the heart of it, a reducer, and at the end a watch
# over torch's own class.
#
# Stuck? `hint("6.1")` gives the first of three hints for a task, and
# `hint("6.1", 2)` the next.
# %% imports
import os
from itertools import combinations

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import ring_backend, wire
from ddp_exercises import check, hint


# %% [markdown]
# ## 6.1 Accumulate without sending
#
# *5 minutes · easy*
#
# `parallel` is our DDP. With several micro-batches only the last one needs to synchronise: inside
# `with parallel.no_sync():` nothing is sent, and gradients add up. Make one update for all micro-batches of all
# ranks. All micro-batches have the same size, memory has room for the activations of one of them, and the loss is the cross entropy.
# %% answer-6-1
def accumulate(parallel, optimizer, micro_batches):
    """Make one update on a list of (inputs, targets) of equal size, with one synchronisation."""
    ### BEGIN SOLUTION
    optimizer.zero_grad()
    with parallel.no_sync():
        for inputs, targets in micro_batches[:-1]:
            (cross_entropy(parallel(inputs), targets) / len(micro_batches)).backward()
    inputs, targets = micro_batches[-1]
    (cross_entropy(parallel(inputs), targets) / len(micro_batches)).backward()
    optimizer.step()
    ### END SOLUTION


# %% check-6-1 points=3
check("6.1", accumulate)


# %% [markdown]
# ## 6.2 Which parameters were used
#
# *5 minutes · easy*
#
# If a parameter was used on no rank, its gradient should stay as it was. `used` says for each parameter whether this
# rank used it (a tensor of bools). `all_reduce(tensor)` sums over the ranks, in place. Which ones were used anywhere?
# %% answer-6-2
def used_anywhere(used, all_reduce):
    """Return a new tensor of bools: whether each parameter was used on at least one rank. `used` stays as it is."""
    ### BEGIN SOLUTION
    counts = used.long()
    all_reduce(counts)
    return counts > 0
    ### END SOLUTION


# %% check-6-2 points=2
check("6.2", used_anywhere)


# %% [markdown]
# ## 6.3 Share the buffers
#
# *10 minutes · medium*
#
# A batch norm keeps running means in buffers, which no gradient keeps equal. Give every rank the buffers of rank
# `src`, whatever their dtype, in place. `wire.send(tensor, rank, group)` and `wire.recv(tensor, rank, group)` wait until they are done,
# and `wire.others(src, group)` lists the other ranks.
#
# `src` is a number within `group`, as `dist.get_rank(group)` is. The wire and `wire.others` name ranks by their numbers in the whole
# job; the source's is `wire.global_rank(src, group)`. In a group of ranks 1, 2 and 3 these numbers differ.
# %% answer-6-3
def share_buffers(module, src=0, group=None):
    """Give every rank the buffers of rank `src`, in place; parameters stay as they are."""
    ### BEGIN SOLUTION
    for buffer in module.buffers():
        if dist.get_rank(group) == src:
            for peer in wire.others(src, group):
                wire.send(buffer, peer, group)
        else:
            wire.recv(buffer, wire.global_rank(src, group), group)
    ### END SOLUTION


# %% check-6-3 points=2
check("6.3", share_buffers)


# %% [markdown]
# ## 6.4 A hook that compresses
#
# *5 minutes · easy*
#
# Send half the bytes: average a float32 gradient over the ranks, but let it travel in float16. Some gradients are as
# large as 60,000, and float16 ends at 65,504. Return the average in float32. `flat` itself may become the average, or else stays
# as it is.
# %% answer-6-4
def compressed_average(flat, all_reduce, world_size):
    """Return the mean of `flat` over the ranks in float32; `all_reduce(tensor)` sums a float16 tensor in place."""
    ### BEGIN SOLUTION
    compressed = (flat / world_size).half()
    all_reduce(compressed)
    return compressed.float()
    ### END SOLUTION


# %% check-6-4 points=2
check("6.4", compressed_average)


# %% [markdown]
# ## 6.5 The real script
#
# *15 minutes · medium*
#
# This training function runs on every rank. It raises no error, and its loss falls. It makes five of the lesson's six usual
# mistakes. (The sixth needs a stream: its samples come from a data set that has a length, so its workers share them out.)
# %% faulty-6-5
def faulty_main(folder, wrap, model, data, epochs):
    loader = DataLoader(data, batch_size=4, shuffle=True)
    parallel = wrap(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    for epoch in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        path = os.path.join(folder, "checkpoint.pt")
        torch.save({"epoch": epoch, "model": parallel.state_dict()}, path)


# %% [markdown]
# Mend them. `wrap(model)` is torch's `DistributedDataParallel`; the process group is there already. The checkpoint is for
# people who have no `wrap`, and one rank is enough to write it.
# %% answer-6-5
def main(folder, wrap, model, data, epochs):
    """Train on this rank's share of `data`; leave folder/checkpoint.pt with "epoch" and "model"."""
    ### BEGIN SOLUTION
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    parallel = wrap(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = cross_entropy(parallel(inputs), targets)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            path = os.path.join(folder, "checkpoint.pt")
            torch.save({"epoch": epoch, "model": model.state_dict()}, path)
    ### END SOLUTION


# %% check-6-5 points=5
check("6.5", main)


# %% [markdown]
# ## 6.6 From symptom to mistake
#
# *15 minutes · medium*
#
# None of these five mistakes raises an error, so you must know what to look at. After a run on K ranks these are known:
#
# | | |
# |---|---|
# | `samples[rank][epoch]` | which samples a rank saw, in their order |
# | `weights[rank]` | a sum over all weights at the end |
# | `saved[rank]` | names of the tensors that a rank wrote to its checkpoint; empty if it wrote none |
#
# Say which mistakes were made. A mistake of one rank is a mistake: that two ranks train on the same samples is enough, or that
# one rank has the same order in both epochs. The last samples of an epoch may be dealt twice, to fill up: this is not a mistake. If
# all ranks train on the same samples, and in the same order in all epochs, these are two mistakes.
# %% answer-6-6
def mistakes(samples, weights, saved):
    """Return a set of words: "sampler", "epoch", "wrapper", "writers", "names"; empty if all is well."""
    ### BEGIN SOLUTION
    words = set()
    first = [set(rank[0]) for rank in samples]
    if any(len(one & other) > len(samples) for one, other in combinations(first, 2)):
        words.add("sampler")
    if any(rank[0] == rank[1] for rank in samples):
        words.add("epoch")
    if any(other != weights[0] for other in weights):
        words.add("wrapper")
    if sum(1 for names in saved if names) > 1:
        words.add("writers")
    if any(name.startswith("module.") for names in saved for name in names):
        words.add("names")
    return words
    ### END SOLUTION


# %% check-6-6 points=2
check("6.6", mistakes)


# %% [markdown]
# ## 6.7 A reducer
#
# *30 minutes · hard*
#
# The lesson's core walks through the graph to find unused parameters. There is another way: wait until backward is over.
# A parameter that is not ready by then was not used. `start(tensor)` begins to sum a tensor over the ranks, in place,
# and returns a function that waits for the sum. Two rules: all ranks start the same sums in the same order, although their
# gradients become ready in different orders; and a bucket leaves in `ready` if it can.
#
# `finish` is called after each backward pass. Afterwards every gradient is the mean over all ranks, zeros from those that
# did not use the parameter; one that no rank used stays None. All gradients are None before the next pass begins.
# %% answer-6-7
class Reducer:
    """Average gradients over the ranks while backward runs: `buckets` are lists of parameters, and leave in order."""

    def __init__(self, buckets, start, world_size):
        self.buckets = buckets
        self.start = start
        self.world_size = world_size
        self.there = set()  # parameters that are ready
        self.sent = []  # buckets that have left
        self.everyone = [parameter for bucket in buckets for parameter in bucket]
        for parameter in self.everyone:
            parameter.register_post_accumulate_grad_hook(self.ready)

    def ready(self, parameter):
        """The gradient of `parameter` is there: let each bucket leave that is full, if it is its turn."""
        ### BEGIN SOLUTION
        self.there.add(parameter)
        for bucket in self.buckets[len(self.sent) :]:
            if not self.there.issuperset(bucket):
                break
            parts = []
            for member in bucket:
                parts.append(torch.zeros_like(member) if member.grad is None else member.grad)
            flat = torch.cat([part.flatten() for part in parts]) / self.world_size
            self.sent.append((bucket, flat, self.start(flat)))
        ### END SOLUTION

    def finish(self):
        """Backward is over: send what has not left, wait, and hand the means out; be ready for the next pass."""
        ### BEGIN SOLUTION
        users = torch.tensor([parameter in self.there for parameter in self.everyone]).long()
        for parameter in self.everyone:
            self.ready(parameter)
        self.start(users)()
        used = {parameter for parameter, count in zip(self.everyone, users, strict=True) if count}
        for bucket, flat, wait in self.sent:
            wait()
            parts = flat.split([parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = part.view_as(parameter) if parameter in used else None
        self.there = set()
        self.sent = []
        ### END SOLUTION


# %% check-6-7 points=5
check("6.7", Reducer)


# %% [markdown]
# ## 6.8 Mend a published script
#
# *15 minutes · medium*
#
# A blog post ("Unraveling CUDA DDP: How Distributed GPUs Collaborate to Accelerate Deep Learning") prints a script like this one as "a basic example of implementing DDP".
# torchrun starts it in four processes, two on each of two hosts with two devices each. Here `place(thing, number)` stands for `.to(number)`:
# it puts a model or a tensor onto this host's device of that number, and returns it. Keep loss, optimizer, learning rate and batch
# size as they are.
# %% faulty-6-8
def faulty_training(place, wrap, model, data, epochs):
    dist.init_process_group("gloo", init_method="tcp://localhost:10888", rank=0, world_size=1)
    place(model, 0)
    ddp_model = wrap(model)
    loss_fn = torch.nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05)
    for _ in range(epochs):
        for inputs, labels in DataLoader(data, batch_size=4):
            inputs = place(inputs, 0)
            labels = place(labels, 0)
            outputs = ddp_model(inputs)
            loss = loss_fn(outputs, labels)
            loss.backward()
            optimizer.step()


# %% [markdown]
# Every process says that it is rank 0 of 1, so four models are trained that never meet. Mend it. torchrun tells each process its place in
# environment variables: `RANK` of `WORLD_SIZE`, `LOCAL_RANK` on its host, and where all processes meet. `wrap(model)` is torch's
# `DistributedDataParallel`. The samples must be shared out, in another order in each epoch.
# %% answer-6-8
def mended_training(place, wrap, model, data, epochs):
    """Train `model` in place on this rank's share of `data`, in each of the processes that torchrun has started."""
    ### BEGIN SOLUTION
    dist.init_process_group("gloo")
    device = int(os.environ["LOCAL_RANK"])
    place(model, device)
    ddp_model = wrap(model)
    loss_fn = torch.nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05)
    sampler = DistributedSampler(data)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(data, batch_size=4, sampler=sampler):
            inputs = place(inputs, device)
            labels = place(labels, device)
            optimizer.zero_grad()
            outputs = ddp_model(inputs)
            loss = loss_fn(outputs, labels)
            loss.backward()
            optimizer.step()
    ### END SOLUTION


# %% check-6-8 points=4
check("6.8", mended_training)


# %% [markdown]
# ## 6.9 When do the replicas part?
#
# *15 minutes · medium*
#
# A fault in a ring raises no error in torch's DDP. It shows only if somebody compares the replicas. Train `model` with torch's own
# `DistributedDataParallel` over `all_reduce`, as in task 4.7: `ring_backend.register("tried", all_reduce=all_reduce)`, a group of that
# backend, and the group as `process_group`. The loss is the cross entropy, and the optimizer is SGD with the learning rate `lr`.
# After each step compare all weights of all ranks, to the last bit; `dist.all_gather_object` gets a thing from every rank. Guess first:
# does it find every ring that is wrong?
# %% answer-6-9
def first_difference(all_reduce, model, batches, lr):
    """Return after how many steps the replicas differ for the first time, on all ranks; None if they never do."""
    ### BEGIN SOLUTION
    ring_backend.register("tried", all_reduce=all_reduce)
    wrapped = DistributedDataParallel(model, process_group=dist.new_group(backend="tried"))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step, (inputs, targets) in enumerate(batches, 1):
        optimizer.zero_grad()
        cross_entropy(wrapped(inputs), targets).backward()
        optimizer.step()
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        replicas = [None] * dist.get_world_size()
        dist.all_gather_object(replicas, weights)
        if not all(torch.equal(replica, replicas[0]) for replica in replicas):
            return step
    return None
    ### END SOLUTION


# %% check-6-9 points=3
check("6.9", first_difference)


# %% [markdown]
# ## 6.10 Explain: accumulation in three bars
#
# *10 minutes · medium*
#
# Look at the figure of the section "Accumulation" in lesson 06: the bytes that a rank sends for four micro-batches, in three
# ways.
# Explain it in two to five sentences of your own, so that somebody who has not read the lesson understands it. Name numbers of the figure.
# Then read your text once more, and tick what it really says:
#
# | | the text says |
# |---|---|
# | A | why the second bar has a quarter of the first, with both numbers |
# | B | why the third has half of the second |
# | C | what none of the three ways makes shorter, or what the third one loses |
#
# The check looks at the form only. Your teacher reads the text, beside what to look for.
# %% answer-6-10
def explain_figure():
    """Return (your explanation, the letters that you tick, such as "AB")."""
    ### BEGIN SOLUTION
    text = (
        "Averaging every time runs four rings of 0.376 MiB each, while under no_sync gradients of "
        "micro-batches add up on the rank and only the last backward pass runs a ring, so 25 % of the "
        "bytes are left. In bfloat16 each number has two bytes instead of four, which leaves 12.5 %. "
        "Computing takes as long in all three, and sums in bfloat16 keep only eight significant bits."
    )
    return text, "ABC"
    ### END SOLUTION


# %% check-6-10 points=2
check("6.10", explain_figure)
