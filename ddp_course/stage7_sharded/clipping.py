"""The norm of all gradients together, when no rank has all of them; and a guard where one rank's would be taken for it.

`torch.nn.utils.clip_grad_norm_` on shards would scale each shard by a norm of its own. Nothing would fail, and the
model would be trained with gradients that point elsewhere.
"""

import torch
import torch.distributed as dist

from ..running import wire
from ..running.torch_inside import UNSCALE, as_plain_tensors

MISLEADING = {
    torch.norm,
    torch.Tensor.norm,
    torch.linalg.norm,
    torch.linalg.vector_norm,
    torch.linalg.matrix_norm,
    torch._foreach_norm,
    UNSCALE,  # a gradient scaler would skip the step on one rank only
}


class LocalGradient(torch.Tensor):
    """A gradient of which other ranks have other parts, or their own: an ordinary tensor, but it tells nobody its norm.

    What is computed from it is an ordinary tensor again.
    """

    @classmethod
    def mark(cls, gradient, world_size):
        """The same memory as a `LocalGradient`; with one rank there is nothing to guard."""
        return gradient.as_subclass(cls) if world_size > 1 else gradient

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in MISLEADING:
            raise RuntimeError(
                "this rank has a part of the gradient only, and the norm of a part is not the norm of the whole: "
                "call clip_grad_norm_ of FullyShardedDataParallel, ShardedOptimizer, Pipeline or stage9_tensor "
                "instead of torch.nn.utils.clip_grad_norm_"
            )
        with as_plain_tensors():
            return function(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol):
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return self.as_subclass(torch.Tensor).clone().as_subclass(type(self))


@torch.no_grad()
def clip_grad_norm_(parameters, max_norm, norm_type=2.0, group=None, device=None):
    """Scale the gradients of all ranks' `parameters` so that their norm is at most `max_norm`; return the norm.

    Like `torch.nn.utils.clip_grad_norm_`, if all the gradients were on one device. All ranks of `group` must call
    this; each sends 8 (K-1) bytes. Raises ValueError for a norm of an order that is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; it must be a positive number, or infinity")
    gradients = [p.grad.as_subclass(torch.Tensor) for p in parameters if p.grad is not None and p.grad.numel()]
    norms = [torch.linalg.vector_norm(gradient, norm_type, dtype=wide(gradient)) for gradient in gradients]
    everyones = torch.zeros(dist.get_world_size(group), dtype=torch.float64, device=device)
    if norms:
        everyones[dist.get_rank(group)] = torch.linalg.vector_norm(torch.stack(norms).abs(), norm_type)
    share_numbers(everyones, group)
    total = torch.linalg.vector_norm(everyones, norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.device))
    return total


def wide(gradient):
    """The dtype to add squares up in."""
    return torch.complex128 if gradient.is_complex() else torch.float64


@wire.collective
def share_numbers(numbers, group=None):
    """Fill in the numbers of the other ranks: number r is rank r's. So all compute the same bits from them."""
    rank, world_size, _, _ = wire.neighbours(group)
    peers = [(peer, wire.global_rank(peer, group)) for peer in range(world_size) if peer != rank]
    mine = numbers[rank : rank + 1].clone()
    wire.exchange_all([(mine, place) for _, place in peers], [(numbers[n : n + 1], place) for n, place in peers], group)
