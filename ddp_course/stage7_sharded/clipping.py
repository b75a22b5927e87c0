"""Gradients of which a rank has a part only: what may be computed from one, and the norm of all
parts together.

Element by element, a part is as good as the whole. A function that mixes elements, such as a norm
or an optimizer's view of a matrix, would give another result on every rank. Nothing would fail, and
the model would be trained with wrong gradients. So such functions are refused, by one rule: a
result has the shape of the part, or the same elements.
"""

import torch
import torch.distributed as dist

from ..running.torch_inside import UNSCALE, as_plain_tensors, tree_leaves, tree_map_only
from ..stage4_ring import ring_all_reduce

MIXING = {
    UNSCALE,
    torch.renorm,
    torch.Tensor.renorm,
    torch.Tensor.renorm_,
}  # these keep the shape, but mix elements
REARRANGING = {  # these put the same elements in other places
    *("__getitem__", "reshape", "view", "view_as", "flatten", "cat", "split", "tensor_split"),
    *("new_empty", "new_zeros"),
}
LINEAR = {  # the training loop, or torch, may apply these to a gradient before the average
    *(
        "__get__",
        "__set__",
        "__repr__",
        "__format__",
        "__len__",
        "clone",
        "detach",
        "detach_",
        "requires_grad_",
    ),
    *(
        "zero_",
        "_foreach_zero_",
        "add_",
        "mul_",
        "div_",
        "__imul__",
        "__itruediv__",
        "_foreach_mul_",
    ),
}


class Part(torch.Tensor):
    """A gradient of which other ranks have other parts: an ordinary tensor for functions that work
    element by element.

    `gradient.as_subclass(Part)` is one on the same memory, and so are the results that are computed
    from it.
    """

    allowed: set[str] | None = (
        None  # Only these functions are allowed; None allows all that work on single elements.
    )
    refusal = (
        "looks at more than single elements; this rank has a part of the gradient only. To clip,"
        " call clip_grad_norm_ of FullyShardedDataParallel, ShardedOptimizer, Pipeline or"
        " stage9_tensor instead; optimizers must work element by element, as Adam does; to look at"
        " the part, take gradient.as_subclass(torch.Tensor)"
    )

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if function in MIXING if cls.allowed is None else name not in cls.allowed:
            raise RuntimeError(f"{name} {cls.refusal}")
        with as_plain_tensors():
            result = function(*args, **(kwargs or {}))
            shapes = {each.shape for each in tree_leaves((args, kwargs)) if isinstance(each, Part)}
            made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
            mixed = any(each.shape not in shapes for each in made)
        if mixed and name not in REARRANGING:
            raise RuntimeError(f"{name} {cls.refusal}")
        return tree_map_only(torch.Tensor, lambda each: each.as_subclass(cls), result)

    def __reduce_ex__(self, protocol):
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


class OwnGradient(Part):
    """A gradient before the average: whole, but of this rank's samples. Only linear functions may
    precede the sum.
    """

    allowed = LINEAR
    refusal = (
        "would come before the gradients are averaged, on every rank for itself. To clip, call"
        " clip_grad_norm_ of ShardedOptimizer; for all else take FullyShardedDataParallel, or stage"
        " 6 and an ordinary optimizer"
    )


def clip_grad_norm_(parameters, max_norm, norm_type, group, device):
    """Scale the gradients of all ranks' `parameters` so that their norm is at most `max_norm`;
    return the norm.

    Like `torch.nn.utils.clip_grad_norm_`, if all the gradients were on one device. All ranks of
    `group` must call this; each sends 16 (K-1) bytes. Raises ValueError for a norm of an order that
    is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; it must be a positive number, or infinity")
    parameters = [
        parameter
        for parameter in parameters
        if parameter.grad is not None and parameter.grad.numel()
    ]
    gradients = [parameter.grad.as_subclass(torch.Tensor) for parameter in parameters]
    of_ranks = torch.zeros(dist.get_world_size(group), dtype=torch.float64, device=device)
    of_ranks[dist.get_rank(group)] = torch.nn.utils.get_total_norm(gradients, norm_type)
    total = torch.linalg.vector_norm(ring_all_reduce(of_ranks, group), norm_type)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total
