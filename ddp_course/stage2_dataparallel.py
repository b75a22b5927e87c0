"""Stage 2: one process drives K devices, a thread each.

    inputs --scatter--> shard k --forward k--> outputs k --gather--> outputs on the master --> loss
    model --replicate--> replica k                                                              |
    model.grad <--reduce-- gradient k <--backward k-- output gradient k <--scatter--------------+

The first device is the master. It holds the model, all outputs, the loss and the sum of all
gradients, and the model is copied from it again in every step: the load is unbalanced. The loss is
taken over the whole batch, so the sum of the replicas' gradients *is* the gradient of one device.
Nothing needs to be averaged. The algorithm is that of `torch.nn.DataParallel`.
"""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial

import torch
from torch.optim import SGD

from .base.losses import cross_entropy


def scatter(tensor, devices):
    """Split `tensor` by samples, one shard per device; with too few samples some have none."""
    shards = tensor.tensor_split(len(devices))
    return [shard.to(device) for shard, device in zip(shards, devices, strict=True) if len(shard)]


def replicate(module, devices):
    """Return a copy of `module` on every device.

    Each copy has weights of its own and no gradients; the master's copy is `module` itself.
    """
    copies = []
    for device in devices[1:]:
        # deepcopy takes the tensors in `known` as they are, so it makes no copies on the master.
        known = {}
        for weight in module.parameters():
            copied = weight.detach().to(device, copy=True)
            known[id(weight)] = torch.nn.Parameter(copied, weight.requires_grad)
        copies.append(deepcopy(module, known).to(device))
    return [module, *copies]


def parallel_forward(replicas, shards):
    """Run every replica on its shard, each in a thread; return the outputs in device order."""
    return in_threads(torch.nn.Module.__call__, replicas, shards)


def gather(outputs, device):
    """Concatenate the outputs on the master `device`, cut off from the replicas' graphs."""
    return torch.cat([output.detach().to(device) for output in outputs]).requires_grad_()


def parallel_backward(outputs, gradients):
    """Run every replica's backward pass from the gradient of its outputs, each in a thread."""
    in_threads(torch.autograd.backward, outputs, gradients)


def reduce(module, replicas):
    """Add the gradients of all replicas to those of `module` on the master."""
    for replica in replicas[1:]:
        for parameter, copy in zip(module.parameters(), replica.parameters(), strict=True):
            if copy.grad is not None:
                gradient = copy.grad.to(parameter.device)
                parameter.grad = (
                    gradient if parameter.grad is None else parameter.grad.add_(gradient)
                )


def in_threads(function, *arguments):
    """Call `function` once per device, in parallel; the first exception is raised here."""
    # Whether gradients are recorded is a setting of each thread, so new threads get this one's.
    set_as_here = partial(torch.set_grad_enabled, torch.is_grad_enabled())
    with ThreadPoolExecutor(len(arguments[0]), initializer=set_as_here) as threads:
        return list(threads.map(function, *arguments))


class DataParallel(torch.nn.Module):
    """Run `module` on several `devices` from one process; a device may be named twice.

    `parallel(inputs)` returns the outputs of the whole batch on the master. After
    `loss.backward()`, which stops at these outputs, `parallel.backward()` carries on through the
    replicas. Raises ValueError without devices.
    """

    def __init__(self, module, devices):
        super().__init__()
        if not devices or isinstance(devices, int):
            raise ValueError(
                f"devices is {devices!r}; it must be a list with a device for each replica, such as"
                " ['cpu', 'cpu']"
            )
        self.devices = [torch.device(device) for device in devices]
        self.module = module.to(self.devices[0])

    def forward(self, inputs):
        """Scatter, replicate, forward, gather."""
        shards = scatter(inputs, self.devices)
        self.replicas = replicate(self.module, self.devices[: len(shards)])
        self.outputs = parallel_forward(self.replicas, shards)
        self.gathered = gather(self.outputs, self.devices[0])
        return self.gathered

    def backward(self):
        """Scatter the gradient of the outputs, backward, reduce."""
        parallel_backward(self.outputs, scatter(self.gathered.grad, self.devices))
        reduce(self.module, self.replicas)
        self.replicas = self.outputs = self.gathered = None


def train(model, batches, lr, devices=("cpu", "cpu"), loss=cross_entropy, optimizer=SGD):
    """Train `model` in place on batches that are split over `devices`; return every step's loss."""
    parallel = DataParallel(model, devices)
    optimizer = optimizer(model.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        step_loss = loss(parallel(inputs), targets)
        step_loss.backward()
        parallel.backward()
        optimizer.step()
        losses.append(step_loss.item())
    return losses
