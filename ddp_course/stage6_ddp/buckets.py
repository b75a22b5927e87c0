"""Buckets: which gradients travel together, and how they get in and out.

A bucket is one flat tensor with a window, a *view*, for each gradient in it. There are two ways to
fill it:

    gradient_as_bucket_view=False    grad --copy, x 1/K--> view --all-reduce--> view --copy--> grad
    gradient_as_bucket_view=True     grad *is* the view after the first pass: no copies, no second
                                     memory

Without views a gradient is this rank's own until `backward()` ends, so no code that reads it
earlier (another wrapper, a hook, the owner of a flat tensor of gradients) finds a half-finished
sum. The price is the memory of the buckets.

The layout is the one that `torch.nn.parallel.DistributedDataParallel` computes, bucket for bucket:
the tests compare with `torch.distributed._compute_bucket_assignment_by_size`.
"""

import warnings
from dataclasses import dataclass, field
from functools import cache
from math import inf

import torch

MIB = 2**20
FIRST_CAP = 1 * MIB  # The first bucket is small, so that communication starts early.
DEFAULT_CAP = 25 * MIB
NO_LIMIT = 2**63  # No model has so many bytes: all gradients of a kind share one bucket.
HIGHER_ORDER = (
    "backward(create_graph=True) with DistributedDataParallel: gradients are averaged, but the"
    " averaging is no part of the graph, so gradients of gradients would stay those of each rank."
    " Use torch.autograd.grad within no_sync(), and average the final gradients with"
    " torch.distributed.all_reduce"
)


def size_limits(cap_mb, cap_mb_list=None):
    """Return the bytes at which the first, second, … bucket closes.

    The last entry holds for all buckets that follow. Only the default cap (None) has a smaller
    first bucket. Raises ValueError unless all caps are positive.
    """
    caps = cap_mb_list or [cap_mb]
    if any(cap is not None and not 0 < cap < inf for cap in caps):
        raise ValueError(
            f"bucket_cap_mb is {cap_mb_list or cap_mb}; it must be a positive number of MiB, such"
            " as 25"
        )
    if caps == [None]:
        return [FIRST_CAP, DEFAULT_CAP]
    return [int(cap * MIB) for cap in caps]


def bucket_assignment(tensors, limits, sparse=(), order=None):
    """Return for each bucket the indices into `tensors` of its members.

    All members have one dtype and device. The buckets of each dtype and device close at the
    `limits` (bytes), one by one. `sparse` holds the indices of tensors with sparse gradients, which
    travel alone. `order` is the order in which gradients become ready; without it, tensors are
    taken as they come, and the buckets are sorted by their first member. Buckets that are still
    open at the end come last, those of the dtype seen last before the others.
    """
    filling = {}
    closed = []
    indices = range(len(tensors)) if order is None else order
    for index in indices:
        tensor = tensors[index]
        if index in sparse:
            closed.append([index])
            continue
        bucket = filling.setdefault((tensor.dtype, tensor.device), Filling(limits))
        bucket.members.append(index)
        bucket.size += tensor.numel() * tensor.element_size()
        if bucket.size >= bucket.limits[0]:
            closed.append(bucket.members)
            filling[tensor.dtype, tensor.device] = Filling(bucket.limits[1:] or bucket.limits)
    buckets = closed + [bucket.members for bucket in reversed(filling.values()) if bucket.members]
    return sorted(buckets, key=min) if order is None else buckets


@dataclass
class Filling:
    """A bucket that is still open: its limit and those of later ones, its members, its bytes."""

    limits: list
    members: list = field(default_factory=list)
    size: int = 0


class Bucket:
    """The flat tensor that is all-reduced, with a view for the gradient of each parameter.

    `dtype` is that of the flat tensor, or None for the parameters'; only gradients of the same
    dtype can be views of it.
    """

    def __init__(self, index, parameters, as_view, dtype):
        self.index = index
        self.parameters = parameters
        dtype = dtype or parameters[0].dtype
        self.as_view = as_view and dtype == parameters[0].dtype
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.empty(sum(sizes), dtype=dtype, device=parameters[0].device)
        self.views = list(map(view_like, self.flat.split(sizes), parameters))
        if self.as_view:
            self.adopt()

    @torch.no_grad()
    def adopt(self):
        """Move existing gradients into this bucket, where `put_gradient` divides them.

        torch does so, too. A copy would be multiplied by 1 / divisor, which rounds in another way.
        """
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not None:
                parameter.grad = view.copy_(parameter.grad)

    def put_gradient(self, slot, divisor):
        """Copy the gradient of the parameter in `slot`, over `divisor`, into the bucket.

        A parameter without a gradient gives zeros. The division comes before the sum, as in torch:
        large gradients do not overflow, and the bits agree.
        """
        parameter = self.parameters[slot]
        view = self.views[slot]
        grad = parameter.grad
        if grad is None:
            view.zero_()
        elif self.as_view and grad.data_ptr() == view.data_ptr():
            if divisor != 1:
                view.div_(divisor)
        else:
            if grad.requires_grad:
                grad = self.without_graph(grad)
            # This divides and copies in one pass.
            torch.mul(grad, reciprocal(divisor, grad.dtype), out=view)
            if self.as_view:
                parameter.grad = view

    def without_graph(self, grad):
        """Return a gradient without its graph.

        Raises RuntimeError, as torch does, if the bucket has several gradients.
        """
        if len(self.parameters) > 1:
            raise RuntimeError(HIGHER_ORDER)
        warnings.warn(HIGHER_ORDER, stacklevel=2)
        return grad.detach()

    def zeros(self):
        """Return the contribution of a rank that has no data."""
        return torch.zeros_like(self.flat)

    def hand_out(self, averages, untouched=()):
        """Make the flat tensor `averages` the gradients of all but the `untouched` parameters."""
        if averages.data_ptr() != self.flat.data_ptr():
            self.flat.copy_(averages.view(-1))
        grads = []
        views = []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter in untouched:
                continue
            grad = parameter.grad
            if grad is None:
                grad = view if self.as_view else torch.empty_like(parameter)
                parameter.grad = grad
            if not self.as_view or grad.data_ptr() != view.data_ptr():
                grads.append(grad)
                views.append(view)
        if grads:
            torch._foreach_copy_(grads, views)


class SparseBucket:
    """The bucket of one parameter with sparse gradients.

    The gradient travels as it is, so there is nothing to lay out, and `as_view` and `dtype` have no
    effect.
    """

    def __init__(self, index, parameters, as_view, dtype):
        self.index = index
        self.parameters = parameters
        self.flat = None

    def put_gradient(self, slot, divisor):
        """Keep the gradient, over `divisor`.

        A rank that did not use the parameter adds a sparse tensor without entries.
        """
        grad = self.parameters[slot].grad
        self.flat = self.zeros() if grad is None else grad.detach() / divisor

    def zeros(self):
        """Return a sparse tensor without entries."""
        parameter = self.parameters[0]
        indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        return torch.sparse_coo_tensor(indices, parameter.detach()[:0], parameter.shape)

    def hand_out(self, averages, untouched=()):
        """Replace the parameter's gradient by its average."""
        self.flat = None
        if self.parameters[0] not in untouched:
            self.parameters[0].grad = averages


@cache
def reciprocal(divisor, dtype):
    """Return 1 / `divisor` as a tensor, for gradients of `dtype`.

    It is made only once, because that takes longer than the copy of a small gradient.
    """
    return torch.tensor(1 / divisor, dtype=torch.promote_types(dtype, torch.float32))


def view_like(piece, parameter):
    """Return the vector `piece` with a parameter's shape, and its strides if they leave no gaps."""
    # `empty_like` keeps channels_last, and packs other layouts.
    return piece.as_strided(parameter.shape, torch.empty_like(parameter).stride())
