"""Stage 3: K processes; one, the server, collects all gradients and sends back their average.

    rank 1 --p bytes--> server (adds up) --p bytes--> rank 1
    rank 2 --p bytes--> server           --p bytes--> rank 2
    ...

The server's link carries (K-1) p bytes in and then (K-1) p bytes out, one after the other, while
everyone else waits: T = 2 (K-1) p/b on a link of b bytes per second. Every rank works on its own
share of the batch with its own optimizer; equal weights at the start and equal gradients in every
step keep the replicas equal.
"""

import torch
import torch.distributed as dist
from torch.optim import SGD

from . import wire
from .base.losses import cross_entropy
from .base.missing import gradient_of
from .base.replicas import check_replicas


@torch.no_grad()
def broadcast_parameters(module, src=0, group=None):
    """Give every rank the parameters and buffers of rank `src`, by point-to-point messages."""
    check_replicas(dict(module.named_parameters()), group)
    for tensor in [*module.parameters(), *module.buffers()]:
        message = tensor.detach().contiguous()
        if dist.get_rank(group) == src:
            for peer in wire.others(src, group):
                wire.send(message, peer, group)
        else:
            wire.recv(message, wire.global_rank(src, group), group)
            tensor.copy_(message)


def gradients(module):
    """Return the gradients of all trainable parameters, equally many numbers on all ranks."""
    return [gradient_of(parameter) for parameter in trainable(module)]


@wire.collective
@torch.no_grad()
def average_on_server(tensors, server=0, group=None):
    """Replace every tensor by its mean over the ranks, in place, by way of rank `server`.

    Each rank sends one message per dtype and device. It multiplies the message by 1/K beforehand,
    as torch's DDP does.
    """
    for flat, members in flattened(tensors):
        flat.mul_(1 / dist.get_world_size(group))
        if dist.get_rank(group) == server:
            collect_and_return(flat, server, group)
        else:
            wire.send(flat, wire.global_rank(server, group), group)
            wire.recv(flat, wire.global_rank(server, group), group)
        unflatten(flat, members)


def collect_and_return(total, server, group=None):
    """Add up what the other ranks send, then send everyone the sum: the server's two loops."""
    incoming = torch.empty_like(total)
    for peer in wire.others(server, group):
        wire.recv(incoming, peer, group)
        total += incoming
    for peer in wire.others(server, group):
        wire.send(total, peer, group)


def flattened(tensors):
    """Yield (one flat copy, the tensors in it) for each dtype and device among `tensors`."""
    groups = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for members in groups.values():
        yield torch.cat([member.reshape(-1) for member in members]), members


def unflatten(flat, members):
    """Copy the flat tensor back into the `members` it was made of."""
    for view, member in zip(views_into(flat, members), members, strict=True):
        member.copy_(view)


def views_into(flat, tensors):
    """Return a view into the vector `flat` for each of `tensors`, which lie in it end to end."""
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def train(model, batches, lr, average=average_on_server, loss=cross_entropy, optimizer=SGD):
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


# The last function is a guard, which refuses a model that nobody could train.


def trainable(module):
    """Return the parameters that are trained; raises ValueError if there is none."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError("the model has no trainable parameters: nothing to average, or to train")
    return parameters
