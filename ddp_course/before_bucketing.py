"""Refuses what stage 5 cannot train: other ranks would wait for ever, or train another model."""

from collections.abc import Sequence
from typing import Any

import torch

from manyranks.torch_inside import tensors_in

from .base.replicas import check_replicas
from .base.torch_private import returned_by_grad, uncompiled
from .same_model import Inventory, same_on_all_ranks
from .stage3_paramserver import trainable


def check_model(module: torch.nn.Module, group: Any) -> Inventory:
    """Return the inventory of a model whose ranks have the same parameters.

    Raises ValueError if nothing is trainable, MismatchError if the ranks' models are not alike.
    """
    by_name = dict(module.named_parameters())
    check_replicas(by_name, group)
    trained = set(trainable(module))
    averaged = {name: parameter for name, parameter in by_name.items() if parameter in trained}
    same_on_all_ranks(averaged, group)
    return Inventory(module, averaged)


def refuse(wrong: Any, words: str) -> None:
    """Raise RuntimeError with these `words` if something is `wrong`."""
    if wrong:
        raise RuntimeError(words)


@uncompiled
def check_pass(wrapper: Any) -> None:
    """Raise RuntimeError if buckets of a failed pass have left, or if parameters have changed."""
    refuse(
        wrapper.waits,
        "the last backward pass was cut short by an exception: other ranks may wait for it. Start"
        " all again",
    )
    wrapper.inventory.check()


@uncompiled
def check_backward(accumulators: Sequence[Any], outputs: Any) -> Any:
    """Refuse `torch.autograd.grad`, in backward, for a parameter; return the outputs."""

    def check(gradient: torch.Tensor) -> None:
        refuse(
            returned_by_grad(accumulators),
            "torch.autograd.grad returns this rank's gradients, which nobody averages: call"
            " backward(), and read parameter.grad",
        )

    for tensor in tensors_in(outputs):
        if tensor.grad_fn is not None:
            tensor.register_hook(check)
    return outputs


def check_gradient(parameter: torch.Tensor, bucket: Any) -> None:
    """Raise RuntimeError unless this is the parameter's first gradient in this pass, and dense."""
    refuse(
        parameter.grad is None or parameter.grad.is_sparse or parameter.grad.requires_grad,
        "stage 5 averages no sparse gradient, none with a graph, and none that a hook dropped",
    )
    # The parameter notes the first bucket of this pass by its id, which keeps no bucket alive.
    first_taker = vars(parameter).setdefault("bucket", id(bucket))
    refuse(
        first_taker != id(bucket),
        "two wrappers average the same parameter: wrap it once, and let go of older wrappers",
    )
    refuse(
        parameter not in bucket.missing,
        "a gradient was computed twice in one backward pass; stage 6 has static_graph for that",
    )
