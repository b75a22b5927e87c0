"""When each bucket leaves. The reducer listens to every gradient and keeps the ranks' collectives
in one order.

    forward     expect(): the next backward pass is to be synchronised; a new `Pass` begins
    backward    gradient_ready(), once per parameter: into its bucket; a full bucket leaves, in
                index order
                the last one has left: finish() is queued, and autograd calls it before backward()
                returns
    forward     rebuild(), once: new buckets, in the order in which gradients really became ready

Ranks may finish their gradients in different orders, but bucket 1 never leaves before bucket 0:
otherwise two ranks could add different buckets up. For the same reason all ranks rebuild their
buckets in rank 0's order.

Here every parameter gets one gradient in every pass. For all other models, `graphs` has two
reducers, which override expect(), completed_by(), all_sent() and untouched().
"""

import weakref
from functools import partial

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from manyranks.torch_inside import after_backward

from .. import wire
from ..torch_private import as_plain_tensors, uncompiled
from .bucket_sums import GradBucket
from .buckets import NO_LIMIT, Bucket, SparseBucket, bucket_assignment
from .unused import UNUSED, not_finished, ready_twice


class Pass:
    """One backward pass that is to be synchronised: what has come, and what has left."""

    def __init__(self, buckets):
        # How many gradients each bucket still waits for.
        self.missing = [len(bucket.parameters) for bucket in buckets]
        # The indices of the parameters whose gradients came, in that order. A dict finds them fast.
        self.ready = {}
        # A function for each bucket that has left: it waits for the sum.
        self.waits = []
        # For `graphs`: these parameters count as ready as soon as the first gradient comes.
        self.unused = []

    def take_unused(self):
        """Return `unused`, which is empty from now on."""
        unused = self.unused
        self.unused = []
        return unused


class Reducer:
    """Average the gradients of `parameters`, {name: parameter}, over `group` while backward runs.

    - limits: the sizes of the buckets in bytes, from the second pass on; the first pass, in which
      the order of gradients is not known yet, has one bucket of each kind, unless it is
      `limited_at_once`.
    - start: the way to communicate, see `communication`; `hooked` says that it divides by K itself.
    - sparse: the parameters with sparse gradients. as_view: gradients are views of the buckets.
    - dtype: that of the buckets (None: the parameters').
    """

    reason = UNUSED  # Most passes without an end have this cause.
    keeps_buckets = False  # Buckets are laid out anew after the first pass.

    def __init__(
        self,
        parameters,
        group,
        limits,
        start,
        sparse,
        as_view,
        dtype,
        limited_at_once,
    ):
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.sparse = {
            index for index, parameter in enumerate(self.parameters) if parameter in sparse
        }
        self.group = group
        self.limits = limits
        self.start = start
        self.as_view = as_view
        self.dtype = dtype
        self.divisor = dist.get_world_size(group)
        self.hooked = False
        self.current = None  # This is a `Pass` from `expect` to `finish`.
        self.order = []  # The parameters' indices, as gradients became ready in the first pass.
        self.rebuilt = False
        first_limits = limits if limited_at_once or self.keeps_buckets else [NO_LIMIT]
        layout = bucket_assignment(self.parameters, first_limits, self.sparse)
        layout.reverse()  # The gradients of the last parameters come first.
        self.make_buckets(layout)
        self.listen()

    def listen(self):
        """Hook every parameter's gradient accumulator; the hooks do not keep this reducer alive."""
        this = weakref.ref(self)

        def report(index, *_):
            reducer = this()
            if reducer is not None:
                reducer.gradient_ready(index)

        # An accumulator and its hooks last only as long as somebody keeps it.
        with as_plain_tensors():
            self.accumulators = [get_gradient_edge(p).node for p in self.parameters]
        for index, accumulator in enumerate(self.accumulators):
            accumulator.register_hook(partial(report, index))

    def make_buckets(self, layout):
        """Allocate one bucket for each list of parameter indices in `layout`."""
        # Old buckets are freed before new ones are made.
        self.buckets = []
        self.home = [None] * len(self.parameters)
        for members in layout:
            kind = SparseBucket if members[0] in self.sparse else Bucket
            parameters = [self.parameters[index] for index in members]
            bucket = kind(len(self.buckets), parameters, self.as_view, self.dtype)
            self.buckets.append(bucket)
            for slot, index in enumerate(members):
                self.home[index] = bucket, slot

    # The forward pass calls the next methods.

    def expect(self, outputs):
        """Prepare to synchronise the backward pass from `outputs`; return the outputs that the loss
        is to use.
        """
        self.current = Pass(self.buckets)
        return outputs

    def check_finished(self):
        """Raise RuntimeError, naming parameters, if a backward pass began and not all buckets
        left.
        """
        if self.current and self.current.ready:
            missing = {
                index: name
                for index, name in enumerate(self.names)
                if index not in self.current.ready
            }
            raise RuntimeError(not_finished(missing, dist.get_rank(self.group), self.reason))

    def rebuild(self):
        """Once, after the first synchronised backward pass: lay the buckets out again, in rank 0's
        order and sizes.
        """
        self.check_finished()
        if self.keeps_buckets or self.rebuilt or not self.order:
            return
        plan = torch.tensor([*self.order, *self.limits], device=self.parameters[0].device)
        with wire.naming_absent(self.group):
            dist.broadcast(plan, group_src=0, group=self.group)
        numbers = plan.tolist()  # the processor waits for a GPU here, once
        order = numbers[: len(self.order)]
        limits = numbers[len(self.order) :]
        self.rebuilt = True
        self.make_buckets(bucket_assignment(self.parameters, limits, self.sparse, order))

    # The backward pass calls the next methods.

    @uncompiled
    def gradient_ready(self, index):
        """The hook: the gradient of parameter `index` has just been accumulated (or there is none
        to accumulate).
        """
        if self.current:
            for complete in self.completed_by(index):
                self.mark_ready(complete)

    def completed_by(self, index):
        """The parameters that need no further gradient in this pass, now that there is one for
        parameter `index`.
        """
        return [index]

    def mark_ready(self, index):
        """Put a gradient into its bucket, and send off every bucket whose turn it is. Raises
        RuntimeError for a gradient that was ready before in this pass.
        """
        if index in self.current.ready:
            raise RuntimeError(ready_twice(self.names[index]))
        self.current.ready[index] = True
        bucket, slot = self.home[index]
        bucket.put_gradient(slot, 1 if self.hooked else self.divisor)
        self.current.missing[bucket.index] -= 1
        if not self.current.missing[bucket.index]:
            self.send_off()

    def send_off(self):
        """Start communication for the next buckets in line that are full; after the last one, queue
        the end.
        """
        waits = self.current.waits
        while len(waits) < len(self.buckets) and not self.current.missing[len(waits)]:
            bucket = self.buckets[len(waits)]
            waits.append(self.start(self.as_grad_bucket(bucket, bucket.flat)))
        if len(waits) == len(self.buckets):
            self.all_sent()
            after_backward(self.finish)

    def as_grad_bucket(self, bucket, flat):
        """`bucket` as hooks see it, with the contents `flat`."""
        is_last = bucket.index == len(self.buckets) - 1
        return GradBucket(bucket.index, flat, bucket.parameters, is_last)

    def all_sent(self):
        """Called when the last bucket has left."""

    @uncompiled
    @torch.no_grad()
    def finish(self):
        """Called by autograd before `backward()` returns: wait for all buckets and hand the
        averages out.
        """
        ended = self.current
        self.current = None
        if not self.rebuilt:
            self.order = list(ended.ready)
        with wire.span("wait"):
            untouched = self.untouched()
            for bucket, wait in zip(self.buckets, ended.waits, strict=True):
                bucket.hand_out(wait(), untouched)

    def untouched(self):
        """The parameters that no rank has used since the last synchronised pass: their gradients
        stay as they are.
        """
        return ()

    # A rank without data calls the next method.

    def shadow(self):
        """Take part, with zeros, in the collectives of one backward pass of the other ranks."""
        waits = [self.start(self.as_grad_bucket(bucket, bucket.zeros())) for bucket in self.buckets]
        for wait in waits:
            wait()
        if not self.rebuilt:
            self.order = list(range(len(self.parameters)))
