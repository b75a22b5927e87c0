# %% [markdown]
# # Exercise 1: one device
#
# The loop that everything else is built around. Run the check below each answer as often as you like: it draws new
# numbers every time, and says what is wrong.
#
# Stuck? `hint("1.1")` gives the first of three hints for a task, and
# `hint("1.1", 2)` the next.
# %% imports
import torch
from torch.nn.functional import cross_entropy

from ddp_exercises import check, hint


# %% [markdown]
# ## 1.1 A training step
#
# *5 minutes · easy*
#
# Forward, backward, update. Gradients add up until someone clears them.
# %% answer-1-1
def train_step(model, optimizer, inputs, targets):
    """Make one update on a batch; return its mean cross-entropy before the update, as a plain number."""
    ### BEGIN SOLUTION
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.item()
    ### END SOLUTION


# %% check-1-1 points=2
check("1.1", train_step)


# %% [markdown]
# ## 1.2 Accumulation
#
# *10 minutes · medium*
#
# A batch that does not fit into memory can be worked on in pieces. All micro-batches here have the same size, and memory has
# room for the activations of one of them at a time. The update must be the very one that the whole batch would give.
# %% answer-1-2
def accumulate(model, optimizer, micro_batches):
    """Make one update on a list of (inputs, targets) of equal size; return the mean loss of all samples."""
    ### BEGIN SOLUTION
    optimizer.zero_grad()
    total = 0.0
    for inputs, targets in micro_batches:
        loss = cross_entropy(model(inputs), targets) / len(micro_batches)
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total
    ### END SOLUTION


# %% check-1-2 points=2
check("1.2", accumulate)


# %% [markdown]
# ## 1.3 How much there is to send
#
# *5 minutes · easy*
#
# In all later lessons gradients travel. How many bytes are they? Not every parameter is trained, and not every
# parameter has 4 bytes per number.
# %% answer-1-3
def gradient_bytes(model):
    """Return how many bytes the gradients of all trainable parameters take together."""
    ### BEGIN SOLUTION
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    ### END SOLUTION


# %% check-1-3 points=2
check("1.3", gradient_bytes)
