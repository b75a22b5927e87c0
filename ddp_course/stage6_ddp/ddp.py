"""The wrapper, which puts the other files together behind the interface of torch's own class.

wrapping    the module is checked, rank 0's weights are broadcast, buckets are laid out, and the
            reducer listens to every gradient
forward     buckets are laid out again, once; buffers are broadcast; the module runs; the
            reducer expects a backward pass
backward    the reducer does all that is left: see `reducer`
"""

from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable

from manyranks.torch_inside import tree_map_only

from ..base.replicas import check_replicas
from ..base.torch_private import unnoticed_by_autograd
from ..same_model import Inventory, same_on_all_ranks
from . import before_training
from .bucket_sums import by_algorithm, by_backend, by_hook
from .buckets import size_limits
from .buffers import broadcast_tensors
from .graphs import FindUnused, StaticGraph
from .mixed_precision import LowPrecision
from .reducer import Reducer
from .uneven import Shadow, active_ranks, any_synchronises, common_rank


class DistributedDataParallel(torch.nn.Module, Joinable):
    """A drop-in for `torch.nn.parallel.DistributedDataParallel` on gloo and NCCL, in Python.

    Gradients are averaged over `process_group` by the time `backward()` returns. Arguments as
    torch's:

    - module: its parameters and buffers must not be exchanged afterwards.
    - device_ids, output_device: None, or one GPU to which inputs are moved.
    - forward_sync_buffers, broadcast_buffers: broadcast rank 0's buffers before every forward pass
      (the default). The older name, when False and alone, leaves them out of the first
      synchronisation too.
    - init_sync: check that models agree and broadcast rank 0's parameters.
    - process_group or device_mesh (one-dimensional): the ranks to average over.
    - bucket_cap_mb: bucket size in MiB, None for 25 with a first bucket of 1. bucket_cap_mb_list:
      the sizes of the first, second, … bucket.
    - find_unused_parameters, static_graph: for models whose parameters do not all get a gradient in
      each pass.
    - gradient_as_bucket_view: gradients stay in the buckets from pass to pass; saves their memory
      and two copies.
    - mixed_precision: torch's `_MixedPrecision`, the dtypes to compute and to communicate in.
    - all_reduce (not torch's): one of ours, `all_reduce(tensor, group=…)`, summing in place; None
      is the backend's own.

    Without effect: dim, check_reduction, batched_grad_copy, skip_all_reduce_unused_params,
    lazy_bucket_allocation. NotImplementedError refuses delay_all_reduce_named_params,
    param_to_hook_all_reduce and require_manual_backward_finalization. Raises RuntimeError if
    nothing is trainable or (MismatchError) models differ between ranks, ValueError for impossible
    settings and for models whose parameters are sharded. Source: Li et al., PyTorch Distributed,
    VLDB 2020, and the documented behaviour of torch 2.15.
    """

    def __init__(
        self,
        module,
        device_ids=None,
        output_device=None,
        dim=0,
        broadcast_buffers=None,
        init_sync=True,
        process_group=None,
        bucket_cap_mb=None,
        find_unused_parameters=False,
        check_reduction=False,
        gradient_as_bucket_view=False,
        static_graph=False,
        delay_all_reduce_named_params=None,
        param_to_hook_all_reduce=None,
        mixed_precision=None,
        device_mesh=None,
        skip_all_reduce_unused_params=False,
        bucket_cap_mb_list=None,
        batched_grad_copy=False,
        forward_sync_buffers=None,
        lazy_bucket_allocation=False,
        all_reduce=None,
    ):
        if delay_all_reduce_named_params is not None or param_to_hook_all_reduce is not None:
            raise NotImplementedError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce are not supported"
            )
        super().__init__()
        Joinable.__init__(self)
        self.module = module
        self.process_group = before_training.group_of(process_group, device_mesh)
        self.device_mesh = device_mesh
        self.bucket_cap_mb = bucket_cap_mb
        self.bucket_cap_mb_list = bucket_cap_mb_list
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        self.all_reduce = all_reduce
        self.check_module(device_ids, output_device)
        self.start_equal(init_sync, broadcast_buffers, forward_sync_buffers)
        self.low_precision = None
        if mixed_precision:
            self.low_precision = LowPrecision(mixed_precision, module, self.parameters_to_ignore)
        self.make_reducer()

    @property
    def require_manual_backward_finalization(self):
        """False: gradients are averaged when `backward()` returns. NotImplementedError for True."""
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required):
        if required:
            raise NotImplementedError(
                "require_manual_backward_finalization is not supported: gradients are averaged when"
                " backward() returns"
            )

    def check_module(self, device_ids, output_device):
        """Refuse modules that cannot be trained here, and note the devices."""
        before_training.refuse_modules(self.module)
        self.parameters_to_ignore = set(
            getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        )
        # A layer may refuse even if its parameters are ignored.
        replicated = {**dict(self.module.named_modules()), **dict(self.module.named_parameters())}
        for name in self.parameters_to_ignore:
            replicated.pop(name, None)
        check_replicas(replicated, self.process_group)
        parameters = self.trainable()
        self.device = next(iter(parameters.values())).device
        self.device_ids, self.output_device = before_training.devices_of(
            parameters, device_ids, output_device
        )

    def trainable(self):
        """Return {name: parameter} of those whose gradients are averaged."""
        return before_training.trainable(self.module, self.parameters_to_ignore)

    def start_equal(self, init_sync, broadcast_buffers, forward_sync_buffers):
        """Choose when buffers are broadcast, and if wanted give all ranks rank 0's model now."""
        with_buffers = broadcast_buffers is not False
        self.forward_sync_buffers = with_buffers
        if forward_sync_buffers is not None:
            self.forward_sync_buffers = forward_sync_buffers
            with_buffers = True
        self.buffers_from = 0  # the rank whose buffers are broadcast outside of `join`
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        if init_sync:
            same_on_all_ranks(self.trainable(), self.process_group)
            self.sync_model(0, with_buffers)

    def make_reducer(self):
        """Lay out the buckets and listen to the gradients; unpickling calls this, too."""
        self.has_buffers = bool(self.named_buffers_in_sync())
        group = self.process_group
        start = by_algorithm(self.all_reduce, group) if self.all_reduce else by_backend(group)
        kind = Reducer
        if self.static_graph:
            kind = StaticGraph
        elif self.find_unused_parameters:
            kind = FindUnused
        averaged = self.trainable()
        self.inventory = Inventory(
            self.module, averaged, self.parameters_to_ignore, kind is FindUnused
        )
        self.reducer = kind(
            averaged,
            group,
            size_limits(self.bucket_cap_mb, self.bucket_cap_mb_list),
            start,
            sparse=before_training.sparse_parameters(self.module),
            as_view=self.gradient_as_bucket_view,
            dtype=self.low_precision.communicate if self.low_precision else None,
            limited_at_once=bool(self.bucket_cap_mb_list),
        )

    def forward(self, *inputs, **kwargs):
        """Run the module and prepare the synchronisation of its backward pass.

        In `no_sync` nothing is prepared.
        """
        recording = torch.is_grad_enabled()
        synchronising = recording and self.require_backward_grad_sync
        if recording:
            self.inventory.check()
        self.before_forward()
        if self.device_ids:
            move = partial(torch.Tensor.to, device=self.device, non_blocking=True)
            inputs, kwargs = tree_map_only(torch.Tensor, move, (inputs, kwargs))
        module = self.low_precision or self.module
        outputs = module(*inputs, **kwargs)
        self.require_forward_param_sync = synchronising
        return self.reducer.expect(outputs, not synchronising) if recording else outputs

    def before_forward(self):
        """Take part in an iteration's collectives, in the order that shadowing ranks follow."""
        # The announcement is None outside of `join`.
        announcement = Join.notify_join_context(self)
        self.reducer.divisor = dist.get_world_size(self.process_group)
        if announcement and not self.divides_by_initial_world_size:
            self.reducer.divisor = active_ranks(announcement)
        if torch.is_grad_enabled():
            self.reducer.rebuild()
        if self.syncs_buffers():
            self.sync_buffers()
        # Only ranks without data need the answer.
        if self._join_config.enable:
            any_synchronises(self, self.require_backward_grad_sync)

    @contextmanager
    def no_sync(self):
        """Accumulate gradients on each rank, and do not average them, within this context.

        It counts where the *forward* pass runs, as that prepares the synchronisation of its
        backward pass. The first forward and backward pass after the context average all that was
        accumulated, once.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        self.reducer.allows_grad = True
        try:
            yield
        finally:
            self.require_backward_grad_sync = before
            self.reducer.allows_grad = not before

    def sync_model(self, src, with_buffers):
        """Overwrite parameters, and if wanted buffers, too, with those of rank `src`."""
        parameters = [
            p for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore
        ]
        buffers = list(self.named_buffers_in_sync().values()) if with_buffers else []
        broadcast_tensors(parameters + buffers, src, self.process_group)

    def named_buffers_in_sync(self):
        """Return {name: buffer}, looked up each time, because modules may replace their buffers."""
        return {
            name: buffer
            for name, buffer in self.module.named_buffers()
            if name not in self.parameters_to_ignore
        }

    def syncs_buffers(self):
        """Return whether buffers are broadcast before this forward pass."""
        return self.forward_sync_buffers and self.require_forward_param_sync and self.has_buffers

    def sync_buffers(self, src=None):
        """Broadcast the buffers of rank `src`.

        None stands for rank 0, in `join` for a rank with data, and after it for the last rank.
        """
        if src is None:
            src = self.buffers_from
            if self._join_config.enable:
                src = common_rank(self, candidate=True)
        buffers = self.named_buffers_in_sync().values()
        # An earlier forward pass may have saved a buffer for its backward pass.
        with unnoticed_by_autograd(buffers):
            broadcast_tensors(buffers, src, self.process_group)

    def register_comm_hook(self, state, hook):
        """Let `hook(state, bucket)` average each bucket in place of the default.

        The hook gets a `GradBucket`, whose buffer is not yet divided by K, and returns a
        `torch.futures.Future`. The hooks of `torch.distributed.algorithms.ddp_comm_hooks` run
        unchanged. There can be one hook, before the first backward pass. Raises TypeError for a
        hook that cannot be called, RuntimeError for a second hook.
        """
        if not callable(hook):
            raise TypeError("Communication hook must be callable.")
        if self.reducer.hooked:
            raise RuntimeError("register_comm_hook can only be called once")
        self.reducer.start = by_hook(hook, state)
        self.reducer.hooked = True

    def join(
        self, divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False
    ):
        """Return a context for a training loop in which ranks may run out of data early.

        The module `uneven` says how. With `throw_on_early_termination` all ranks raise RuntimeError
        as soon as one is out of data: that is needed where the model has collectives of its own,
        such as SyncBatchNorm's, which cannot be shadowed.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs):
        """Return what a rank without data does in every iteration of the other ranks."""
        return Shadow(self, kwargs.get("divide_by_initial_world_size", True))

    # The join context counts ranks on this device.
    join_device = property(lambda self: self.device)
    join_process_group = property(lambda self: self.process_group)

    def __getstate__(self):
        if self.process_group != dist.group.WORLD:
            raise RuntimeError(
                "DDP can be pickled with the default process group only; this one has its own"
            )
        state = vars(self).copy()
        del state["process_group"], state["reducer"], state["inventory"]
        return state

    def __setstate__(self, state):
        super().__setstate__(state)
        self.process_group = dist.group.WORLD
        self.make_reducer()
