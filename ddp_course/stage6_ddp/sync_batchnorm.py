"""Batch normalisation over the whole batch, not over this rank's share of it.

`torch.nn.SyncBatchNorm` needs a GPU; this one runs anywhere. The statistics of a channel take one
collective in the forward pass. Each rank contributes its count n, mean m and sum of squared
deviations s, and they are combined by

    mean = sum n m / N        var = (sum s + n (m - mean)^2) / N        N = sum n

which stays exact where the mean is large, unlike E[x^2] - E[x]^2 (Chan, Golub and LeVeque, 1979).
The backward pass, with y = (x - mean) / std and g the gradient of y, takes one more collective, for
the two sums over the whole batch:

    dx = (g - sum g / N - y sum (g y) / N) / std
"""

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..base.torch_private import BatchNorm


class SyncBatchNorm(BatchNorm):
    """Batch normalisation, (N, C, …) to (N, C, …), by the statistics of all ranks together.

    Arguments, parameters and buffers are those of `torch.nn.BatchNorm2d`, for any number of
    dimensions from 2 on. The ranks are those of `process_group`. They may have batches of different
    sizes, even empty ones. In evaluation it is ordinary batch normalisation.
    """

    def __init__(
        self,
        num_features,
        eps=1e-5,
        momentum=0.1,
        affine=True,
        track_running_stats=True,
        process_group=None,
        **kw,
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **kw)
        self.process_group = process_group

    def _check_input_dim(self, inputs):
        if inputs.dim() < 2 or inputs.shape[1] != self.num_features:
            raise ValueError(
                f"expected inputs of shape (N, {self.num_features}, …), got {tuple(inputs.shape)}"
            )

    def forward(self, inputs):
        """Normalise each channel, then scale and shift it, in float32 at least."""
        self._check_input_dim(inputs)
        if not self.training:
            return super().forward(inputs)
        wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        outputs, mean, variance, count = Normalise.apply(wide, self.eps, self.process_group)
        if self.track_running_stats:
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.update_averages(mean, unbiased)
        if self.affine:
            outputs = outputs * per_channel(self.weight, inputs) + per_channel(self.bias, inputs)
        return outputs.to(inputs.dtype)

    def update_averages(self, mean, variance):
        """Move the running averages towards this batch's mean and unbiased variance."""
        self.num_batches_tracked += 1
        momentum = self.momentum
        # Without a momentum all batches so far weigh the same.
        if momentum is None:
            momentum = (1 / self.num_batches_tracked).to(self.running_mean.dtype)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)

    @classmethod
    def convert_sync_batchnorm(cls, module, process_group=None):
        """Synchronise all BatchNorm layers of `module`, which keep their state, and return it."""
        for layer in module.modules():
            if isinstance(layer, BatchNorm) and not isinstance(layer, cls):
                layer.__class__ = cls
                layer.process_group = process_group
        return module


class Normalise(Function):
    """(x - mean) / std over the batches of all ranks, with its gradient; also mean, var and N."""

    @staticmethod
    def forward(ctx, inputs, eps, group):
        mean, variance, count = whole_batch_statistics(inputs, group)
        scale = (variance + eps).rsqrt()
        normalised = (inputs - per_channel(mean, inputs)) * per_channel(scale, inputs)
        ctx.save_for_backward(normalised, scale, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, count)
        return normalised, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, *_):
        normalised, scale, count = ctx.saved_tensors
        axes = [axis for axis in range(gradient.dim()) if axis != 1]
        sums = torch.stack([gradient.sum(axes), (gradient * normalised).sum(axes)])
        dist.all_reduce(sums, group=ctx.group)
        mean, mean_of_product = (per_channel(each, gradient) for each in sums / count)
        centred = gradient - mean - normalised * mean_of_product
        return centred * per_channel(scale, gradient), None, None


def whole_batch_statistics(inputs, group=None):
    """Return each channel's mean and biased variance over all ranks, and N, by one collective.

    Raises ValueError for a single value per channel, which has no variance.
    """
    channels = inputs.transpose(0, 1).flatten(1)
    width = len(channels)
    count = channels.shape[1]
    # The mean of nothing would be NaN.
    mean = channels.mean(1) if count else channels.new_zeros(width)
    deviations = (channels - mean[:, None]).square().sum(1)
    own = torch.cat([mean, deviations, mean.new_full((1,), count)])
    of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_ranks, own, group=group)
    means, deviations, counts = torch.stack(of_ranks).split([width, width, 1], dim=1)
    total = counts.sum()
    # A rank with 2 values or more need not read `total`, for which it would have to wait for a GPU.
    if count <= 1 and total <= 1:
        raise ValueError(
            "training needs more than 1 value per channel over all ranks together, got"
            f" {int(total)}"
        )
    mean = (counts * means).sum(0) / total
    variance = (deviations + counts * (means - mean).square()).sum(0) / total
    return mean, variance, total


def per_channel(values, inputs):
    """Return `values`, one for each channel, in a shape that broadcasts over (N, C, …)."""
    ones = [1] * (inputs.dim() - 2)
    return values.view(1, -1, *ones)
