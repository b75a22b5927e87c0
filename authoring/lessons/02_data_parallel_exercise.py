# %% [markdown]
# # Exercise 2: one process, K devices
#
# The pieces of `DataParallel`: cut the batch, add up the gradients, and see what it costs the master.
#
# Stuck? `hint("2.1")` gives the first of three hints for a task, and
# `hint("2.1", 2)` the next.
# %% imports
import torch

from ddp_exercises import check, hint


# %% [markdown]
# ## 2.1 Scatter
#
# *5 minutes · easy*
#
# Sizes differ by one at most, the longer shards come first, and a device without samples gets no shard. The devices
# here are all called "cpu"; your code must not care.
# %% answer-2-1
def scatter(tensor, devices):
    """Cut `tensor` along dimension 0; return a list with one shard per device, each on its device."""
    ### BEGIN SOLUTION
    shards = tensor.tensor_split(len(devices))
    return [shard.to(device) for shard, device in zip(shards, devices) if len(shard)]
    ### END SOLUTION


# %% check-2-1 points=2
check("2.1", scatter)


# %% [markdown]
# ## 2.2 Reduce
#
# *10 minutes · medium*
#
# `replicas[0]` is `module` itself, the master's copy. Its gradients get those of all other replicas added. A replica
# may have no gradient for a parameter (`None`), and so may the master; where none has one, it stays `None`. Leave the
# replicas' own gradients as they are.
# %% answer-2-2
def reduce(module, replicas):
    """Add the gradients of all replicas to those of `module`, in place; the replicas keep theirs."""
    ### BEGIN SOLUTION
    for replica in replicas[1:]:
        for parameter, copy in zip(module.parameters(), replica.parameters()):
            if copy.grad is None:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad += copy.grad.to(parameter.device)
    ### END SOLUTION


# %% check-2-2 points=3
check("2.2", reduce)


# %% [markdown]
# ## 2.3 What leaves the master
#
# *10 minutes · medium*
#
# In each step the master (device 0) sends the model to the other devices, scatters the inputs, and in the backward
# pass scatters the gradient of the outputs, which is as large as the outputs. How many bytes is that?
# %% answer-2-3
def master_sends(parameter_bytes, input_bytes, output_bytes, devices):
    """Return the bytes that leave the master in one step, for sizes in bytes of model, whole inputs, whole outputs."""
    ### BEGIN SOLUTION
    shared = (devices - 1) / devices
    return (devices - 1) * parameter_bytes + shared * (input_bytes + output_bytes)
    ### END SOLUTION


# %% check-2-3 points=2
check("2.3", master_sends)
