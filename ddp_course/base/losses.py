"""The loss that the stages take where none is given."""

from torch import Tensor
from torch.nn import functional


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return torch's cross entropy: a mean over the samples, as every average over ranks needs it.

    Raises ValueError for targets that are no classes, where torch's would be a number without a
    meaning, such as -0.0.
    """
    classes = outputs.shape[1] if outputs.dim() > 1 else 1
    are_classes = not targets.is_floating_point()
    if classes < 2 or not (are_classes or are_probabilities(targets)):
        raise ValueError(
            "cross entropy needs classes as targets, and an output for each class; outputs have"
            f" the shape {tuple(outputs.shape)}, and targets are {targets.dtype} of"
            f" {tuple(targets.shape)}: give another loss, as in"
            " train(…, loss=torch.nn.functional.mse_loss)"
        )
    return functional.cross_entropy(outputs, targets)


def are_probabilities(targets: Tensor) -> bool:
    """Return whether each row of targets is positive and adds up to 1."""
    sums = targets.sum(1) if targets.dim() > 1 else targets
    return bool((targets >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all())
