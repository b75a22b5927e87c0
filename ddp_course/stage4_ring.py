"""Stage 4: no server; every rank talks only to its two neighbours, and all links are busy.

The whole-gradient ring passes complete gradients around, K-1 times: T = (K-1) p/b. The chunked ring
cuts the gradient into K chunks and passes one chunk a step, 2(K-1) times: T = 2(K-1)/K p/b, nearly
independent of K.

    chunk sent by rank r    step 0   step 1   …   step s
    reduce-scatter          r        r-1          r-s        (mod K), added by the receiver
    allgather               r+1      r            r+1-s      (mod K), kept by the receiver

After reduce-scatter, rank r owns the finished chunk r+1. Each chunk is finished on one rank and
copied from there, so all ranks end with the same bits. Source: Patarasuk and Yuan, J. Parallel
Distrib. Comput. 69 (2009).
"""

import torch
import torch.distributed as dist
from torch.optim import SGD

from . import wire
from .base.losses import cross_entropy
from .stage3_paramserver import broadcast_parameters, flattened, gradients, unflatten


@wire.collective
@torch.no_grad()
def whole_gradient_ring(tensor, group=None):
    """Sum `tensor` over the ranks of `group` in place: everyone passes on what came in.

    Each rank adds in an order of its own, so for K > 2 the ranks' results differ in the last bits.
    """
    _, world_size, left, right = wire.neighbours(group)
    outgoing = tensor.contiguous().clone()
    incoming = torch.empty_like(outgoing)
    for _ in range(world_size - 1):
        wire.exchange(outgoing, right, incoming, left, group)
        tensor += incoming
        outgoing, incoming = incoming, outgoing
    return tensor


@wire.collective
@torch.no_grad()
def ring_all_reduce(tensor, group=None):
    """Sum `tensor` over the ranks of `group` in place.

    The tensor may have any shape and dtype, and even fewer elements than there are ranks.
    """
    flat = tensor.contiguous().view(-1)
    chunks = flat.tensor_split(dist.get_world_size(group))
    reduce_scatter(chunks, group)
    allgather(chunks, group)
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))
    return tensor


def reduce_scatter(chunks, group=None):
    """Leave the sum of chunk r+1 on rank r: K-1 times send a chunk right, add what comes in."""
    rank, world_size, left, right = wire.neighbours(group)
    scratch = torch.empty_like(max(chunks, key=len))
    for step in range(world_size - 1):
        outgoing = chunks[(rank - step) % world_size]
        target = chunks[(rank - step - 1) % world_size]
        incoming = scratch[: len(target)]
        wire.exchange(outgoing, right, incoming, left, group)
        target += incoming


def allgather(chunks, group=None):
    """Give all ranks all chunks: K-1 times send a finished chunk right, keep what comes in."""
    rank, world_size, left, right = wire.neighbours(group)
    for step in range(world_size - 1):
        outgoing = chunks[(rank + 1 - step) % world_size]
        target = chunks[(rank - step) % world_size]
        wire.exchange(outgoing, right, target, left, group)


def average_on_ring(tensors, group=None, all_reduce=ring_all_reduce):
    """Replace every tensor by its mean over the ranks, by one `all_reduce` per dtype and device."""
    for flat, members in flattened(tensors):
        flat.mul_(1 / dist.get_world_size(group))
        all_reduce(flat, group=group)
        unflatten(flat, members)


def train(model, batches, lr, average=average_on_ring, loss=cross_entropy, optimizer=SGD):
    """Train `model` in place on this rank's share of each batch; return its losses."""
    broadcast_parameters(model)
    optimizer = optimizer(model.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        step_loss = loss(model(inputs), targets)
        step_loss.backward()
        average(gradients(model))
        optimizer.step()
        losses.append(step_loss.item())
    return losses
