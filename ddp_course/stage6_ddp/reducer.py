"""The reducer: it listens to every gradient, and sends buckets in one order on all ranks.

    forward     expect(): the backward passes from these outputs are to be synchronised
    backward    begin(), where it comes to the outputs: a new `Pass`
                gradient_ready(), once per parameter: into its bucket; a full bucket leaves, in
                index order
                the last one has left: finish() is queued, and autograd calls it before backward()
                returns
    forward     rebuild(), once: new buckets, in the order in which gradients really became ready

Ranks may finish their gradients in different orders, but bucket 1 never leaves before bucket 0:
otherwise two ranks could add up different buckets. For the same reason all ranks rebuild their
buckets in rank 0's order.

Each backward pass is synchronised for itself, so forward and backward passes may come in any order,
and a graph may be used twice. A second pass adds to gradients that are equal on all ranks already;
to average the sum leaves that part as it is.

This reducer is for models in which every parameter gets one gradient in every pass. For all other
models, `graphs` has two reducers, which override unused_behind(), listen_to(), start_pass(),
completed_by(), all_sent() and untouched().
"""

import weakref
from functools import partial

import torch
import torch.distributed as dist

from manyranks.errors import MismatchError
from manyranks.torch_inside import after_backward, backward_pass, tensors_in

from .. import wire
from ..base.torch_private import accumulators_of, returned_by_grad, uncompiled
from ..same_model import converted
from .bucket_sums import GradBucket
from .buckets import NO_LIMIT, Bucket, SparseBucket, bucket_assignment
from .unused import (
    OUT_OF_STEP,
    RETURNED,
    UNUSED,
    bypassed,
    not_finished,
    ready_twice,
)


class ForwardPass:
    """A forward pass, whose backward passes are to be synchronised unless they are `local`.

    `unused` has the indices of the parameters that are not in the graph behind its outputs.
    """

    def __init__(self, local, unused=()):
        self.local = local
        self.unused = unused


class Pass:
    """A backward pass that is to be synchronised: which gradients came, and which buckets left."""

    def __init__(self, buckets, forward, number):
        self.forward = forward
        self.number = number  # autograd's number of the backward pass
        # Each bucket still waits for so many gradients.
        self.missing = [len(bucket.parameters) for bucket in buckets]
        # The keys are the indices of the parameters whose gradients came, in that order.
        self.ready = {}
        self.waits = []  # a function for each bucket that has left, which waits for its sum
        # The reducers of `graphs` count these parameters as ready as soon as the first gradient
        # comes.
        self.unused = list(forward.unused)

    def take_unused(self):
        """Return the unused parameters, once: after this there are none."""
        unused = self.unused
        self.unused = []
        return unused


class Reducer:
    """Average the gradients of `parameters`, {name: parameter}, over `group` while backward runs.

    - limits: the sizes of the buckets in bytes, from the second pass on; the first pass, in which
      the order of gradients is not known yet, has one bucket of each kind, unless it is
      `limited_at_once`.
    - start: the way to sum a bucket, see `bucket_sums`; `hooked` says that it divides by K itself.
    - sparse: the parameters with sparse gradients.
    - as_view: whether gradients are views of the buckets.
    - dtype: that of the buckets, or None for the parameters'.
    """

    reason = UNUSED  # the usual cause of a pass without an end
    keeps_buckets = False  # whether buckets are not laid out again after the first pass
    running = 0  # how many backward passes of this process have come to outputs of a wrapper

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
        self.allows_grad = False  # In `no_sync` a program may ask for gradients of this rank alone.
        self.current = None  # the `Pass` that runs, from `begin` to `finish`
        self.awaited = None  # the newest `ForwardPass`, until its backward pass has ended
        self.number = None  # autograd's number of the backward pass that is running here
        self.local = False  # whether the running pass is not to be synchronised
        self.forward = None  # the `ForwardPass` to whose outputs the running pass came
        self.order = []  # the parameters' indices, in the order of gradients in the first pass
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

        self.accumulators = accumulators_of(self.parameters)
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

    @uncompiled
    def expect(self, outputs, local=False):
        """Prepare to synchronise backward passes from `outputs`, unless they are `local`.

        Return the outputs that the loss is to use.
        """
        # A backward pass before this may have ended with an exception.
        if backward_pass() == -1:
            self.number = None
            self.forward = None
            Reducer.running = 0
        if local:
            self.awaited = ForwardPass(local)
            return listen_to_each(outputs, partial(self.begin, self.awaited))
        self.awaited = ForwardPass(local, self.unused_behind(outputs))
        return self.listen_to(outputs, partial(self.begin, self.awaited))

    def unused_behind(self, outputs):
        """Return the indices of the parameters without a gradient in a pass from `outputs`."""
        return ()

    def listen_to(self, outputs, begin):
        """Have `begin` called where a backward pass comes to `outputs`; return `outputs`."""
        return listen_to_each(outputs, begin)

    def check_finished(self):
        """Raise RuntimeError, with names, if a pass began in which not all buckets have left."""
        if self.current and self.current.ready:
            missing = {
                index: name
                for index, name in enumerate(self.names)
                if index not in self.current.ready
            }
            raise RuntimeError(not_finished(missing, dist.get_rank(self.group), self.reason))

    def rebuild(self):
        """Lay the buckets out again, as rank 0 does, once after the first synchronised pass.

        Raises MismatchError if a rank has run another pass meanwhile, as for an evaluation.
        """
        self.check_finished()
        if self.keeps_buckets or self.rebuilt or not self.order:
            return
        plan = torch.tensor([*self.order, *self.limits], device=self.parameters[0].device)
        with wire.naming_absent(self.group):
            dist.broadcast(plan, group_src=0, group=self.group)
        # The processor waits for a GPU here, but only once.
        numbers = plan.tolist()
        order = numbers[: len(self.order)]
        limits = numbers[len(self.order) :]
        if sorted(order) != sorted(self.order):
            raise MismatchError(OUT_OF_STEP)
        self.rebuilt = True
        self.make_buckets(bucket_assignment(self.parameters, limits, self.sparse, order))

    # The backward pass calls the next methods.

    @uncompiled
    def begin(self, forward, *_):
        """Begin a pass, since a backward pass has come to the outputs of `forward`.

        This is a hook on outputs. Raises RuntimeError if another pass has begun and not ended, and
        for gradients that `torch.autograd.grad` would return without an average.
        """
        number = backward_pass()
        if self.number != number:
            Reducer.running += 1
            after_backward(partial(self.leave, self.number, self.local, self.forward))
            self.number = number
            self.local = True
        if forward.local:
            return
        if not self.allows_grad and returned_by_grad(self.accumulators):
            raise RuntimeError(RETURNED)
        self.local = False
        self.forward = forward
        if self.current and self.current.number == number:  # The loss has several forward passes.
            self.current.unused = [i for i in self.current.unused if i in forward.unused]
        elif self.current and self.current.forward is forward:  # Another part of the pass comes.
            self.current.number = number
        else:
            self.check_finished()
            self.start_pass()

    def start_pass(self):
        """Expect the gradients of a new backward pass."""
        self.current = Pass(self.buckets, self.forward, self.number)

    def leave(self, number, local, forward):
        """Go on with the pass around one that has ended, if there is one; autograd calls this.

        Raises RuntimeError for parameters of whose gradients nobody hears any more.
        """
        if self.current and len(self.current.ready) < len(self.parameters):
            self.check_accumulators()
        self.number = number
        self.local = local
        self.forward = forward
        Reducer.running = max(0, Reducer.running - 1)
        # The pass may have led to no parameter of this model.
        if self.current and not self.current.ready:
            self.current = None

    def check_accumulators(self):
        """Raise RuntimeError, with names, if parameters have other accumulators than at first.

        A parameter gets another one with another dtype, or with memory by `Tensor.set_`.
        """
        names = []
        known = zip(self.names, self.parameters, self.accumulators, strict=True)
        for name, parameter, accumulator in known:
            if parameter.requires_grad and accumulators_of([parameter]) != [accumulator]:
                names.append(name)
        if names:
            raise RuntimeError(converted(names))

    @uncompiled
    def gradient_ready(self, index):
        """Take in the gradient of parameter `index`, which was just accumulated; this is a hook.

        The parameter may also have no gradient.
        """
        if self.number is None:
            self.begin_unseen(index)
        if self.local:
            return
        # A pass inside this one may have taken its place.
        if self.current is None and self.forward:
            self.start_pass()
        if self.current:
            for complete in self.completed_by(index):
                self.mark_ready(complete)

    def begin_unseen(self, index):
        """Begin a pass with a gradient, where a backward pass came to no outputs of this wrapper.

        The outputs may be hidden in an object. Raises RuntimeError if no forward pass waits for its
        backward pass.
        """
        if self.awaited:
            self.begin(self.awaited)
        elif Reducer.running:
            # Another wrapper has this parameter, too, and averages its gradient.
            self.local = True
        else:
            raise RuntimeError(bypassed(self.names[index]))

    def completed_by(self, index):
        """Return the parameters that are complete in this pass with a gradient of `index`."""
        return [index]

    def mark_ready(self, index):
        """Put a gradient into its bucket, and send off every bucket whose turn it is.

        Raises RuntimeError for a gradient that was ready before in this pass.
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
        """Start to sum the next buckets in line that are full; queue the end after the last."""
        waits = self.current.waits
        while len(waits) < len(self.buckets) and not self.current.missing[len(waits)]:
            bucket = self.buckets[len(waits)]
            waits.append(self.start(self.as_grad_bucket(bucket, bucket.flat)))
        if len(waits) == len(self.buckets):
            self.all_sent()
            after_backward(self.finish)

    def as_grad_bucket(self, bucket, flat):
        """Return a bucket as hooks see it, with the contents `flat`."""
        is_last = bucket.index == len(self.buckets) - 1
        return GradBucket(bucket.index, flat, bucket.parameters, is_last)

    def all_sent(self):
        """Do nothing when the last bucket has left; a subclass may send something more."""

    @uncompiled
    @torch.no_grad()
    def finish(self):
        """Wait for all buckets and hand the averages out; autograd calls this at a pass's end."""
        ended = self.current
        self.current = None
        if self.awaited is ended.forward:
            self.awaited = None
        if not self.rebuilt:
            self.order = list(ended.ready)
        with wire.span("wait"):
            untouched = self.untouched()
            for bucket, wait in zip(self.buckets, ended.waits, strict=True):
                bucket.hand_out(wait(), untouched)

    def untouched(self):
        """Return the parameters whose gradients stay, as no rank used them since the last pass."""
        return ()

    # A rank without data calls the next method.

    def shadow(self):
        """Take part, with zeros, in the collectives of one backward pass of the other ranks."""
        waits = [self.start(self.as_grad_bucket(bucket, bucket.zeros())) for bucket in self.buckets]
        for wait in waits:
            wait()
        if not self.rebuilt:
            self.order = list(range(len(self.parameters)))


def listen_to_each(outputs, begin):
    """Have `begin` called where a backward pass comes to a tensor in `outputs`; return these."""
    for tensor in tensors_in(outputs):
        if tensor.grad_fn is not None:
            tensor.register_hook(begin)
    return outputs
