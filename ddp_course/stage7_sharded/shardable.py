"""Refuses models that cannot be cut into parts."""

from ..same_model import same_on_all_ranks
from ..stage3_paramserver import trainable
from .blocks import Sharded
from .parts import Part


def check_model(module, group):
    """Raise ValueError for a model that cannot be sharded.

    Raises MismatchError unless all ranks' models are alike.
    """
    parameters = dict(module.named_parameters())
    if any(isinstance(parameter, Part | Sharded) for parameter in parameters.values()):
        raise ValueError(
            "a part of the model is sharded already, or split: wrap or split the whole model, once"
        )
    for layer in module.modules():
        # torch.compile(layer) returns an OptimizedModule, and layer.compile() sets the attribute.
        if type(layer).__name__ == "OptimizedModule" or layer._compiled_call_impl:
            raise ValueError("the model, or a part of it, is compiled already; wrap it first")
    # This raises an error if there is nothing to train.
    trainable(module)
    same_on_all_ranks(parameters, group)
