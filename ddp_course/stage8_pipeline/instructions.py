"""Instructions, which tell a rank what to do, and results, which pass from stage to stage.

stage s  ── Result(m, s, s + 1), an activation ──────>  stage s + 1
stage s  <── Result(m, s + 1, s), the gradient of it ── stage s + 1
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple


class Result(NamedTuple):
    """What stage `source` computes from a micro-batch for its neighbour, the stage `user`.

    For the next stage it is an activation; for the stage before it is the gradient of an
    activation, and has its shape.
    """

    microbatch: int
    source: int
    user: int

    @property
    def cut(self):
        """The place between the two stages: the number of the stage before it."""
        return min(self.source, self.user)


@dataclass(frozen=True)
class Instruction:
    """One thing to do with a micro-batch (0 to M-1) at a stage (0 to the number of stages - 1).

    `letter` stands for it in a timetable, and `name` in a sentence. What it `needs` and what it
    `gives` is a `Result` or None; at the first and last stage that may be a result which no stage
    computes or needs.
    """

    microbatch: int
    stage: int

    letter: ClassVar[str]
    name: ClassVar[str]
    needs = None
    gives = None


class Forward(Instruction):
    """Compute the stage's outputs; the last stage computes the loss from them."""

    letter = "F"
    name = "forward"

    @property
    def needs(self):
        """The outputs of the stage before."""
        return Result(self.microbatch, self.stage - 1, self.stage)

    @property
    def gives(self):
        """The outputs of this stage, for the next one."""
        return Result(self.microbatch, self.stage, self.stage + 1)


class Backward(Instruction):
    """Compute the gradients of the stage's input and of its weights."""

    letter = "B"
    name = "backward"

    @property
    def needs(self):
        """The gradient of the stage's outputs."""
        return Result(self.microbatch, self.stage + 1, self.stage)

    @property
    def gives(self):
        """The gradient of the stage's input, for the stage before."""
        return Result(self.microbatch, self.stage, self.stage - 1)


class BackwardInput(Backward):
    """The first part of a backward pass: the gradient of the input, which another rank needs."""

    name = "input"


class BackwardWeight(Instruction):
    """The second part of a backward pass: the gradients of the weights, at any later time."""

    letter = "W"
    name = "weight"
