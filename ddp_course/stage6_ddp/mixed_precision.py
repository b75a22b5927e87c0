"""`mixed_precision=`: compute and communicate in few bits, and keep the weights in all of theirs.

    weights, float32 --cast--> low --forward, backward--> gradient, low --cast--> gradient, float32
                                                                                     |
    weights <--optimizer-- gradient, float32 <--cast-- bucket in reduce_dtype <--cast+

The casts are ordinary operations in the graph, so autograd finds the way back by itself. Between
passes all is float32: optimizer, checkpoints, accumulated gradients. Only an exception in backward
leaves low weights in the module, until the next forward pass. A bucket in half precision has half
the bytes. `torch.autocast` works otherwise: it chooses a precision for each operation, and
communicates in float32.
"""

from contextlib import ExitStack

import torch
from torch.func import functional_call

from manyranks.torch_inside import after_backward, backward_pass, tensors_in, tree_map_only

from ..base.torch_private import uncompiled, with_weights


class LowPrecision:
    """A module that computes in few bits.

    `wanted` has the fields of torch's `_MixedPrecision`, each of them a dtype or None:
    `param_dtype` is for weights and inputs in forward, `reduce_dtype` for the buckets (None: as
    `param_dtype`), and `buffer_dtype` for the module's floating-point buffers, from now on.
    """

    def __init__(self, wanted, module, ignored):
        self.compute = wanted.param_dtype
        self.communicate = wanted.reduce_dtype or wanted.param_dtype
        self.module = module
        self.ignored = ignored
        self.in_backward = ExitStack()  # what a backward pass leaves: the low-precision weights
        self.latest_pass = -1  # the number of the latest backward pass, from 0; -1 before the first
        for name, buffer in module.named_buffers():
            if name not in ignored and buffer.is_floating_point() and wanted.buffer_dtype:
                buffer.data = buffer.to(wanted.buffer_dtype)

    def __call__(self, *inputs, **kwargs):
        """Run the module with low-precision weights and inputs."""
        if self.compute is None:
            return self.module(*inputs, **kwargs)
        # The pass before may have ended with an exception.
        self.in_backward.close()
        low_inputs, low_kwargs = tree_map_only(torch.Tensor, self.cast, (inputs, kwargs))
        outputs = functional_call(self.module, self.weights(), low_inputs, low_kwargs)
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(self.enter_backward)
        return outputs

    def cast(self, tensor):
        """Return a floating-point tensor in low precision, and any other tensor as it is."""
        return tensor.to(self.compute) if tensor.is_floating_point() else tensor

    # Hooks run without recording gradients, but these copies must lead back to the weights.
    @torch.enable_grad()
    def weights(self):
        """Return {name: low-precision weight}, computed from the module's own weights."""
        return {
            name: parameter.to(self.compute)
            for name, parameter in self.module.named_parameters()
            if name not in self.ignored and parameter.is_floating_point()
        }

    @uncompiled
    def enter_backward(self, gradient):
        """Give the module low-precision weights for a backward pass; this is a hook on outputs.

        Activation checkpointing runs parts of the module again, and needs them.
        """
        if backward_pass() != self.latest_pass:
            self.latest_pass = backward_pass()
            self.in_backward.enter_context(with_weights(self.module, self.weights()))
            after_backward(self.in_backward.close)
