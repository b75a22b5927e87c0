# %% [markdown]
# Answers to exercise 6 as learners write them. docs/CONTRIBUTING.md says how to read this.

# %% 6.1 right: nullcontext for the last
from contextlib import nullcontext


def accumulate(parallel, optimizer, micro_batches):
    optimizer.zero_grad(set_to_none=False)
    for index, (inputs, targets) in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        with nullcontext() if last else parallel.no_sync():
            loss = cross_entropy(parallel(inputs), targets)
            loss.div(len(micro_batches)).backward()
    optimizer.step()

# %% 6.1 right: the flag by hand
def accumulate(parallel, optimizer, micro_batches):
    for parameter in parallel.parameters():
        parameter.grad = None
    for batch in micro_batches[:-1]:
        with parallel.no_sync():
            (cross_entropy(parallel(batch[0]), batch[1]) * (1 / len(micro_batches))).backward()
    (cross_entropy(parallel(micro_batches[-1][0]), micro_batches[-1][1]) / len(micro_batches)).backward()
    optimizer.step()

# %% 6.1 wrong: without no_sync | one synchronisation was expected: all but the last belong inside no_sync, and no_sync must hold the forward pass too
#-     with parallel.no_sync():
#+     if True:

# %% 6.1 wrong: backward only | one synchronisation was expected: all but the last belong inside no_sync, and no_sync must hold the forward pass too
def accumulate(parallel, optimizer, micro_batches):
    optimizer.zero_grad()
    for index, (inputs, targets) in enumerate(micro_batches):
        loss = cross_entropy(parallel(inputs), targets) / len(micro_batches)
        if index < len(micro_batches) - 1:
            with parallel.no_sync():
                loss.backward()
        else:
            loss.backward()
    optimizer.step()

# %% 6.1 wrong: all in no_sync | the gradients were never synchronised: the last micro-batch belongs outside no_sync
#- micro_batches[:-1]:
#+ micro_batches:
#-     inputs, targets = micro_batches[-1]
#-     (cross_entropy(parallel(inputs), targets) / len(micro_batches)).backward()
#-     optimizer.step()
#+     optimizer.step()

# %% 6.1 wrong: no division | the gradients are too large: divide each loss by the number of micro-batches
def accumulate(parallel, optimizer, micro_batches):
    optimizer.zero_grad()
    with parallel.no_sync():
        for inputs, targets in micro_batches[:-1]:
            cross_entropy(parallel(inputs), targets).backward()
    inputs, targets = micro_batches[-1]
    cross_entropy(parallel(inputs), targets).backward()
    optimizer.step()

# %% 6.1 wrong: no step | the weights have not changed: is there a step()?
#-     optimizer.step()

# %% 6.1 wrong: not cleared | old gradients are still in it: zero_grad() belongs before the first micro-batch
#-     optimizer.zero_grad()

# %% 6.1 wrong: cleared before the last | only the last micro-batch counts: zero_grad() belongs before the first one
#-     inputs, targets = micro_batches[-1]
#+     optimizer.zero_grad()
#+     inputs, targets = micro_batches[-1]

# %% 6.1 told: past the wrapper | Call the wrapper, not its module
#-             (cross_entropy(parallel(inputs), targets) / len(micro_batches)).backward()
#-     inputs, targets = micro_batches[-1]
#-     (cross_entropy(parallel(inputs), targets) / len(micro_batches)).backward()
#+             (cross_entropy(parallel.module(inputs), targets) / len(micro_batches)).backward()
#+     inputs, targets = micro_batches[-1]
#+     (cross_entropy(parallel.module(inputs), targets) / len(micro_batches)).backward()

# %% 6.1 told: only rank 0 synchronises less | for ever
#-     with parallel.no_sync():
#+     from contextlib import nullcontext
#+
#+     with parallel.no_sync() if dist.get_rank() == 0 else nullcontext():

# %% 6.1 wrong: the first one synchronises | the first micro-batch is synchronised, and what comes after it stays on its rank: the last one is
#- micro_batches[:-1]:
#+ micro_batches[1:]:
#-     inputs, targets = micro_batches[-1]
#-     (cross_entropy(parallel(inputs), targets) / len(micro_batches)).backward()
#-     optimizer.step()
#+     optimizer.step()
#-     optimizer.zero_grad()
#+     optimizer.zero_grad()
#+     inputs, targets = micro_batches[0]
#+     (cross_entropy(parallel(inputs), targets) / len(micro_batches)).backward()

# %% 6.1 wrong: divided by K too | the gradients are divided by the number of ranks, too: the wrapper has done that
def accumulate(parallel, optimizer, micro_batches):
    parts = len(micro_batches) * dist.get_world_size()
    optimizer.zero_grad()
    with parallel.no_sync():
        for inputs, targets in micro_batches[:-1]:
            (cross_entropy(parallel(inputs), targets) / parts).backward()
    inputs, targets = micro_batches[-1]
    (cross_entropy(parallel(inputs), targets) / parts).backward()
    optimizer.step()

# %% 6.1 wrong: the last one is not divided | the loss of the last micro-batch is not divided like the others
#-     (cross_entropy(parallel(inputs), targets) / len(micro_batches)).backward()
#-     optimizer.step()
#+     cross_entropy(parallel(inputs), targets).backward()
#+     optimizer.step()

# %% 6.1 wrong: cleared in the loop | zero_grad() clears what earlier micro-batches have left: it belongs before the first one
#-             (cross_entropy(parallel(inputs), targets) / len(micro_batches)).backward()
#-     inputs, targets = micro_batches[-1]
#+             optimizer.zero_grad()
#+             (cross_entropy(parallel(inputs), targets) / len(micro_batches)).backward()
#+     inputs, targets = micro_batches[-1]

# %% 6.1 wrong: one is left out | the last micro-batch is left out
def accumulate(parallel, optimizer, micro_batches):
    optimizer.zero_grad()
    with parallel.no_sync():
        for inputs, targets in micro_batches[:-2]:
            (cross_entropy(parallel(inputs), targets) / len(micro_batches)).backward()
    inputs, targets = micro_batches[-2]
    (cross_entropy(parallel(inputs), targets) / len(micro_batches)).backward()
    optimizer.step()

# %% 6.1 told: lazy, one batch of all | there is room for the 6 of one micro-batch, so take one after the other
def accumulate(parallel, optimizer, micro_batches):
    optimizer.zero_grad()
    inputs = torch.cat([inputs for inputs, _ in micro_batches])
    targets = torch.cat([targets for _, targets in micro_batches])
    cross_entropy(parallel(inputs), targets).backward()
    optimizer.step()

# %% 6.1 told: lazy, one backward pass for all | graphs are kept at the same time, and memory has room for the activations of one micro-batch: go backward after each forward pass, which frees them
def accumulate(parallel, optimizer, micro_batches):
    optimizer.zero_grad()
    with parallel.no_sync():
        loss = sum(cross_entropy(parallel(inputs), targets) for inputs, targets in micro_batches[:-1])
    inputs, targets = micro_batches[-1]
    loss = loss + cross_entropy(parallel(inputs), targets)
    (loss / len(micro_batches)).backward()
    optimizer.step()

# %% 6.1 wrong: lazy, averaged by hand | the wrapper never synchronises: the backward pass of the last micro-batch, outside no_sync, averages all that has added up
def accumulate(parallel, optimizer, micro_batches):
    optimizer.zero_grad()
    with parallel.no_sync():
        for inputs, targets in micro_batches:
            (cross_entropy(parallel(inputs), targets) / len(micro_batches)).backward()
    for parameter in parallel.parameters():
        torch.distributed.all_reduce(parameter.grad, group=parallel.process_group)
        parameter.grad /= torch.distributed.get_world_size(parallel.process_group)
    optimizer.step()

# %% 6.1 wrong: lazy, divided by the samples | that is divided by the samples of a micro-batch: its loss is their mean already; divide by the number of micro-batches
def accumulate(parallel, optimizer, micro_batches):
    optimizer.zero_grad()
    with parallel.no_sync():
        for inputs, targets in micro_batches[:-1]:
            (cross_entropy(parallel(inputs), targets) / len(targets)).backward()
    inputs, targets = micro_batches[-1]
    (cross_entropy(parallel(inputs), targets) / len(targets)).backward()
    optimizer.step()

# %% 6.1 wrong: lazy, always four | there are not always four micro-batches: divide by len(micro_batches)
def accumulate(parallel, optimizer, micro_batches):
    optimizer.zero_grad()
    with parallel.no_sync():
        for inputs, targets in micro_batches[:-1]:
            (cross_entropy(parallel(inputs), targets) / 4).backward()
    inputs, targets = micro_batches[-1]
    (cross_entropy(parallel(inputs), targets) / 4).backward()
    optimizer.step()

# %% 6.1 told: no_sync without brackets | with parallel.no_sync():, with brackets
#- parallel.no_sync()
#+ parallel.no_sync

# %% 6.2 right: sum of floats
def used_anywhere(used, all_reduce):
    votes = torch.where(used, 1.0, 0.0)
    all_reduce(votes)
    return votes.ge(0.5)

# %% 6.2 right: unused everywhere, negated
def used_anywhere(used, all_reduce):
    unused = (~used).to(torch.int64)
    counts = torch.cat([unused, torch.ones(1, dtype=torch.int64)])
    all_reduce(counts)
    return counts[:-1] < counts[-1]

# %% 6.2 wrong: nobody asked | that is what this rank used: ask the others
#- return counts > 0
#+ return used.clone()

# %% 6.2 wrong: and instead of or | that is what all ranks used; one that used it is enough
def used_anywhere(used, all_reduce):
    unused = (~used).long()
    all_reduce(unused)
    return unused == 0

# %% 6.2 wrong: counts returned | a tensor of bools was expected, not of counts
#- return counts > 0
#+ return counts

# %% 6.2 wrong: more than one | parameters that exactly one rank used are missing: at least one
#- counts > 0
#+ counts > 1

# %% 6.2 wrong: negated | that is what was used nowhere
#- counts > 0
#+ counts == 0

# %% 6.2 wrong: bools summed | bools do not add up to a count; use int64
#- counts = used.long()
#+ counts = used.clone()

# %% 6.2 wrong: input changed | the input was changed (aliasing): work on a copy
#- return counts > 0
#+ return used.copy_(counts > 0).clone()

# %% 6.2 wrong: one message per parameter | one for all parameters is enough
#-     all_reduce(counts)
#+     for index in range(len(counts)):
#+         all_reduce(counts[index : index + 1])

# %% 6.2 told: packs them into one number | Overflow when unpacking
def used_anywhere(used, all_reduce):
    packed = torch.tensor([sum(int(one) * 5**index for index, one in enumerate(used))])
    all_reduce(packed)
    return torch.tensor([packed.item() // 5**index % 5 > 0 for index in range(len(used))])

# %% 6.2 wrong: exactly one | what several ranks used is missing: at least one
#- counts > 0
#+ counts == 1

# %% 6.2 told: lazy, torch's own all-reduce | your code calls torch.distributed.all_reduce
def used_anywhere(used, all_reduce):
    counts = used.long()
    torch.distributed.all_reduce(counts, torch.distributed.ReduceOp.MAX)
    return counts > 0

# %% 6.2 told: what all_reduce returns | what sums in place returns nothing
#-     all_reduce(counts)
#-     return counts > 0
#+     return all_reduce(counts) > 0

# %% 6.2 wrong: lazy, as if all were used | some parameters were used nowhere: only the ranks together know which
def used_anywhere(used, all_reduce):
    return torch.ones_like(used)

# %% 6.3 right: buffer by buffer, sent at once
def share_buffers(module, src=0, group=None):
    rank = dist.get_rank(group)
    for _name, buffer in module.named_buffers():
        if rank == src:
            transfers = [wire.isend(buffer, peer, group) for peer in wire.others(src, group)]
        else:
            transfers = [wire.irecv(buffer, wire.global_rank(src, group), group)]
        for transfer in transfers:
            transfer.wait()

# %% 6.3 right: receive and copy
def share_buffers(module, src=0, group=None):
    if dist.get_rank(group) == src:
        for peer in wire.others(src, group):
            for buffer in module.buffers():
                wire.send(buffer, peer, group)
        return
    for buffer in module.buffers():
        arrived = torch.empty_like(buffer)
        wire.recv(arrived, wire.global_rank(src, group), group)
        buffer.copy_(arrived)

# %% 6.3 wrong: floats only | it was not shared: all buffers count, of any dtype, and they change in place
#-         if dist.get_rank(group) == src:
#+         if not buffer.is_floating_point():
#+             continue
#+         if dist.get_rank(group) == src:

# %% 6.3 wrong: parameters too | the parameters have changed; only buffers are shared here
#-     for buffer in module.buffers():
#+     for buffer in [*module.buffers(), *(p.data for p in module.parameters())]:

# %% 6.3 told: rank 0 is the source | receives from itself
#- dist.get_rank(group) == src:
#+ dist.get_rank(group) == 0:

# %% 6.3 wrong: always from rank 0 | it is rank 0's; the source is another rank
#-     for buffer in module.buffers():
#+     src = 0
#+     for buffer in module.buffers():

# %% 6.3 wrong: not kept | it was not shared: all buffers count, of any dtype, and they change in place
#- wire.recv(buffer, wire.global_rank(src, group), group)
#+ wire.recv(torch.empty_like(buffer), wire.global_rank(src, group), group)

# %% 6.3 wrong: buffers replaced | buffers were replaced by new tensors; change them in place (copy_)
#-             wire.recv(buffer, wire.global_rank(src, group), group)
#+             arrived = torch.empty_like(buffer)
#+             wire.recv(arrived, wire.global_rank(src, group), group)
#+             for part in module.modules():
#+                 for name, old in list(part._buffers.items()):
#+                     if old is buffer:
#+                         setattr(part, name, arrived)

# %% 6.3 wrong: parameters instead | it was not shared: all buffers count, of any dtype, and they change in place
#- for buffer in module.buffers():
#+ for buffer in (p.data for p in module.parameters() if False):

# %% 6.3 told: lazy, dist.broadcast | your code calls torch.distributed.broadcast
#-             wire.recv(buffer, wire.global_rank(src, group), group)
#+             dist.broadcast(buffer, src, group=group)

# %% 6.3 told: package's own | your code calls stage3_paramserver.broadcast_parameters
def share_buffers(module, src=0, group=None):
    from ddp_course import broadcast_parameters

    broadcast_parameters(module, src, group)

# %% 6.3 wrong: all in one dtype | buffers are converted to be sent: each travels as it is, in its own dtype
def share_buffers(module, src=0, group=None):
    buffers = list(module.buffers())
    flat = torch.cat([buffer.float().reshape(-1) for buffer in buffers])
    if dist.get_rank(group) == src:
        for peer in wire.others(src, group):
            wire.send(flat, peer, group)
    else:
        wire.recv(flat, wire.global_rank(src, group), group)
    for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers])):
        buffer.copy_(part.view(buffer.shape))

# %% 6.3 wrong: parameters in place of buffers | the parameters were shared in place of the buffers
#- for buffer in module.buffers():
#+ for buffer in (parameter.data for parameter in module.parameters()):

# %% 6.3 wrong: the other way | the source has taken what the others sent: it sends, and they receive
#-             for peer in wire.others(src, group):
#-                 wire.send(buffer, peer, group)
#-         else:
#-             wire.recv(buffer, wire.global_rank(src, group), group)
#+             for peer in wire.others(src, group):
#+                 wire.recv(buffer, peer, group)
#+         else:
#+             wire.send(buffer, wire.global_rank(src, group), group)

# %% 6.3 wrong: in float64 | buffers are converted to be sent: each travels as it is, in its own dtype
#-         if dist.get_rank(group) == src:
#-             for peer in wire.others(src, group):
#-                 wire.send(buffer, peer, group)
#-         else:
#-             wire.recv(buffer, wire.global_rank(src, group), group)
#+         wide = buffer.double()
#+         if dist.get_rank(group) == src:
#+             for peer in wire.others(src, group):
#+                 wire.send(wide, peer, group)
#+         else:
#+             wire.recv(wide, wire.global_rank(src, group), group)
#+             buffer.copy_(wide)

# %% 6.3 wrong: averaged | that is a mean over the ranks: the source's buffers replace the others'
#-         if dist.get_rank(group) == src:
#-             for peer in wire.others(src, group):
#-                 wire.send(buffer, peer, group)
#-         else:
#-             wire.recv(buffer, wire.global_rank(src, group), group)
#+         if dist.get_rank(group) != src:
#+             wire.send(buffer, wire.global_rank(src, group), group)
#+             wire.recv(buffer, wire.global_rank(src, group), group)
#+             continue
#+         total = buffer.clone()
#+         for peer in wire.others(src, group):
#+             arrived = torch.empty_like(buffer)
#+             wire.recv(arrived, peer, group)
#+             total += arrived
#+         buffer.copy_(total / dist.get_world_size(group))
#+         for peer in wire.others(src, group):
#+             wire.send(buffer, peer, group)

# %% 6.3 told: lazy, the course's own | your code calls stage6_ddp.buffers.broadcast_tensors
def share_buffers(module, src=0, group=None):
    from ddp_course.stage6_ddp.buffers import broadcast_tensors

    broadcast_tensors(list(module.buffers()), src, group)

# %% 6.3 wrong: lazy, all pickled into one message | pickled objects travel, which are many times as long as the numbers: send the buffers themselves
import io


def share_buffers(module, src=0, group=None):
    file = io.BytesIO()
    torch.save(list(module.buffers()), file)
    message = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    if dist.get_rank(group) == src:
        for peer in wire.others(src, group):
            wire.send(message, peer, group)
        return
    wire.recv(message, wire.global_rank(src, group), group)
    for buffer, other in zip(module.buffers(), torch.load(io.BytesIO(bytes(message.tolist())))):
        buffer.copy_(other)

# %% 6.3 told: lazy, the rank without its group | `src` is a number within the group
#- dist.get_rank(group)
#+ dist.get_rank()

# %% 6.3 told: the source's number in the group for the wire | `src` is a number within the group
#- wire.global_rank(src, group)
#+ src

# %% 6.3 told: messages without the group | go by another group, of all ranks
#- wire.send(buffer, peer, group)
#+ wire.send(buffer, peer)
#- wire.recv(buffer, wire.global_rank(src, group), group)
#+ wire.recv(buffer, wire.global_rank(src, group))

# %% 6.3 wrong: lazy, what a checkpoint holds | a buffer that no checkpoint holds is missing: module.buffers() lists all, module.state_dict() those that are saved
#-     for buffer in module.buffers():
#+     saved = module.state_dict()
#+     for buffer in [one for name, one in module.named_buffers() if name in saved]:

# %% 6.4 right: divide in float16
def compressed_average(flat, all_reduce, world_size):
    small = flat.to(torch.float16)
    small.div_(world_size)
    all_reduce(small)
    return small.to(flat.dtype)

# %% 6.4 right: into the old tensor
def compressed_average(flat, all_reduce, world_size):
    half = flat.mul(1 / world_size).to(dtype=torch.half)
    all_reduce(half)
    flat.copy_(half)
    return flat

# %% 6.4 wrong: not compressed | the gradient travels in float32: nothing is saved
#- (flat / world_size).half()
#+ flat / world_size

# %% 6.4 wrong: no division | the sum overflows (float16 ends at 65,504): divide by K before you compress
#- (flat / world_size).half()
#+ flat.half()

# %% 6.4 wrong: divided afterwards | the sum overflows (float16 ends at 65,504): divide by K before you compress
#- (flat / world_size).half()
#+ flat.half()
#- compressed.float()
#+ compressed.float() / world_size

# %% 6.4 wrong: divided twice | it was divided by K twice
#- compressed.float()
#+ compressed.float() / world_size

# %% 6.4 wrong: result in float16 | the result is torch.float16; turn it back into float32
#- compressed.float()
#+ compressed

# %% 6.4 wrong: bfloat16 | bfloat16 has 8 bits of precision; float16 was asked for
#- .half()
#+ .bfloat16()

# %% 6.4 wrong: own gradient returned | that is the rank's own gradient, divided: the reduced tensor is the one to return
#- return compressed.float()
#+ return flat / world_size

# %% 6.4 wrong: not reduced | all_reduce was not called
#-     all_reduce(compressed)

# %% 6.4 told: returns nothing | is there a `return`?
#-     return compressed.float()
#+     flat.copy_(compressed)

# %% 6.4 wrong: divided twice, once in float16 | it was divided by K twice
#- (flat / world_size).half()
#+ flat.half() / world_size
#- compressed.float()
#+ compressed.float() / world_size

# %% 6.4 wrong: cut to what fits | large gradients are cut off: divide by K before you compress, and all of them fit
#- (flat / world_size).half()
#+ flat.clamp(-65504 / world_size, 65504 / world_size).half()
#- compressed.float()
#+ compressed.float() / world_size

# %% 6.4 wrong: by its own largest | each rank divides by its own largest number, so the sum mixes scales: divide by the same number on all
def compressed_average(flat, all_reduce, world_size):
    largest = flat.abs().max()
    compressed = (flat / largest / world_size).half()
    all_reduce(compressed)
    return compressed.float() * largest

# %% 6.4 wrong: K is 4 | it was divided by 4: K is world_size
#- flat / world_size
#+ flat / 4

# %% 6.4 wrong: lazy, rounded but sent in float32 | the gradient travels in float32: nothing is saved
def compressed_average(flat, all_reduce, world_size):
    mean = (flat / world_size).half().float()
    all_reduce(mean)
    return mean.half().float()

# %% 6.4 told: lazy, half of the gradient | numbers travel: hand over the whole gradient
#- all_reduce(compressed)
#+ all_reduce(compressed[: len(compressed) // 2])

# %% 6.4 wrong: in two pieces | one all_reduce, of the whole gradient, was expected
#- all_reduce(compressed)
#+ all_reduce(compressed[:20])
#+     all_reduce(compressed[20:])

# %% 6.4 told: lazy, divided in place | it holds neither the gradient nor the mean
#- compressed = (flat / world_size).half()
#+ flat /= world_size
#+     compressed = flat.half()

# %% 6.4 told: what all_reduce returns | what sums in place returns nothing
#-     all_reduce(compressed)
#-     return compressed.float()
#+     return all_reduce(compressed).float()

# %% 6.5 right: a share by hand
def main(folder, wrap, model, data, epochs):
    rank, size = dist.get_rank(), dist.get_world_size()
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(epochs):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).tolist()
        order += order[: -len(order) % size]
        mine = order[rank::size]
        for start in range(0, len(mine), 4):
            pairs = [data[i] for i in mine[start : start + 4]]
            optimizer.zero_grad()
            outputs = wrapped(torch.stack([one for one, _ in pairs]))
            cross_entropy(outputs, torch.stack([target for _, target in pairs])).backward()
            optimizer.step()
    if rank == 0:
        torch.save({"epoch": epochs - 1, "model": model.state_dict()}, f"{folder}/checkpoint.pt")

# %% 6.5 right: the wrapper's module is saved, in every epoch
def main(folder, wrap, model, data, epochs):
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    parallel = wrap(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05, momentum=0.5)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(parallel(inputs), targets).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save({"epoch": epoch, "model": parallel.module.state_dict()}, os.path.join(folder, "checkpoint.pt"))

# %% 6.5 wrong: no sampler | the ranks train on the same samples: each needs a share of its own
#- loader = DataLoader(data, batch_size=4, sampler=sampler)
#+ loader = DataLoader(data, batch_size=4, shuffle=True)

# %% 6.5 wrong: the epoch is not told | the sampler must shuffle, and be told the epoch
#- sampler.set_epoch(epoch)
#+ pass

# %% 6.5 wrong: past the wrapper | the ranks' weights differ at the end: gradients are averaged only for a loss that the wrapper computed
#- cross_entropy(parallel(inputs), targets)
#+ cross_entropy(model(inputs), targets)

# %% 6.5 wrong: all write | they would write over each other's file
#- if dist.get_rank() == 0:
#+ if True:

# %% 6.5 wrong: the wrapper is saved | "module.0.weight" and so on: these are the wrapper's names, not the model's
#- "model": model.state_dict()
#+ "model": parallel.state_dict()

# %% 6.5 wrong: no step | the weights have not changed: is there a backward pass and a step?
#- optimizer.step()
#+ pass

# %% 6.5 right: two workers
#- DataLoader(data, batch_size=4, sampler=sampler)
#+ DataLoader(data, batch_size=4, sampler=sampler, num_workers=2)

# %% 6.5 wrong: no epoch | nobody could go on from a checkpoint without an "epoch"
#- {"epoch": epoch, "model"
#+ {"model"

# %% 6.5 wrong: no samples | a rank saw no samples at all: take them from `data`
#- for inputs, targets in loader:
#+ for inputs, targets in []:

# %% 6.5 wrong: nobody writes | nobody wrote a checkpoint
#- if dist.get_rank() == 0:
#+ if dist.get_rank() < 0:

# %% 6.5 wrong: another file | the name is not 'checkpoint.pt'
#- "checkpoint.pt"
#+ "model.pt"

# %% 6.5 told: never cleared | is there a zero_grad()?
#- optimizer.zero_grad()
#+ pass

# %% 6.5 wrong: no shuffling | the sampler must shuffle, and be told the epoch
#- DistributedSampler(data)
#+ DistributedSampler(data, shuffle=False)

# %% 6.5 wrong: only the model's state | the checkpoint is a dict of two: "epoch", and the state of the model as "model"
#- torch.save({"epoch": epoch, "model": model.state_dict()},
#+ torch.save(model.state_dict(),

# %% 6.5 wrong: saved too early | these are not the weights after the last epoch: save when it is over
def main(folder, wrap, model, data, epochs):
    sampler = DistributedSampler(data)
    parallel = wrap(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        if dist.get_rank() == 0:
            torch.save({"epoch": epoch, "model": model.state_dict()}, os.path.join(folder, "checkpoint.pt"))
        for inputs, targets in DataLoader(data, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(parallel(inputs), targets).backward()
            optimizer.step()

# %% 6.5 wrong: an epoch is missing | there is an epoch too few: range(epochs) begins with 0
#- in range(epochs):
#+ in range(1, epochs):

# %% 6.5 told: shuffled twice | DistributedSampler shuffles by itself
#- DataLoader(data, batch_size=4, sampler=sampler)
#+ DataLoader(data, batch_size=4, sampler=sampler, shuffle=True)

# %% 6.5 told: lazy, averaged by hand | no forward pass goes through what `wrap` returned: it averages while backward runs, and by hand nothing is hidden
#- loss = cross_entropy(parallel(inputs), targets)
#+ loss = cross_entropy(model(inputs), targets)
#- optimizer.step()
#+ for parameter in model.parameters():
#+                 dist.all_reduce(parameter.grad)
#+                 parameter.grad /= dist.get_world_size()
#+             optimizer.step()

# %% 6.5 wrong: lazy, only rank 0 trains | only rank 0 trains, and the others take over its weights: each rank trains on its share
def main(folder, wrap, model, data, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if dist.get_rank() == 0:
        for epoch in range(epochs):
            for inputs, targets in DataLoader(data, batch_size=4, shuffle=True):
                optimizer.zero_grad()
                cross_entropy(model(inputs), targets).backward()
                optimizer.step()
        torch.save({"epoch": epoch, "model": model.state_dict()}, os.path.join(folder, "checkpoint.pt"))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)

# %% 6.6 right: how often each sample is seen
from collections import Counter


def mistakes(samples, weights, saved):
    words = []
    seen = Counter(sample for rank in samples for sample in rank[0])
    if sum(count - 1 for count in seen.values()) >= len(samples):
        words.append("sampler")
    if not all(rank[0] != rank[1] for rank in samples):
        words.append("epoch")
    if max(weights) > min(weights):
        words.append("wrapper")
    writers = [names for names in saved if names]
    if len(writers) > 1:
        words.append("writers")
    if all(name[:7] == "module." for name in writers[-1]):
        words.append("names")
    return words

# %% 6.6 right: a dict of conditions
def mistakes(samples, weights, saved):
    shares = [set(first) for first, _ in samples]
    told = {
        "sampler": any(len(a & b) > len(a) / 2 for i, a in enumerate(shares) for b in shares[:i]),
        "epoch": any(first == second for first, second in samples),
        "wrapper": len(set(weights)) > 1,
        "writers": len([names for names in saved if names]) > 1,
        "names": max(saved)[0].startswith("module."),
    }
    return {word for word, true in told.items() if true}

# %% 6.6 wrong: lazy, any sample twice | the ranks' samples differ, but for one or two that fill up the last round
#- len(one & other) > len(samples)
#+ one & other

# %% 6.6 wrong: lazy, rank 0 with the others | two ranks that see the same samples are enough, whichever they are: compare each rank with every other one
#- for one, other in combinations(first, 2)):
#+ for one, other in zip(first[:1] * len(first), first[1:])):

# %% 6.6 wrong: lazy, the first two ranks only | two ranks that see the same samples are enough, whichever they are: compare each rank with every other one
#- for one, other in combinations(first, 2)):
#+ for one, other in [first[:2]]):

# %% 6.6 wrong: neighbours only | two ranks that see the same samples are enough, whichever they are: compare each rank with every other one
#- combinations(first, 2)):
#+ zip(first, first[1:])):

# %% 6.6 wrong: the first and the last rank's samples | two ranks that see the same samples are enough, whichever they are: compare each rank with every other one
#- combinations(first, 2)):
#+ [(first[0], first[-1])]):

# %% 6.6 wrong: lazy, all ranks have the same samples | two ranks that see the same samples are enough, whichever they are: compare each rank with every other one
#- any(len(one & other) > len(samples) for one, other in combinations(first, 2)):
#+ all(len(one & other) > len(samples) for one, other in combinations(first, 2)):

# %% 6.6 wrong: lazy, epochs of rank 0 only | one rank that repeats its order is enough, and it need not be rank 0: look at each
#- any(rank[0] == rank[1] for rank in samples):
#+ samples[0][0] == samples[0][1]:

# %% 6.6 wrong: all ranks repeat their order | one rank that repeats its order is enough, and it need not be rank 0: look at each
#- any(rank[0] == rank[1] for rank in samples):
#+ all(rank[0] == rank[1] for rank in samples):

# %% 6.6 wrong: the weights of ranks 0 and 1 | the weights of one rank are enough, and it need not be rank 1: compare all of them
#- any(other != weights[0] for other in weights):
#+ weights[0] != weights[1]:

# %% 6.6 wrong: forgets the epoch | "epoch" is missing: the first and the second epoch have the same order
#- rank[0] == rank[1]
#+ False

# %% 6.6 wrong: epochs as sets | the two epochs have different orders
#- rank[0] == rank[1]
#+ set(rank[0]) == set(rank[1])

# %% 6.6 wrong: module anywhere | no name begins with "module."; it may stand inside of one
#- name.startswith("module.")
#+ "module." in name

# %% 6.6 wrong: any writer | only one rank wrote
#- if names) > 1:
#+ if names) > 0:

# %% 6.6 wrong: all writers | two ranks that wrote are enough, and the others need not have: count those that did
#- sum(1 for names in saved if names) > 1:
#+ all(saved):

# %% 6.6 wrong: the weights are not compared | "wrapper" is missing: the weights differ from rank to rank
#- other != weights[0]
#+ other != other

# %% 6.6 told: one word | a set of words was expected, not str
#- return words
#+ return "sampler"

# %% 6.6 told: other words | ['weights'] is none of sampler, epoch, wrapper, writers, names
#- words.add("wrapper")
#+ words.add("weights")

# %% 6.6 wrong: as if rank 0 wrote | any rank may have written the checkpoint, not only rank 0: look at the names of all
#- any(name.startswith("module.") for names in saved for name in names):
#+ saved[0] and saved[0][0].startswith("module."):

# %% 6.6 wrong: the same order, too | ranks that see the same samples may see them in another order: compare sets
#- if any(len(one & other) > len(samples) for one, other in combinations(first, 2)):
#+ if any(one[0] == other[0] for one, other in combinations(samples, 2)):

# %% 6.6 told: the first and the last rank only | the weights differ from rank to rank
#- any(other != weights[0] for other in weights):
#+ weights[0] != weights[-1]:

# %% 6.7 right: divides at the end, the bitmap first
class Reducer:
    def __init__(self, buckets, start, world_size):
        self.buckets, self.start, self.world_size = buckets, start, world_size
        self.begin()
        for bucket in buckets:
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(self.ready)

    def begin(self):
        self.missing, self.waiting, self.flats = [set(bucket) for bucket in self.buckets], [], []

    def ready(self, parameter):
        for missing in self.missing:
            missing.discard(parameter)
        while len(self.flats) < len(self.buckets) and not self.missing[len(self.flats)]:
            self.leave()

    def leave(self):
        bucket = self.buckets[len(self.flats)]
        self.flats.append(torch.cat([(p * 0 if p.grad is None else p.grad).detach().reshape(-1) for p in bucket]))
        self.waiting.append(self.start(self.flats[-1]))

    def finish(self):
        votes = torch.tensor([0.0 if p in missing else 1.0 for b, missing in zip(self.buckets, self.missing) for p in b])
        while len(self.flats) < len(self.buckets):
            self.leave()
        self.start(votes)()
        for wait in self.waiting:
            wait()
        votes = votes.tolist()
        for bucket, flat in zip(self.buckets, self.flats):
            for parameter, part in zip(bucket, (flat / self.world_size).split([p.numel() for p in bucket])):
                if votes.pop(0) > 0:
                    parameter.grad = part.reshape(parameter.shape).clone()
        self.begin()

# %% 6.7 right: who has a gradient was used
#-         users = torch.tensor([parameter in self.there for parameter in self.everyone]).long()
#+         users = torch.tensor([parameter.grad is not None for parameter in self.everyone]).int()

# %% 6.7 wrong: as soon as full | all ranks must start the same bucket: one that is full waits for its turn
#-         for bucket in self.buckets[len(self.sent) :]:
#-             if not self.there.issuperset(bucket):
#-                 break
#+         left = [id(bucket) for bucket, _, _ in self.sent]
#+         for bucket in [one for one in self.buckets if id(one) not in left and self.there.issuperset(one)]:
#-         for bucket, flat, wait in self.sent:
#+         for bucket, flat, wait in sorted(self.sent, key=lambda sent: [sent[0] is one for one in self.buckets], reverse=True):

# %% 6.7 wrong: lazy, all at the end | nothing is hidden behind backward: a bucket leaves in ready() if it can
#- parameter.register_post_accumulate_grad_hook(self.ready)
#+ parameter.register_post_accumulate_grad_hook(lambda one: self.there.add(one))

# %% 6.7 wrong: waits in ready | wait in finish(): a wait in ready() holds backward up
#-             self.sent.append((bucket, flat, self.start(flat)))
#+             self.start(flat)()
#+             self.sent.append((bucket, flat, lambda: None))

# %% 6.7 wrong: no division | you have the sum: is there a division by K?
#- / self.world_size

# %% 6.7 wrong: no bitmap | a gradient that no rank used stays None: the ranks must ask each other who used it
#-         self.start(users)()
#-         used = {parameter for parameter, count in zip(self.everyone, users, strict=True) if count}
#+         used = set(self.everyone)

# %% 6.7 wrong: own use only | a rank that did not use it gets the mean too: ask the others
#-         self.start(users)()

# %% 6.7 wrong: does not wait | wait for each sum before you hand it out
#-             wait()

# %% 6.7 wrong: not ready for the next pass | forget at the end of a pass what was ready and what has left
#-                 parameter.grad = part.view_as(parameter) if parameter in used else None
#-         self.there = set()
#-         self.sent = []
#+                 parameter.grad = part.view_as(parameter) if parameter in used else None

# %% 6.7 told: unused never leave | do all ranks start the same sums, also of buckets that were not used there
#-         for parameter in self.everyone:
#-             self.ready(parameter)

# %% 6.7 right: who used what travels with each bucket
class Reducer:
    def __init__(self, buckets, start, world_size):
        self.buckets, self.start, self.world_size = buckets, start, world_size
        self.there, self.sent = set(), []
        for bucket in buckets:
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(self.ready)

    def leave(self):
        bucket = self.buckets[len(self.sent)]
        uses = torch.tensor([float(parameter in self.there) for parameter in bucket])
        parts = [(p.grad if p in self.there else torch.zeros_like(p)).flatten() for p in bucket]
        flat = torch.cat([*parts, uses])
        self.sent.append((flat, self.start(flat)))

    def ready(self, parameter):
        self.there.add(parameter)
        while len(self.sent) < len(self.buckets) and self.there.issuperset(self.buckets[len(self.sent)]):
            self.leave()

    def finish(self):
        while len(self.sent) < len(self.buckets):
            self.leave()
        for bucket, (flat, wait) in zip(self.buckets, self.sent):
            wait()
            *parts, uses = (flat / self.world_size).split([*(p.numel() for p in bucket), len(bucket)])
            for parameter, part, used in zip(bucket, parts, uses):
                parameter.grad = part.view_as(parameter).clone() if used > 0 else None
        self.there, self.sent = set(), []

# %% 6.7 wrong: nothing begins anew | forget at the end of a pass what was ready and what has left
#-             flat = torch.cat([part.flatten() for part in parts]) / self.world_size
#+             flat = torch.cat([part.flatten() for part in parts])
#-             wait()
#+             wait()
#+             flat /= self.world_size
#-                 parameter.grad = part.view_as(parameter) if parameter in used else None
#-         self.there = set()
#-         self.sent = []
#+                 if parameter in used:
#+                     parameter.grad = part.view_as(parameter).clone()

# %% 6.7 wrong: one bucket at a time | one gradient may let several buckets leave: those that were full before their turn, too
#-             self.sent.append((bucket, flat, self.start(flat)))
#+             self.sent.append((bucket, flat, self.start(flat)))
#+             break
#-         for parameter in self.everyone:
#-             self.ready(parameter)
#+         while len(self.sent) < len(self.buckets):
#+             for parameter in self.everyone:
#+                 self.ready(parameter)

# %% 6.7 wrong: divided by the users | the mean is over all ranks, with zeros from those that did not use it: divide by world_size
#-             flat = torch.cat([part.flatten() for part in parts]) / self.world_size
#+             flat = torch.cat([part.flatten() for part in parts])
#-                 parameter.grad = part.view_as(parameter) if parameter in used else None
#+                 count = users[[parameter is one for one in self.everyone].index(True)]
#+                 parameter.grad = part.view_as(parameter) / count if parameter in used else None

# %% 6.7 wrong: asks before all have left | the ranks start sums in different orders: a bucket that leaves in finish here may have left in ready there, so ask who used what when all have left
#-         for parameter in self.everyone:
#-             self.ready(parameter)
#-         self.start(users)()
#+         self.start(users)()
#+         for parameter in self.everyone:
#+             self.ready(parameter)

# %% 6.7 wrong: zeros are taken for unused | a gradient of zeros is a gradient: only one that no rank used stays None
#- if parameter in used else None
#+ if part.any() else None

# %% 6.7 wrong: lazy, all when the last one is there | the buckets wait for the last gradient, so nothing is hidden behind backward: each leaves when it is full and has its turn
#-             if not self.there.issuperset(bucket):
#+             if len(self.there) < len(self.everyone):

# %% 6.7 wrong: lazy, K is 3 | K is not always 3: divide by `world_size`
#- / self.world_size
#+ / 3


# %% 6.7 told: dots | not solved yet (ready has nothing but ... in it)
class Reducer:
    def __init__(self, buckets, start, world_size):
        self.buckets, self.start, self.world_size = buckets, start, world_size

    def ready(self, parameter):
        """The gradient of `parameter` is there."""
        ...

    def finish(self):
        ...

# %% 6.7 told: looked up in a list of tensors | `is` or a set whether it is this very tensor
#-         for bucket in self.buckets[len(self.sent) :]:
#-             if not self.there.issuperset(bucket):
#+         for bucket in self.buckets[len(self.sent) :]:
#+             if parameter not in bucket[::-1] or not self.there.issuperset(bucket):

# %% 6.7 told: what a wait returns | what sums in place returns nothing
#-             wait()
#-             parts = flat.split(
#+             parts = wait().split(

# %% 6.8 right: the place said in full, and a share by hand
#-     dist.init_process_group("gloo")
#+     dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
#-     sampler = DistributedSampler(data)
#+     sampler = DistributedSampler(data, seed=7, drop_last=False)
# %% 6.8 right: cleared after the step, and left at the end
#-             optimizer.zero_grad()
#-             outputs
#+             outputs
#-             optimizer.step()
#+             optimizer.step()
#+             ddp_model.zero_grad()
#+     dist.destroy_process_group()
# %% 6.8 wrong: lazy, as it was published | each process says where it meets the others by itself: on another host, localhost is another machine
#-     dist.init_process_group("gloo")
#+     dist.init_process_group("gloo", init_method="tcp://localhost:10888", rank=0, world_size=1)
# %% 6.8 wrong: a meeting place of its own | localhost is another machine on each host: leave init_method out, and torchrun's place is taken
#-     dist.init_process_group("gloo")
#+     dist.init_process_group("gloo", init_method="tcp://localhost:10888", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
# %% 6.8 wrong: rank 0 for all | every process says that it is rank 0: torchrun has told each its RANK
#-     dist.init_process_group("gloo")
#+     dist.init_process_group("gloo", rank=0, world_size=4)
# %% 6.8 wrong: alone | every process says that it is alone in the world: torchrun has told each the WORLD_SIZE
#-     dist.init_process_group("gloo")
#+     dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=1)
# %% 6.8 wrong: device 0 | the ranks of a host share device 0, and the others stand idle: LOCAL_RANK says which one is this rank's
#- int(os.environ["LOCAL_RANK"])
#+ 0
# %% 6.8 wrong: the rank as device | the second host has no device 2 and 3: LOCAL_RANK counts from 0 on each host
#- int(os.environ["LOCAL_RANK"])
#+ int(os.environ["RANK"])
# %% 6.8 wrong: no sampler | the ranks train on the same samples: each needs a share of its own
#- DataLoader(data, batch_size=4, sampler=sampler)
#+ DataLoader(data, batch_size=4, shuffle=True)
# %% 6.8 wrong: the epoch is not told | the sampler must be told the epoch
#-         sampler.set_epoch(epoch)
#+         pass
# %% 6.8 wrong: past the wrapper | gradients are averaged only for a loss that the wrapper computed
#- outputs = ddp_model(inputs)
#+ outputs = model(inputs)
# %% 6.8 wrong: the model stays behind | the model is on no device: place it, too
#-     place(model, device)
#+     pass
# %% 6.8 told: never cleared | is there a zero_grad()?
#-             optimizer.zero_grad()
#+             pass
# %% 6.8 told: lazy, no group | no process group was made
#-     dist.init_process_group("gloo")
#+     pass
# %% 6.8 told: shuffled twice | DistributedSampler shuffles by itself
#- DataLoader(data, batch_size=4, sampler=sampler)
#+ DataLoader(data, batch_size=4, sampler=sampler, shuffle=True)
# %% 6.8 told: lazy, what place returns is lost | keep what `place` returns
#-             inputs = place(inputs, device)
#-             labels = place(labels, device)
#+             place(inputs, device)
#+             place(labels, device)
# %% 6.8 told: the labels stay behind | keep what `place` returns
#-             labels = place(labels, device)
#+             place(labels, device)
# %% 6.8 told: nothing but the model is placed | keep what `place` returns
#-             inputs = place(inputs, device)
#-             labels = place(labels, device)
#+             pass
# %% 6.8 told: another loss | another one than that of the script's MSELoss and plain SGD
#- torch.nn.MSELoss()
#+ torch.nn.L1Loss()
# %% 6.8 told: the loss as a sum | the script's learning rate is 0.05, and its loss is a mean
#- torch.nn.MSELoss()
#+ torch.nn.MSELoss(reduction="sum")
# %% 6.8 told: another learning rate | the update is 4 times as large as it should be: the script's learning rate is 0.05
#- lr=0.05
#+ lr=0.2
# %% 6.8 told: momentum | another one than that of the script's MSELoss and plain SGD
#- lr=0.05
#+ lr=0.05, momentum=0.9
# %% 6.8 wrong: another batch size | each rank takes 4 samples a step, as in the script
#- batch_size=4
#+ batch_size=16
# %% 6.8 right: a batch in one line
#-             inputs = place(inputs, device)
#-             labels = place(labels, device)
#+             inputs, labels = [place(tensor, device) for tensor in (inputs, labels)]
# %% 6.8 right: placed where it is used
#-             inputs = place(inputs, device)
#-             labels = place(labels, device)
#-             optimizer.zero_grad()
#-             outputs = ddp_model(inputs)
#-             loss = loss_fn(outputs, labels)
#+             optimizer.zero_grad()
#+             loss = torch.nn.functional.mse_loss(ddp_model(place(inputs, device)), place(labels, device))
# %% 6.9 right: compared with rank 0 alone
#-         replicas = [None] * dist.get_world_size()
#-         dist.all_gather_object(replicas, weights)
#-         if not all(torch.equal(replica, replicas[0]) for replica in replicas):
#-             return step
#+         first = weights.clone()
#+         dist.broadcast(first, 0)
#+         differ = torch.tensor([float(not torch.equal(first, weights))])
#+         dist.all_reduce(differ)
#+         if differ:
#+             return step
# %% 6.9 right: to the end
#-         if not all(torch.equal(replica, replicas[0]) for replica in replicas):
#-             return step
#-     return None
#+         if not all(torch.equal(replica, replicas[0]) for replica in replicas):
#+             found.append(step)
#+     return found[0] if found else None
#-     optimizer = torch.optim.SGD(model.parameters(), lr=lr)
#+     optimizer = torch.optim.SGD(model.parameters(), lr=lr)
#+     found = []
# %% 6.9 told: each rank decides alone | rank 0 waits for ranks [0, 1, 2, 3] in broadcast from rank 0 (line
#- not all(torch.equal(replica, replicas[0]) for replica in replicas):
#+ not torch.equal(weights, replicas[0]):
# %% 6.9 wrong: to some digits | they differ in their last bits: compare with torch.equal
#- torch.equal(replica, replicas[0])
#+ torch.allclose(replica, replicas[0], atol=1e-8)
# %% 6.9 wrong: lazy, at the end only | it compares at the end alone: compare after each step
#-         weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
#+         if step < len(batches):
#+             continue
#+         weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
# %% 6.9 wrong: lazy, losses are compared | losses differ from rank to rank because their samples do: compare weights
#-         cross_entropy(wrapped(inputs), targets).backward()
#+         loss = cross_entropy(wrapped(inputs), targets)
#+         loss.backward()
#-         weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
#+         weights = loss.detach()
# %% 6.9 wrong: counts from 0 | steps are counted from 1: after how many of them
#- enumerate(batches, 1)
#+ enumerate(batches)
# %% 6.9 wrong: lazy, they never differ | these replicas do differ: get the weights of all ranks, and compare them
#-             return step
#+             pass
# %% 6.9 wrong: two neighbours only | ranks 0 and 1 alone are compared: the fault may be on another rank
#- for replica in replicas):
#+ for replica in replicas[:2]):
# %% 6.9 wrong: lazy, the first parameter only | one parameter alone is compared: the fault may be in another one
#- torch.nn.utils.parameters_to_vector(model.parameters()).detach()
#+ next(model.parameters()).detach()
# %% 6.9 wrong: the last parameter only | one parameter alone is compared: the fault may be in another one
#- torch.nn.utils.parameters_to_vector(model.parameters()).detach()
#+ list(model.parameters())[-1].detach()
# %% 6.9 wrong: lazy, gradients are compared | gradients may differ, and the replicas stay equal: compare the weights
#- torch.nn.utils.parameters_to_vector(model.parameters()).detach()
#+ torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
# %% 6.9 told: the group before its backend | ring_backend.register(...) comes before dist.new_group(backend=...)
#-     ring_backend.register("tried", all_reduce=all_reduce)
#-     wrapped = DistributedDataParallel(model, process_group=dist.new_group(backend="tried"))
#+     group = dist.new_group(backend="tried")
#+     ring_backend.register("tried", all_reduce=all_reduce)
#+     wrapped = DistributedDataParallel(model, process_group=group)
# %% 6.9 told: lazy, torch's own group | torch's class adds up by other means
#- dist.new_group(backend="tried")
#+ None
# %% 6.9 told: by hand | torch's own DistributedDataParallel was never called
#- cross_entropy(wrapped(inputs), targets).backward()
#+ cross_entropy(model(inputs), targets).backward()


# %% 6.10 right: one of the points
def explain_figure():
    return 'Averaging every time runs four rings of 0.38 MiB each, while under no_sync gradients of micro-batches add up on the rank and only the last backward pass runs a ring, so 25 % of the bytes are left.', "A"


# %% 6.10 right: a list of letters
#- "ABC"
#+ ["A", "B", "C"]
# %% 6.10 told: lazy, a few words | at least twelve different words
#- return text, "ABC"
#+ return "It is 20 % faster so.", "A"
# %% 6.10 told: lazy, one word many times | at least twelve different words
#- return text, "ABC"
#+ return "because " * 20 + "4", "A"
# %% 6.10 told: lazy, all is ticked | 3 points in 31 different words
def explain_figure():
    return 'Averaging every time runs four rings of 0.38 MiB each, while under no_sync gradients of micro-batches add up on the rank and only the last backward pass runs a ring, so 25 % of the bytes are left.', "ABC"


# %% 6.10 told: no number | name a number of the figure
#- return text, "ABC"
#+ return "".join(sign for sign in text if not sign.isdigit()), "ABC"
# %% 6.10 told: no letters | a pair was expected
#- return text, "ABC"
#+ return text
# %% 6.10 told: nothing ticked | tick at least one letter
#- return text, "ABC"
#+ return text, ""
# %% 6.10 told: another letter | 'X' is none of A, B and C
#- return text, "ABC"
#+ return text, "AX"

# %% 6.10 right: small letters, with commas
#- "ABC"
#+ "a, b, c"

# %% 6.10 told: lazy, numbers and letters for words | at least twelve different words
#- return text, "ABC"
#+ return "1 2 3 4 5 6 7 8 9 10 11 12 A B C D E F G H I J K L", "A"

# %% 6.10 told: numbers in words | in digits, such as 25 %
#- return text, "ABC"
#+ return "The second bar is a quarter of the first, since only one of the four rings runs.", "A"

# %% 6.10 told: only the number of a name | in digits, such as 25 %
#- return text, "ABC"
#+ return "The last bar is the shortest, because every number travels in bfloat16 and has half of the bytes.", "C"
