"""What a rank sends for a parameter without a gradient, so that all ranks send equal sizes.

Zeros would do for the sum. But a parameter that no rank has used must have no gradient after the
average either: a gradient of zeros lets weight decay and momentum change it. Negative zeros tell
the two apart, without another message: -0.0 + 0.0 is 0.0, and only sums of -0.0 alone are -0.0.
Stages 6 and 7 add up a bitmap instead: one small message more, for gradients that lie end to end.
"""

import torch


class Missing(torch.Tensor):
    """Negative zeros in place of the gradient of `parameter`; the average is copied here."""

    parameter: torch.Tensor

    def copy_(self, average: torch.Tensor) -> None:  # type: ignore[override]
        """Make the average the parameter's gradient, unless no rank has one."""
        if not is_missing(average).all():
            self.parameter.grad = average.clone()


def is_missing(average: torch.Tensor) -> torch.Tensor:
    """Return where no rank had a gradient, as the sum there is a negative zero."""
    return (average == 0) & average.signbit()


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `parameter`, or a `Missing` in its place.

    Zero is added to a gradient, so that none of its elements is a negative zero.
    """
    if parameter.grad is not None:
        return parameter.grad.add_(0.0)
    missing = torch.full_like(parameter, -0.0).as_subclass(Missing)
    missing.parameter = parameter
    return missing
