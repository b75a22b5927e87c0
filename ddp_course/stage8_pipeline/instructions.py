"""What a rank is told to do, and what passes from stage to stage.

    stage s  ── Activation(m, cut=s) ──>  stage s + 1
    stage s  <── Gradient(m, cut=s) ────  stage s + 1

A cut has the number of the stage before it. A gradient has the shape of the activation there.
"""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Activation:
    """What stage `cut` computes from a micro-batch, for stage `cut + 1`."""

    microbatch: int
    cut: int

    @property
    def source(self):
        """The stage that computes it."""
        return self.cut

    @property
    def user(self):
        """The stage that needs it."""
        return self.cut + 1


@dataclass(frozen=True)
class Gradient:
    """The gradient of an activation, which stage `cut + 1` computes for stage `cut`."""

    microbatch: int
    cut: int

    @property
    def source(self):
        """The stage that computes it."""
        return self.cut + 1

    @property
    def user(self):
        """The stage that needs it."""
        return self.cut


@dataclass(frozen=True)
class Instruction:
    """One thing to do with a micro-batch (0 to M-1) at a stage (0 to the number of stages - 1).

    `letter` stands for it in a timetable, `name` in a sentence. What it `needs` and what it `gives`
    is an activation or a gradient, or None; at the first and last stage that may be one which no
    stage computes or needs.
    """

    microbatch: int
    stage: int

    letter: ClassVar[str]
    name: ClassVar[str]
    needs = None
    gives = None


class Forward(Instruction):
    """Compute the stage's outputs; the last stage computes the loss of them."""

    letter = "F"
    name = "forward"

    @property
    def needs(self):
        """The outputs of the stage before."""
        return Activation(self.microbatch, self.stage - 1)

    @property
    def gives(self):
        """The outputs, for the next stage."""
        return Activation(self.microbatch, self.stage)


class Backward(Instruction):
    """Compute the gradients of the stage's input and of its weights."""

    letter = "B"
    name = "backward"

    @property
    def needs(self):
        """The gradient of the stage's outputs."""
        return Gradient(self.microbatch, self.stage)

    @property
    def gives(self):
        """The gradient of the stage's input, for the stage before."""
        return Gradient(self.microbatch, self.stage - 1)


class BackwardInput(Backward):
    """The first part of a backward pass: the gradient of the input, which another rank needs."""

    name = "input"


class BackwardWeight(Instruction):
    """The second part of a backward pass: the gradients of the weights, at any later time."""

    letter = "W"
    name = "weight"
