"""When each bucket leaves. The reducer listens to every gradient and keeps the ranks' collectives in one order.

    forward     expect(): the next backward pass is to be synchronised
    backward    gradient_ready(), once a parameter: into its bucket; a full bucket leaves, in index order
                the last one has left: finish() is queued, and autograd calls it before backward() returns
    forward     rebuild(), once: new buckets, in the order in which gradients really became ready

Ranks may finish their gradients in different orders, but bucket 1 never leaves before bucket 0: otherwise two ranks
could add different buckets up. For the same reason it is rank 0's order that all ranks rebuild their buckets by.
"""

import weakref

import torch
import torch.distributed as dist

from ..running import wire
from ..running.event_clock import clock_of
from ..running.torch_inside import after_backward
from . import in_backward
from .automatic import best_limits
from .buckets import Bucket, SparseBucket, assign_buckets
from .communication import GradBucket
from .unused import not_finished, ready_twice, used_anew, used_anywhere, used_by


class Reducer:
    """Average the gradients of `parameters`, {name: parameter}, over `group` while backward runs.

    `limits` are the bucket sizes in bytes of the first pass, and those afterwards; `sparse` are the parameters with
    sparse gradients, `start` is a way to communicate, `dtype` that of the buckets (None: the parameters').
    With `find_unused` or `static_graph` some parameters may get no gradient.
    """

    def __init__(
        self,
        parameters,
        group,
        limits,
        start,
        sparse=(),
        as_view=False,
        dtype=None,
        find_unused=False,
        static_graph=False,
    ):
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.index_of = {parameter: index for index, parameter in enumerate(self.parameters)}
        self.sparse = {self.index_of[parameter] for parameter in sparse if parameter in self.index_of}
        self.group, self.limits, self.start, self.as_view, self.dtype = group, limits[1], start, as_view, dtype
        self.find_unused, self.static_graph = find_unused, static_graph
        self.keeps_layout = find_unused and not static_graph  # the order may change: rebuilding makes no sense
        self.lends = not (as_view or find_unused or static_graph)  # an untouched gradient must stay where it is
        self.divisor, self.hooked, self.in_backward = dist.get_world_size(group), False, set()
        self.order, self.rebuilt, self.expecting = [], False, False
        self.used = [0] * len(self.parameters)
        self.use_seen = [0] * len(self.parameters)  # by how many ranks, in the last pass that asked
        self.counts = None  # static_graph: how often each gradient was computed in the first iteration
        self.post_backward = []
        self.link, self.clock, self.moments = None, None, []  # for bucket_cap_mb="auto", see `measure`
        self.make_buckets(assign_buckets(self.parameters, limits[0], self.sparse)[::-1])
        self.listen()

    def measure(self, alpha, beta):
        """Lay the buckets out by what a message costs here, and by when each gradient is ready in the first pass."""
        self.link, self.clock = (alpha, beta), clock_of(self.parameters[0].device)

    def listen(self):
        """Hook every parameter's gradient accumulator; the hooks do not keep this reducer alive."""
        with torch.enable_grad():
            self.accumulators = [p.view_as(p).grad_fn.next_functions[0][0] for p in self.parameters]
        this = weakref.ref(self)
        hooks = [node.register_hook(passing_on(this, index)) for index, node in enumerate(self.accumulators)]
        self.silence = weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    def make_buckets(self, layout):
        """Allocate one bucket for each list of parameter indices in `layout`."""
        self.buckets, self.home = [], [None] * len(self.parameters)
        for members in layout:
            kind = SparseBucket if members[0] in self.sparse else Bucket
            parameters = [self.parameters[index] for index in members]
            bucket = kind(len(self.buckets), parameters, self.as_view, self.lends, self.dtype)
            self.buckets.append(bucket)
            for slot, index in enumerate(members):
                self.home[index] = bucket, slot
        self.start_over()

    def start_over(self):
        """Get ready for the next backward pass: no gradient is there, no bucket has left."""
        self.ready, self.waits, self.unused_here, self.remaining = set(), [], [], None
        self.delayed = False
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    # In forward

    def expect(self, outputs=None):
        """The next backward pass is to be synchronised; from the tensors `outputs` find what it will not reach."""
        self.start_over()
        self.expecting, self.order, self.moments = True, [], []
        if self.counts is not None:
            self.remaining = list(self.counts)
            self.unused_here = [index for index, count in enumerate(self.counts) if count == 0]
        elif outputs:
            used = used_by(outputs)
            self.unused_here = [index for index, p in enumerate(self.parameters) if p not in used]

    def check_finished(self):
        """Raise RuntimeError, naming parameters, if a backward pass began and not all buckets left."""
        if self.ready and self.expecting:
            missing = {index: name for index, name in enumerate(self.names) if index not in self.ready}
            raise RuntimeError(not_finished(missing, dist.get_rank(self.group), self.static_graph, self.find_unused))

    def rebuild(self):
        """Once, after the first synchronised backward pass: lay the buckets out again, in rank 0's order."""
        self.check_finished()
        if self.rebuilt or len(self.order) != len(self.parameters) or self.keeps_layout:
            return
        if self.link:
            self.clock.finish()
            moments = [self.clock.seconds(mark) for mark in self.moments]
            self.limits = best_limits(self.parameters, self.sparse, self.order, moments, *self.link)
        plan = torch.tensor([*self.order, *self.limits], device=self.parameters[0].device)
        dist.broadcast(plan, group_src=0, group=self.group)
        order, limits = plan.tolist()[: len(self.order)], plan.tolist()[len(self.order) :]
        self.rebuilt, self.buckets, self.home = True, [], []  # frees the old buckets before the new ones are made
        self.make_buckets(assign_buckets(self.parameters, limits, self.sparse, order))

    @property
    def layout(self):
        """The names of the parameters in each bucket."""
        return [[self.names[self.index_of[parameter]] for parameter in bucket.parameters] for bucket in self.buckets]

    @property
    def sizes(self):
        """The bytes in each bucket."""
        return [sum(p.numel() * p.element_size() for p in bucket.parameters) for bucket in self.buckets]

    def lay_out(self, layout):
        """Take the buckets of `layout`, lists of names, as after a rebuild; ValueError if they do not fit."""
        if sorted(name for names in layout for name in names) != sorted(self.names):
            raise ValueError("the buckets are of another model: they do not have each of its parameters once")
        self.check_finished()
        index_of = {name: index for index, name in enumerate(self.names)}
        self.rebuilt = True
        self.make_buckets([[index_of[name] for name in names] for names in layout])

    # In backward

    def gradient_ready(self, index):
        """The hook: the gradient of parameter `index` has just been accumulated (or there is none to accumulate)."""
        if self.keeps_layout and self.parameters[index].grad is not None:
            self.used[index] = 1  # counts in no_sync passes too: the accumulated gradient will be averaged later
        if not self.expecting:
            return
        while self.unused_here:
            self.mark_ready(self.unused_here.pop(0))
        if self.static_graph and not self.one_of_its_last(index):
            return
        self.mark_ready(index)

    def one_of_its_last(self, index):
        """With a static graph a gradient may be computed in several parts; only the last completes it."""
        if self.remaining is None:  # the first iteration only counts; `reduce_all` follows at its end
            self.ready.add(index)
            self.used[index] += 1
            return False
        self.remaining[index] -= 1
        if self.remaining[index] < 0:
            raise RuntimeError(used_anew(self.names[index]))
        return self.remaining[index] == 0

    def mark_ready(self, index):
        """Put a gradient into its bucket, and send off every bucket whose turn it is."""
        if index in self.ready:
            raise RuntimeError(ready_twice(self.names[index]))
        self.ready.add(index)
        if not self.rebuilt:
            self.order.append(index)
            if self.link:
                self.moments.append(self.clock.now(self.parameters[index].device))
        (bucket, slot), divisor = self.home[index], 1 if self.hooked else self.divisor
        bucket.take(slot, divisor)
        bucket.missing -= 1
        if not bucket.missing:
            bucket.fill(divisor)
            self.send_off()

    def send_off(self):
        """Start communication for the next buckets in line that are full; after the last one, queue the end."""
        while len(self.waits) < len(self.buckets) and not self.buckets[len(self.waits)].missing:
            self.waits.append(self.start(self.as_grad_bucket(self.buckets[len(self.waits)])))
        if len(self.waits) == len(self.buckets):
            if self.keeps_layout:
                self.use_counts = used_anywhere(self.used, self.parameters[0].device, self.group)
            after_backward(self.finish)

    def as_grad_bucket(self, bucket, flat=None):
        """`bucket` as hooks see it; with other contents if `flat` is given."""
        is_last = bucket.index == len(self.buckets) - 1
        flat, views = (bucket.flat, bucket.views) if flat is None else (flat, bucket.views_of(flat))
        return GradBucket(bucket.index, flat, views, bucket.parameters, is_last)

    def first_backward(self):
        """A static graph's first backward pass begins: everything is reduced at its end, once."""
        if self.expecting and not self.delayed:
            self.delayed = True
            after_backward(self.reduce_all)

    def reduce_all(self):
        """The end of a static graph's first iteration: all gradients are there, in however many parts they came."""
        self.counts, self.use_counts = self.used, used_anywhere(self.used, self.parameters[0].device, self.group)
        self.ready = set()
        for index in range(len(self.parameters)):
            self.mark_ready(index)
        self.order = []

    @torch.no_grad()
    def finish(self):
        """Called by autograd before `backward()` returns: wait for all buckets and hand the averages out."""
        waits, post_backward, self.post_backward = self.waits, self.post_backward, []
        self.expecting = False
        self.start_over()
        with wire.span("wait"):
            untouched = self.unused_everywhere()
            for bucket, wait in zip(self.buckets, waits, strict=True):
                result = wait()
                if bucket.flat is None or result.is_sparse:
                    bucket.flat = result
                elif result.data_ptr() != bucket.flat.data_ptr():
                    bucket.flat.copy_(result.view(-1))
                bucket.give(untouched)
                if self.in_backward:
                    in_backward.step([parameter for parameter in bucket.parameters if parameter in self.in_backward])
            for future in post_backward:
                future.wait()

    def unused_everywhere(self):
        """The parameters that no rank has used since the last synchronised pass: their gradients stay untouched."""
        if not self.find_unused and self.counts is None:
            return ()
        if self.keeps_layout or not hasattr(self, "idle"):
            self.use_seen = self.use_counts()
            self.idle = {p for p, count in zip(self.parameters, self.use_seen, strict=True) if count == 0}
            self.used = [0] * len(self.parameters)
        return self.idle

    # For ranks without data

    def shadow(self):
        """Take part in the collectives of one backward pass of the others, with zeros."""
        zeros = [bucket.zeros() for bucket in self.buckets]
        waits = [self.start(self.as_grad_bucket(*pair)) for pair in zip(self.buckets, zeros, strict=True)]
        if self.keeps_layout:  # as torch does, it repeats the last bitmap that it saw: what was used remains in use
            self.use_seen = used_anywhere(self.use_seen, self.parameters[0].device, self.group)()
        for wait in waits:
            wait()
        if not self.rebuilt:
            self.order = list(range(len(self.parameters)))
            self.moments = [0.0] * len(self.parameters)


def passing_on(this, index):
    """A hook that tells the reducer behind the weak reference `this`, if it still lives, that a gradient is ready."""

    def hook(nothing, gradients):
        reducer = this()
        if reducer is not None:
            reducer.gradient_ready(index)

    return hook
