"""Which gradients travel together, and how they get into their bucket and out again.

A bucket is one flat tensor with a window, a *view*, for each gradient in it. There are two ways to fill it:

    gradient_as_bucket_view=False    grad --copy, x 1/K--> view --all-reduce--> view --copy--> grad
    gradient_as_bucket_view=True     grad *is* the view after the first pass: nothing to copy, no second memory

Without views, the second copy can be saved if nobody is able to tell the difference: see `Bucket.lend`.

A large gradient moves as soon as it is there, over 1/K in the same pass. To ask for the copy of a small one takes
longer than the copy itself, so small ones wait, and move in one call for all of them:

    small, small, small --wait--> one copy, and one multiplication by 1/K: while they are still in the cache

The layout is the one that `torch.nn.parallel.DistributedDataParallel` computes, bucket for bucket: the tests compare
with `torch.distributed._compute_bucket_assignment_by_size`.
"""

import warnings
from itertools import accumulate

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from ..running.torch_inside import users_of_storage

MIB = 2**20
FIRST_CAP = 1 * MIB  # the first bucket is small so that communication starts early
DEFAULT_CAP = 25 * MIB
SMALL = 16 * 2**10  # bytes; a gradient of at most that many waits for others,
AT_ONCE = 64  # but no more than this many wait: 1 MiB of memory
NO_LIMIT = 2**63  # one bucket for all: in the first pass, when nobody knows the order of the gradients yet
HIGHER_ORDER = (
    "backward(create_graph=True) with DistributedDataParallel: gradients are averaged, but the averaging is no part of "
    "the graph, so gradients of gradients stay those of each rank."
)


def size_limits(cap_mb, cap_mb_list=None):
    """Bytes at which the first, second, … bucket closes; the last entry is repeated for all that follow.

    Only the default cap (None) has a smaller first bucket. Raises ValueError unless all caps are positive.
    """
    caps = cap_mb_list or [cap_mb]
    if any(cap is not None and cap <= 0 for cap in caps):
        raise ValueError(f"bucket_cap_mb is {cap_mb_list or cap_mb}; it must be a positive number of MiB, such as 25")
    return [FIRST_CAP, DEFAULT_CAP] if caps == [None] else [int(cap * MIB) for cap in caps]


def assign_buckets(tensors, limits, sparse=(), order=None):
    """Return lists of indices into `tensors`, one a bucket: one (dtype, device) each, closed on reaching its limit.

    Every (dtype, device) walks through `limits` (bytes) on its own. `sparse` holds the indices of tensors with
    sparse gradients, which travel alone. `order` is the order in which gradients become ready; without it, tensors
    are taken as they come and the buckets sorted by their first member. Buckets that are still open at the end come
    last, those of the dtype seen last before the others.
    """
    filling, closed = {}, []
    for index in range(len(tensors)) if order is None else order:
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


class Filling:
    """A bucket that is still open: its members' indices, its size in bytes, and the limits from here on."""

    def __init__(self, limits):
        self.members, self.size, self.limits = [], 0, limits


class Bucket:
    """The flat tensor that is all-reduced, its views, and the parameters whose gradients it carries.

    `missing` counts the gradients that this backward pass has not produced yet, `waiting` has the small ones that it
    has, each with parameter and view. With `lends` large gradients may move in (not on CUDA, where copies are fast and
    another stream may still be reading the memory that they left).
    """

    def __init__(self, index, parameters, as_view, lends, dtype=None):
        self.index, self.parameters, self.dtype = index, parameters, dtype or parameters[0].dtype
        self.as_view = as_view and self.dtype == parameters[0].dtype
        self.lends = lends and parameters[0].device.type == "cpu"
        self.is_small = [p.numel() * p.element_size() <= SMALL for p in parameters]
        self.missing, self.waiting = len(parameters), []
        self.allocate()
        if self.as_view:
            self.adopt()

    def allocate(self):
        """Take new memory for the flat tensor and its views."""
        size = sum(parameter.numel() for parameter in self.parameters)
        self.flat = torch.empty(size, dtype=self.dtype, device=self.parameters[0].device)
        self.views = self.views_of(self.flat)
        if self.lends:
            pairs = list(zip(self.views, self.is_small, strict=True))
            self.views = [view if small else own_storage(view) for view, small in pairs]
            self.lendable = [view for view, (_, small) in zip(self.views, pairs, strict=True) if not small]

    def views_of(self, flat):
        """The windows of `flat` in which the gradients lie, in their shapes."""
        offsets = [0, *accumulate(parameter.numel() for parameter in self.parameters[:-1])]
        return [view_at(flat, *pair) for pair in zip(offsets, self.parameters, strict=True)]

    @torch.no_grad()
    def adopt(self):
        """Move gradients that exist already into this bucket: after a rebuild they are views of the old ones."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not None:
                parameter.grad = view.copy_(parameter.grad)

    def take(self, slot, divisor):
        """Copy the gradient of the parameter in `slot`, over `divisor`, into the bucket (zeros if it has none).

        The division comes before the sum, as in torch: large gradients do not overflow, and the bits agree.
        """
        if self.lends and self.missing == len(self.parameters) and any(is_lent(view) for view in self.lendable):
            self.allocate()  # gradients of an earlier pass still live in the old memory: it is theirs now
        parameter, view = self.parameters[slot], self.views[slot]
        grad = parameter.grad
        if grad is None:
            view.zero_()
        elif self.as_view and grad.data_ptr() == view.data_ptr():
            if divisor != 1:
                view.div_(divisor)
        else:
            if grad.requires_grad:
                warnings.warn(HIGHER_ORDER, stacklevel=2)
                grad = grad.detach()
            if self.is_small[slot] and grad.dtype is self.dtype:
                self.waiting.append((parameter, view, grad))
                if len(self.waiting) == AT_ONCE:
                    self.fill(divisor)
                return
            torch.mul(grad, 1 / divisor, out=view)  # divides while it copies: one pass over the memory
            if self.as_view:
                parameter.grad = view
            elif self.lends:
                self.lend(grad, view)

    def fill(self, divisor):
        """Copy the gradients that wait, over `divisor`, into the bucket: a full bucket must not leave without them."""
        if not self.waiting:
            return
        parameters, views, grads = zip(*self.waiting, strict=True)
        torch._foreach_copy_(views, grads)
        if divisor != 1:
            torch._foreach_mul_([self.flat] if len(views) == len(self.views) else views, 1 / divisor)
        if self.as_view:
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view
        self.waiting = []

    @staticmethod
    def lend(grad, view):
        """Move a gradient to the view's memory, for good: the average will be there without another copy.

        Its old memory is free at once, for the next gradient. Only a gradient that was made in this pass may move,
        which no one has written to (version 0): an older one, to which this pass has added, may have been laid
        by its owner where others look for it.
        """
        if grad._version == 0 and grad.dtype == view.dtype:
            grad.data = view

    def zeros(self):
        """What a rank that has nothing to add puts in."""
        return torch.zeros_like(self.flat)

    def give(self, untouched=()):
        """Hand the averaged gradients back to the parameters, except to those `untouched` by any rank."""
        grads, averages = [], []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is view or parameter in untouched:
                continue
            if parameter.grad is None:
                parameter.grad = view if self.as_view else torch.empty_like(parameter, requires_grad=False)
            if parameter.grad.data_ptr() != view.data_ptr():
                grads.append(parameter.grad)
                averages.append(view)
        if grads:
            torch._foreach_copy_(grads, averages)


class SparseBucket:
    """The bucket of one parameter with sparse gradients: there is nothing to lay out, the gradient travels as it is."""

    def __init__(self, index, parameters, as_view, lends, dtype=None):
        self.index, self.parameters, self.views = index, parameters, []
        self.flat, self.missing = None, 1

    @staticmethod
    def views_of(flat):
        """None: nothing is laid out."""
        return []

    def take(self, slot, divisor):
        """Keep the gradient, over `divisor`; a rank that did not use the parameter adds a tensor without entries."""
        grad = self.parameters[slot].grad
        self.flat = self.zeros() if grad is None else grad.detach() / divisor

    def fill(self, divisor):
        """Nothing waits."""

    def zeros(self):
        """A sparse tensor without entries."""
        parameter = self.parameters[0]
        indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        return torch.sparse_coo_tensor(indices, parameter.detach()[:0], parameter.shape)

    def give(self, untouched=()):
        """Replace the parameter's gradient by the average."""
        if self.parameters[0] not in untouched:
            self.parameters[0].grad = self.flat


def view_at(flat, offset, parameter):
    """The window of `flat` at `offset` with the shape of `parameter`, and with its strides if these leave no gaps."""
    strides = torch.empty_like(parameter).stride()  # keeps channels_last and the like, and packs everything else
    return flat.as_strided(parameter.shape, strides, offset)


def own_storage(view):
    """The memory of `view` as a tensor with a storage of its own, which keeps the whole flat tensor alive."""
    return from_dlpack(to_dlpack(view))


def is_lent(view):
    """Whether any tensor besides `view` uses its storage: a gradient that moved in, or what was made of it."""
    return users_of_storage(view) > 2  # the view and this function's reference
