"""Stage 5: the ring starts while the backward pass still runs.

Backward finishes the last layers' gradients first, and a hook on each parameter reports them. As
soon as all gradients of a bucket are there, a communication thread reduces the bucket while
backward computes the next one:

    backward       | bucket 0 | bucket 1 | bucket 2 |
    communication             | ring 0   | ring 1   | ring 2 |  only the end of ring 2 is not hidden
    update                                                   | step |

Buckets are filled in reverse parameter order, roughly the order of backward, and always reduced in
index order: ranks that disagreed on the order would add up different parameters. Source: Li et al.,
PyTorch Distributed, VLDB 2020.
"""

import weakref
from functools import partial

import torch
import torch.distributed as dist
from torch.optim import SGD

from manyranks.torch_inside import after_backward

from . import wire
from .base.losses import cross_entropy
from .base.torch_private import accumulators_of, uncompiled
from .before_bucketing import check_backward, check_gradient, check_model, check_pass, refuse
from .communication import communication_thread, keep_for_backward
from .stage3_paramserver import broadcast_parameters, trainable, views_into
from .stage4_ring import ring_all_reduce

DEFAULT_CAP_MB = 25.0


class Bucket:
    """Parameters whose gradients travel together.

    `flat` is the message, and `views[p]` is the place in it for the gradient of p. `missing` has
    the parameters whose gradient has not come in this pass.
    """

    def __init__(self, parameters):
        length = sum(parameter.numel() for parameter in parameters)
        self.flat = parameters[0].new_zeros(length, requires_grad=False)
        self.views = dict(zip(parameters, views_into(self.flat, parameters), strict=True))
        self.missing = set(parameters)

    def put_gradient(self, parameter):
        """Note that the gradient of `parameter` is ready, and make it a view into the bucket."""
        check_gradient(parameter, self)
        parameter.grad = self.views[parameter].copy_(parameter.grad)
        self.missing.remove(parameter)


def assign_buckets(parameters, bucket_cap_mb=DEFAULT_CAP_MB):
    """Group `parameters`, last first, into lists of one dtype and device.

    A list is closed when it reaches `bucket_cap_mb` MiB. With the default cap the first bucket of a
    kind closes at 1 MiB, so that communication can start early. Raises ValueError for a cap that is
    not positive.
    """
    if not bucket_cap_mb > 0:
        raise ValueError(
            f"bucket_cap_mb is {bucket_cap_mb}; it must be a positive number of MiB, such as 25"
        )
    first_cap_mb = 1.0 if bucket_cap_mb == DEFAULT_CAP_MB else bucket_cap_mb
    caps_mb = {}  # {kind: the cap of its second and all later buckets}
    filling = {}  # {kind: the members of its open bucket}
    closed = []
    for parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        members = filling.setdefault(kind, [])
        members.append(parameter)
        nbytes = sum(member.numel() * member.element_size() for member in members)
        if nbytes >= caps_mb.get(kind, first_cap_mb) * 2**20:
            closed.append(filling.pop(kind))
            caps_mb[kind] = bucket_cap_mb
    return closed + list(filling.values())


class BucketedDDP(torch.nn.Module):
    """Data parallel training in which gradients are averaged by the time `backward()` returns.

    Every parameter must take part in every backward pass. Gradients are views of the buckets: each
    pass overwrites those of the last. `all_reduce(tensor, group=…)` sums in place:
    `ring_all_reduce` or `torch.distributed.all_reduce`. Raises ValueError if nothing is trainable,
    MismatchError if models differ between ranks.
    """

    def __init__(
        self, module, bucket_cap_mb=DEFAULT_CAP_MB, process_group=None, all_reduce=ring_all_reduce
    ):
        super().__init__()
        self.inventory = check_model(module, process_group)
        broadcast_parameters(module, group=process_group)
        self.module = module
        self.process_group = process_group
        self.all_reduce = all_reduce
        parameters = trainable(module)
        self.buckets = [Bucket(members) for members in assign_buckets(parameters, bucket_cap_mb)]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}
        # The thread sends buckets in the order of their arrival.
        self.communication = communication_thread(process_group)
        self.accumulators = accumulators_of(parameters)
        self.start_over()
        # The hooks stay with the parameters, and must not keep this alive.
        this = weakref.ref(self)

        def report(parameter):
            if wrapper := this():
                wrapper.gradient_ready(parameter)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(report)

    def forward(self, *args, **kwargs):
        """Run the module.

        Raises RuntimeError if an exception cut the last backward pass short when buckets had left,
        or if parameters were frozen, unfrozen or replaced.
        """
        check_pass(self)
        self.start_over()
        outputs = keep_for_backward(self, self.module(*args, **kwargs))
        return check_backward(self.accumulators, outputs)

    @uncompiled
    def start_over(self):
        """Expect every gradient, so that nothing is left of a backward pass that failed.

        This runs after each backward pass, and before each forward pass.
        """
        self.in_backward = False
        self.waits = []  # a function for each bucket that has left, which waits for its sum
        for bucket in self.buckets:
            bucket.missing = set(bucket.views)
            for parameter in bucket.views:
                vars(parameter).pop("bucket", None)

    @uncompiled
    def gradient_ready(self, parameter):
        """Put a gradient that has just become complete into its bucket, in the middle of backward.

        Buckets that are full leave, in the order of their indices.
        """
        if not self.in_backward:
            self.in_backward = True
            # torch will call `finish` when the pass ends: `torch.autograd.graph.queue_callback`.
            after_backward(self.finish)
        self.bucket_of[parameter].put_gradient(parameter)
        while len(self.waits) < len(self.buckets) and not self.buckets[len(self.waits)].missing:
            flat = self.buckets[len(self.waits)].flat
            self.waits.append(self.communication.start(partial(self.reduce, flat), flat.device))

    def reduce(self, flat, group):
        """Average one bucket over the ranks, in the communication thread."""
        flat.mul_(1 / dist.get_world_size(group))
        self.all_reduce(flat, group=group)

    @uncompiled
    def finish(self):
        """Wait for all buckets before `backward()` returns, and get ready for the next pass."""
        with wire.span("wait"):
            for wait in self.waits:
                wait()
        unused = sum(len(bucket.missing) for bucket in self.buckets)
        refuse(unused, f"{unused} parameters got no gradient in this pass; stage 6 allows that")
        self.start_over()

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "BucketedDDP has hooks and a thread, which cannot be copied: copy its `module` and wrap"
            " that"
        )


def train(model, batches, lr, bucket_cap_mb=DEFAULT_CAP_MB, loss=cross_entropy, optimizer=SGD):
    """Train `model` in place on this rank's share of each batch; return its losses."""
    parallel = BucketedDDP(model, bucket_cap_mb)
    optimizer = optimizer(model.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        step_loss = loss(parallel(inputs), targets)
        step_loss.backward()
        optimizer.step()
        losses.append(step_loss.item())
    return losses
