"""Communicate less: fewer bytes, less often, or without waiting.

None of these ways gives the weights of a single device any more.

    fp16_hook, TopK, LowRank   fewer bytes per step: halves, the largest k, a matrix as two thin
                               ones
    train_local                every rank trains on its own for some steps; then all take the mean
                               of the weights (local SGD), or one step of an outer optimizer along
                               the mean change (DiLoCo)
    train_asynchronously       a server never waits, so gradients that arrive may belong to older
                               weights

A lossy hook keeps what it leaves out, and adds it to the next step's gradient: error feedback.
Without it the small gradients would never be sent.

Sources: Stich, "Local SGD converges fast and communicates little", 2019; Douillard et al.,
"DiLoCo", 2023; Vogels et al., "PowerSGD", 2019; Karimireddy et al., "Error feedback fixes SignSGD",
2019; Dean et al., "Large scale distributed deep networks", 2012 (Downpour SGD).
"""

import math
import threading
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from . import wire
from .stage3_paramserver import broadcast_parameters, gradients, trainable, unflatten
from .stage4_ring import allgather, average_on_ring, ring_all_reduce


def future_of(tensor: Tensor) -> torch.futures.Future[Tensor]:
    """Return a future that already has its value, as a hook does for a bucket that is ready."""
    # A future that knows the GPU makes the stream that takes the value wait for this stream.
    future = torch.futures.Future(devices=[tensor.device] if tensor.is_cuda else None)
    future.set_result(tensor)
    return future


def fp16_hook(group: wire.Group, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook that runs the ring on half-precision numbers.

    The ring then sends half the bytes, and values keep 3 of 7 digits.
    """
    flat = bucket.buffer()
    halves = flat.div(dist.get_world_size(group)).to(torch.float16)
    ring_all_reduce(halves, group)
    return future_of(flat.copy_(halves))


class TopK:
    """A hook by which every rank sends only its largest values, with their places.

    Each rank sends a `share` (0 to 1) of its values, and receives as many from each of the other
    K-1 ranks. With `feedback`, what was not sent is kept for the next step. Raises ValueError for a
    share out of range.
    """

    def __init__(self, share, feedback=True):
        if not 0 < share <= 1:
            raise ValueError(f"share is {share}; it must be more than 0, and at most 1")
        self.share = share
        self.feedback = feedback
        # What was not sent is kept by parameter, as DDP may put a parameter into another bucket
        # later.
        self.left = {}
        # torch's DDP asks a hook for its names.
        self.__name__ = self.__qualname__ = "TopK"

    def __call__(self, group, bucket):
        """Write the mean of what all ranks send into the bucket; return a future of its tensor."""
        flat = bucket.buffer()
        world_size = dist.get_world_size(group)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            gradient += self.left.get(parameter, 0.0)
        count = min(flat.numel(), max(1, round(self.share * flat.numel())))
        places = flat.abs().topk(count).indices.to(torch.int32)
        values = flat[places]
        flat.index_fill_(0, places.long(), 0.0)
        if self.feedback:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                self.left[parameter] = gradient.clone()
        flat.zero_()
        # All ranks add in one order, so that replicas stay equal.
        for value, place in zip(gathered(values, group), gathered(places, group), strict=True):
            flat.index_add_(0, place, value, alpha=1 / world_size)
        return future_of(flat)


class LowRank:
    """A hook for PowerSGD: a gradient matrix travels as two thin ones.

    A matrix M travels as P = M Q and Q = Mᵀ P, of `rank` columns each, if these have fewer elements
    than M; other gradients go whole. Each training step is one step of power iteration: Q is kept,
    and turns towards M's largest directions. Raises ValueError unless `rank` is a whole number, 1
    or more.
    """

    def __init__(self, rank):
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank is {rank}; it must be a whole number, 1 or more")
        self.rank = rank
        self.left = {}  # what was not sent of each parameter's gradient
        self.directions = {}  # Q of each parameter
        self.__name__ = self.__qualname__ = "LowRank"

    def __call__(self, group, bucket):
        """Write an approximation of the mean gradient into the bucket, by two all-reduces."""
        gradient_of = dict(zip(bucket.parameters(), bucket.gradients(), strict=True))
        whole = []
        matrices = {}
        for parameter, gradient in gradient_of.items():
            matrix = gradient.flatten(1) if gradient.dim() > 1 else gradient.reshape(-1, 1)
            if self.rank * sum(matrix.shape) < matrix.numel():
                # Halves have no QR decomposition.
                exact = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
                matrices[parameter] = exact + self.left.get(parameter, 0.0)
            else:
                whole.append(gradient)
        all_p = [
            m @ self.directions.get(parameter, self.first_directions(m))
            for parameter, m in matrices.items()
        ]
        average_on_ring(all_p + whole, group)
        # torch calls P with orthonormal columns Q.
        all_p = [torch.linalg.qr(p).Q for p in all_p]
        all_q = [m.T @ p for m, p in zip(matrices.values(), all_p, strict=True)]
        average_on_ring(all_q, group)
        for (parameter, m), p, q in zip(matrices.items(), all_p, all_q, strict=True):
            product = p @ q.T
            self.left[parameter] = m - product
            self.directions[parameter] = q
            gradient_of[parameter].copy_(product.view_as(gradient_of[parameter]))
        return future_of(bucket.buffer())

    def first_directions(self, matrix: Tensor) -> Tensor:
        """Return the first Q, which is random and the same on all ranks."""
        # The numbers of the CPU's generator are the same everywhere.
        generator = torch.Generator().manual_seed(0)
        shape = (matrix.shape[1], self.rank)
        return torch.randn(shape, generator=generator, dtype=matrix.dtype).to(matrix.device)


def gathered(tensor: Tensor, group: wire.Group) -> list[Tensor]:
    """Return what all ranks have as `tensor`, in rank order, by the ring's allgather."""
    rank, world_size, *_ = wire.neighbours(group)
    everything = [torch.empty_like(tensor) for _ in range(world_size)]
    # At the start of the ring's allgather rank r has chunk r+1.
    everything[(rank + 1) % world_size] = tensor
    allgather(everything, group)
    return everything


def train_local(
    model: Module, batches: Iterable, lr: float, every: int, outer: Callable | None = None
) -> list[float]:
    """Train on this rank's share alone, and take the mean of all weights after `every` steps.

    Return this rank's losses. `outer(parameters)` makes an optimizer that gets the mean change as
    its gradient: DiLoCo takes `SGD(…, lr=0.7, momentum=0.9, nesterov=True)`, and plain local SGD is
    an outer SGD with rate 1. Raises ValueError where ranks have different numbers of batches, or
    `every` is no number of steps.
    """
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every is {every}; it must be a whole number of steps, 1 or more")
    broadcast_parameters(model)
    trained = trainable(model)
    inner = SGD(trained, lr=lr)
    losses = []
    shared = [parameter.detach().clone() for parameter in trained]
    outer_optimizer = outer(shared) if outer else SGD(shared, lr=1.0)
    for step, (inputs, targets) in enumerate(batches, 1):
        inner.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        inner.step()
        losses.append(loss.item())
        if step % every == 0:
            refuse_unequal_ends(step, shared[0].device)
            take_mean_change(model, shared, outer_optimizer)
    # Infinity says that this rank has no more batches.
    refuse_unequal_ends(math.inf, shared[0].device)
    return losses


def refuse_unequal_ends(step: float, device: torch.device) -> None:
    """Raise ValueError unless all ranks are at one step; infinity is the end of the batches."""
    steps = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    steps[dist.get_rank()] = step
    if ring_all_reduce(steps).unique().numel() > 1:
        early = [rank for rank, each in enumerate(steps.tolist()) if math.isinf(each)]
        raise ValueError(
            f"ranks {early} have no more batches, and the others do; give all ranks equally many"
        )


@torch.no_grad()
def take_mean_change(model: Module, shared: list[Tensor], outer: Optimizer) -> None:
    """Move the `shared` weights by the mean change of all ranks, and give them to the model.

    The model's running statistics become the mean of all ranks'.
    """
    trained = trainable(model)
    for start, parameter in zip(shared, trained, strict=True):
        start.grad = start - parameter
    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    average_on_ring([start.grad for start in shared] + statistics)
    outer.step()
    for start, parameter in zip(shared, trained, strict=True):
        parameter.copy_(start)


def train_asynchronously(
    model: Module, batches: Iterable, lr: float
) -> tuple[list[float], list[int]]:
    """Train with rank 0 as a server, while all others train as fast as they can.

    Return a worker's losses, and on rank 0 the staleness of every update: the number of updates
    between the weights for which a gradient was computed and the weights to which it is applied.
    Workers may have any number of batches. Raises ValueError on one rank, and with NCCL, which
    works through messages in the order in which they were asked for.
    """
    if wire.on_nccl(next(model.parameters())):
        raise ValueError(
            "over NCCL a server cannot answer whoever comes first: keep the model on the CPU"
        )
    if dist.get_world_size() == 1:
        raise ValueError("rank 0 only serves, so one rank would train nothing; use at least two")
    broadcast_parameters(model)
    trained = [parameter.detach() for parameter in trainable(model)]
    weights = end_to_end(trained)
    if dist.get_rank() == 0:
        staleness = serve(weights, lr)
        unflatten(weights, trained)
        return [], staleness
    losses = []
    for inputs, targets in batches:
        model.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        # The last element says whether a message is a gradient: 1 for yes, and 0 for the end.
        wire.send(end_to_end([*gradients(model), weights.new_ones(1)]), 0)
        wire.recv(weights, 0)
        unflatten(weights, trained)
        losses.append(loss.item())
    wire.send(weights.new_zeros(len(weights) + 1), 0)
    return losses, []


def end_to_end(tensors: list[Tensor]) -> Tensor:
    """Return one vector of all elements, in the widest dtype among the tensors."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def serve(weights: Tensor, lr: float) -> list[int]:
    """Serve all workers, a thread for each: apply its gradients, and answer with the weights.

    Return the staleness of every update.
    """
    lock = threading.Lock()
    staleness = []

    def attend(peer):
        """Apply the gradients of one rank as they come, and answer with the newest weights."""
        message = weights.new_empty(len(weights) + 1)
        known = 0  # the number of updates in the weights that this rank has
        while True:
            wire.recv(message, peer)
            if not message[-1]:
                return
            with lock:
                staleness.append(len(staleness) - known)
                weights.add_(message[:-1], alpha=-lr)
                answer = weights.clone()
                known = len(staleness)
            wire.send(answer, peer)

    threads = [threading.Thread(target=attend, args=(peer,)) for peer in wire.others(0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return staleness
