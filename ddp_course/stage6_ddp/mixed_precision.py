"""`mixed_precision=`: compute and communicate in few bits, keep the weights in all of theirs.

    weights, float32 --cast--> low --forward, backward--> gradient, low --cast--> gradient, float32
                                                                                     |
    weights <--optimizer-- gradient, float32 <--cast-- bucket in reduce_dtype <--cast+

The casts are ordinary operations in the graph, so autograd finds the way back by itself, and
nothing has to be undone after an exception or in evaluation. Between passes all is float32:
optimizer, checkpoints, accumulated gradients. A bucket in half precision has half the bytes.
`torch.autocast` works otherwise: it chooses a precision for each operation, and communicates in
float32.
"""

import torch
from torch.func import functional_call

from ..running.torch_inside import tree_map_only


class LowPrecision:
    """A module that computes in few bits. `wanted` has the fields of torch's `_MixedPrecision`, a
    dtype or None each:

    param_dtype: of weights and inputs in forward. reduce_dtype: of the buckets; without one,
    param_dtype. buffer_dtype: of the module's floating-point buffers, from now on.
    """

    def __init__(self, wanted, module, ignored):
        self.compute, self.communicate = (
            wanted.param_dtype,
            wanted.reduce_dtype or wanted.param_dtype,
        )
        self.module, self.ignored = module, ignored
        for name, buffer in module.named_buffers():
            if name not in ignored and buffer.is_floating_point() and wanted.buffer_dtype:
                buffer.data = buffer.to(wanted.buffer_dtype)

    def __call__(self, *inputs, **kwargs):
        """Run the module with low-precision weights and inputs."""
        if self.compute is None:
            return self.module(*inputs, **kwargs)
        weights = {
            n: p
            for n, p in self.module.named_parameters()
            if n not in self.ignored and p.is_floating_point()
        }
        low = {name: parameter.to(self.compute) for name, parameter in weights.items()}
        cast = lambda tensor: tensor.to(self.compute) if tensor.is_floating_point() else tensor  # noqa: E731
        return functional_call(
            self.module, low, *tree_map_only(torch.Tensor, cast, (inputs, kwargs))
        )
