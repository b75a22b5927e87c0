# %% [markdown]
# Answers to exercise 2 as learners write them. docs/CONTRIBUTING.md says how to read this.

# %% 2.1 right: divmod
def scatter(tensor, devices):
    small, longer = divmod(len(tensor), len(devices))
    shards, start = [], 0
    for index, device in enumerate(devices):
        stop = start + small + (index < longer)
        if stop > start:
            shards.append(tensor[start:stop].to(device))
        start = stop
    return shards


# %% 2.1 right: split with sizes
def scatter(tensor, devices):
    count = min(len(devices), len(tensor))
    sizes = [len(range(index, len(tensor), count)) for index in range(count)]
    return tuple(shard.to(device) for shard, device in zip(torch.split(tensor, sizes), devices))


# %% 2.1 wrong: lazy, torch.chunk | sizes differ by one at most
#- tensor.tensor_split(len(devices))
#+ tensor.chunk(len(devices))
# %% 2.1 wrong: empty shards | a device without samples gets no shard
#-  if len(shard)
# %% 2.1 wrong: remainder lost | samples are lost
#- tensor.tensor_split(len(devices))
#+ tensor[: len(tensor) // len(devices) * len(devices)].tensor_split(len(devices))
# %% 2.1 wrong: lazy, everyone gets all | each device gets its own samples, not all of them
#- tensor.tensor_split(len(devices))
#+ [tensor for _ in devices]
# %% 2.1 wrong: every K-th sample | the samples are not in their order: device 0 gets the first ones
def scatter(tensor, devices):
    shards = [tensor[index :: len(devices)] for index in range(len(devices))]
    return [shard.to(device) for shard, device in zip(shards, devices) if len(shard)]


# %% 2.1 wrong: wrong dimension | a shard is cut along the wrong dimension: samples are dimension 0
#- tensor.tensor_split(len(devices))
#+ tensor.tensor_split(len(devices), dim=1)
# %% 2.1 wrong: two devices only | sizes differ by one at most
def scatter(tensor, devices):
    half = (len(tensor) + 1) // 2
    return [tensor[:half], tensor[half:]]


# %% 2.1 wrong: longer shards last | the longer shards come first
#-     return [shard
#+     shards = [tensor[len(tensor) * i // len(devices) : len(tensor) * (i + 1) // len(devices)] for i in range(len(devices))]
#+     return [shard
# %% 2.1 wrong: all on one device | each shard goes to its own device: .to(device)
#- [shard.to(device) for shard
#+ [shard for shard
# %% 2.1 told: lazy, package's own | your code calls stage2_dataparallel.scatter
def scatter(tensor, devices):
    from ddp_course.stage2_dataparallel import scatter as ready

    return ready(tensor, devices)


# %% 2.1 wrong: the last one takes the rest | the last device gets all that is left over: sizes differ by one at most
def scatter(tensor, devices):
    size = len(tensor) // len(devices)
    starts = [index * size for index in range(len(devices))]
    ends = [*starts[1:], len(tensor)]
    return [tensor[start:end].to(device) for start, end, device in zip(starts, ends, devices) if end > start]


# %% 2.1 told: a generator | it returned a generator
def scatter(tensor, devices):
    return (shard.to(device) for shard, device in zip(tensor.tensor_split(len(devices)), devices) if len(shard))


# %% 2.1 wrong: the last dimension | a shard is cut along the wrong dimension: samples are dimension 0
#- tensor.tensor_split(len(devices))
#+ tensor.tensor_split(len(devices), dim=-1)
#- if len(shard)
#+ if shard.numel()
# %% 2.1 wrong: longer shards last, by one each | the longer shards come first
def scatter(tensor, devices):
    size, longer = divmod(len(tensor), len(devices))
    sizes = [size + (index >= len(devices) - longer) for index in range(len(devices))]
    return [shard.to(device) for shard, device in zip(tensor.split(sizes), devices) if len(shard)]


# %% 2.1 wrong: all on the first device | shard i goes to devices[i]: all are on the first one
#- shard.to(device)
#+ shard.to(devices[0])
# %% 2.2 right: first copy, then add
def reduce(module, replicas):
    for index, parameter in enumerate(module.parameters()):
        parts = [list(replica.parameters())[index].grad for replica in replicas]
        parts = [part for part in parts if part is not None]
        parameter.grad = torch.stack(parts).sum(0) if parts else None


# %% 2.2 right: out of place
def reduce(module, replicas):
    for other in replicas[1:]:
        for mine, theirs in zip(module.parameters(), other.parameters()):
            if theirs.grad is not None:
                mine.grad = theirs.grad.clone() if mine.grad is None else mine.grad + theirs.grad


# %% 2.2 wrong: mean | it has the mean: the loss was taken over the whole batch, so the sum is right
#-             parameter.grad += copy.grad.to(parameter.device)
#+             parameter.grad += copy.grad
#+     for parameter in module.parameters():
#+         if parameter.grad is not None:
#+             parameter.grad /= len(replicas)
# %% 2.2 wrong: replaced | it has the last replica's gradient only: add, do not replace
#- parameter.grad += copy.grad
#+ parameter.grad = copy.grad.clone()
# %% 2.2 told: None not expected | AttributeError
#-             if copy.grad is None:
#-                 continue
# %% 2.2 wrong: master twice | it counts the master twice: replicas[0] is the module itself
#- replicas[1:]
#+ replicas
# %% 2.2 wrong: aliasing | the gradients of a replica have changed: did the master take over its tensor (aliasing)? Copy it
def reduce(module, replicas):
    for replica in replicas[1:]:
        for parameter, copy in zip(module.parameters(), replica.parameters()):
            if copy.grad is not None:
                parameter.grad = copy.grad if parameter.grad is None else copy.grad.add_(parameter.grad)


# %% 2.2 wrong: adds nothing | it has the master's own gradient only: nothing was added
#- parameter.grad += copy.grad
#+ parameter.grad + copy.grad
# %% 2.2 wrong: skips what the master lacks | it has no gradient where the master had none: a replica's counts all the same
#-                 parameter.grad = torch.zeros_like(parameter)
#+                 continue
# %% 2.2 wrong: first replica only | it has the sum of some replicas only: all of them count
#- replicas[1:]
#+ replicas[1:2]
# %% 2.2 wrong: lazy, takes over what the master lacks | the master takes over a replica's tensor: both would change together; copy it
#- parameter.grad = torch.zeros_like(parameter)
#+ parameter.grad = copy.grad
#+                 continue
# %% 2.2 told: lazy, package's own | your code calls stage2_dataparallel.reduce
def reduce(module, replicas):
    import ddp_course.stage2_dataparallel as stage2

    stage2.reduce(module, replicas)


# %% 2.2 wrong: zeros where no replica has a gradient | it has a gradient where no replica has one: there it stays None
#-             if copy.grad is None:
#-                 continue
#-             if parameter.grad is None:
#-                 parameter.grad = torch.zeros_like(parameter)
#-             parameter.grad += copy.grad.to(parameter.device)
#+             if parameter.grad is None:
#+                 parameter.grad = torch.zeros_like(parameter)
#+             if copy.grad is not None:
#+                 parameter.grad += copy.grad
# %% 2.2 wrong: without the master's own | the master's own gradient is lost: those of the others are added to it
#-     for replica in replicas[1:]:
#+     for parameter in module.parameters():
#+         if any(p.grad is not None for replica in replicas[1:] for p in replica.parameters() if p.shape == parameter.shape):
#+             parameter.grad = None
#+     for replica in replicas[1:]:
# %% 2.2 wrong: ends at the first None | after a parameter without a gradient the others are still to be added: continue, not break
#-                 continue
#+                 break
# %% 2.2 wrong: weights only | parameters in one row, such as biases, have gradients too
#- if copy.grad is None:
#+ if copy.grad is None or copy.dim() < 2:
# %% 2.3 right: one sum
def master_sends(parameter_bytes, input_bytes, output_bytes, devices):
    return (devices - 1) * (parameter_bytes + (input_bytes + output_bytes) / devices)


# %% 2.3 right: a loop
def master_sends(parameter_bytes, input_bytes, output_bytes, devices):
    total = 0
    for _ in range(1, devices):
        total += parameter_bytes + input_bytes // devices + output_bytes // devices
    return total


# %% 2.3 wrong: lazy, to itself too | the master is a device too: it sends to K-1 others
#-     shared = (devices - 1) / devices
#-     return (devices - 1) * parameter_bytes + shared * (input_bytes + output_bytes)
#+     return devices * parameter_bytes + input_bytes + output_bytes
# %% 2.3 wrong: no gradient of the outputs | where is the gradient of the outputs, which the backward pass scatters?
#- (input_bytes + output_bytes)
#+ input_bytes
# %% 2.3 wrong: model once | the whole model goes to each of the others, in every step
#- (devices - 1) * parameter_bytes
#+ parameter_bytes
# %% 2.3 wrong: whole batch | the master keeps its own shard: (K-1)/K of the batch travels
#- shared * (input
#+ (input
# %% 2.3 wrong: no batch | where is the batch?
#-  + shared * (input_bytes + output_bytes)
# %% 2.3 wrong: no model | where is the model, which is copied in every step?
#- (devices - 1) * parameter_bytes + shared
#+ shared
# %% 2.3 wrong: gradients too | gradients come back to the master: that is received, not sent
#- (devices - 1) * parameter_bytes
#+ 2 * (devices - 1) * parameter_bytes
# %% 2.3 wrong: model to itself too | the master is a device too: it sends to K-1 others
#- (devices - 1) * parameter_bytes
#+ devices * parameter_bytes
# %% 2.3 wrong: lazy, whole batch to each | each device gets its own shard only: a K-th of the inputs and of the outputs' gradient
#- shared * (input
#+ (devices - 1) * (input
# %% 2.3 wrong: one shard | that is the shard of one device: K-1 of them leave the master
#-     shared = (devices - 1) / devices
#+     shared = min(1, devices - 1) / devices
# %% 2.3 wrong: one shard, also where there is no other device | that is the shard of one device: K-1 of them leave the master
#-     shared = (devices - 1) / devices
#+     shared = 1 / devices
# %% 2.3 wrong: a share of the model | each device needs the whole model, not a K-th of it
#- (devices - 1) * parameter_bytes
#+ shared * parameter_bytes
# %% 2.3 wrong: whole outputs | the master keeps its own shard of the outputs' gradient: (K-1)/K of it travels
#- shared * (input_bytes + output_bytes)
#+ shared * input_bytes + output_bytes
# %% 2.3 wrong: whole inputs | the master keeps its own shard of the inputs: (K-1)/K of them travel
#- shared * (input_bytes + output_bytes)
#+ input_bytes + shared * output_bytes
