"""What code written for torch's class asks for: names with an underscore, and what has become of older ones."""

import warnings

import torch.distributed as dist

from .buckets import MIB
from .buffers import broadcast_tensors


def warn_of_old_names(broadcast_buffers, forward_sync_buffers, check_reduction):
    """Say what to write instead of arguments that torch is about to drop."""
    if broadcast_buffers is not None:
        ignored = "; forward_sync_buffers is given too, so it is ignored" if forward_sync_buffers is not None else ""
        warnings.warn(
            "broadcast_buffers is deprecated. Use forward_sync_buffers, which differs in one thing: when False, "
            f"buffers are still made equal once, at the beginning{ignored}",
            FutureWarning,
            stacklevel=3,
        )
    if check_reduction:
        warnings.warn("check_reduction is deprecated and has no effect", FutureWarning, stacklevel=3)


class TorchNames:
    """The part of DistributedDataParallel that is not documented in torch, but used."""

    @property
    def broadcast_buffers(self):
        """The older name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value):
        self.forward_sync_buffers = value

    @property
    def bucket_bytes_cap_list(self):
        """`bucket_cap_mb_list` in bytes, empty without one."""
        return [int(cap * MIB) for cap in self.bucket_cap_mb_list or []]

    def _set_static_graph(self):
        """As `static_graph=True` in the constructor; before the first forward pass."""
        if self.static_graph:
            return warnings.warn("static_graph is True already", stacklevel=2)
        if self.started:
            raise RuntimeError("_set_static_graph() should be called before training loop starts, right after wrapping")
        self.static_graph = True
        self.make_reducer()

    def _set_ddp_sink_clone(self, val):
        """Whether outputs are copied on the way out, where the end of backward has to be found (the default).

        Without the copy, an output must not be modified in place.
        """
        self.clones_outputs = val

    def _remove_autograd_hooks(self):
        """Stop listening to the gradients, for good."""
        self.reducer.silence()

    def _default_broadcast_coalesced(self, bufs=None, bucket_size=None, authoritative_rank=0):
        """Overwrite the buffers, or the tensors `bufs`, with those of rank `authoritative_rank`."""
        tensors = self.named_buffers_in_sync().values() if bufs is None else bufs
        broadcast_tensors(tensors, authoritative_rank, self.process_group)

    def _register_builtin_comm_hook(self, comm_hook_type):
        """torch's built-in hooks, `torch.distributed.BuiltinCommHookType`: plain and fp16 all-reduce."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # slow to import

        hooks = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
        self.register_comm_hook(self.process_group, hooks[comm_hook_type.name])

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module, params_and_buffers_to_ignore):
        """Leave these names out of everything; call it before wrapping `module`."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore

    @staticmethod
    def _get_data_parallel_params(module, named_params=False):
        """Yield the parameters of `module`, or pairs with their names, that are not ignored."""
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        for name, parameter in module.named_parameters():
            if name not in ignored:
                yield (name, parameter) if named_params else parameter

    def _get_ddp_logging_data(self):
        """Settings and the state of the buckets (sizes in bytes), under torch's names, as far as they apply."""
        reducer = self.reducer
        found = {
            "module_name": type(self.module).__name__,
            "rank": dist.get_rank(self.process_group),
            "world_size": dist.get_world_size(self.process_group),
            "num_parameter_tensors": len(reducer.parameters),
            "total_parameter_size_bytes": sum(self.first_sizes),
            "bucket_sizes": ", ".join(map(str, self.first_sizes)),
            "has_rebuilt_buckets": int(reducer.rebuilt),
            "broadcast_buffers": int(self.forward_sync_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "join_uneven_inputs": int(self.joins),
        }
        return found | ({"rebuilt_bucket_sizes": ", ".join(map(str, reducer.sizes))} if reducer.rebuilt else {})
