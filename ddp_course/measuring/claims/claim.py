"""A claim, the conditions under which it is tested, and how a verdict follows from what was measured."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


class Outcome(NamedTuple):
    """What one experiment found: whether the claim held, and the number that decided it, as text."""

    holds: bool
    number: str


@dataclass(frozen=True)
class Claim:
    """A sentence that people say about distributed training, and the experiments that decide about it.

    `conditions` maps what is assumed ("the loss is a sum") to an experiment without arguments. `controls` are
    experiments of the same kind whose outcome should be the opposite: they show that the experiment can tell.
    """

    number: int
    text: str
    lesson: str
    conditions: dict[str, Callable[[], Outcome]]
    why: str
    controls: dict[str, Callable[[], Outcome]] = field(default_factory=dict)

    def test(self, only=None):
        """Run the experiments of the conditions, or of those (and controls) named in `only`; return a `Finding`."""
        known = {**self.conditions, **self.controls}
        chosen = self.conditions if only is None else {name: known[name] for name in only}
        return Finding(self, {name: experiment() for name, experiment in chosen.items()})


@dataclass(frozen=True)
class Finding:
    """The outcomes of a claim's experiments, by condition."""

    claim: Claim
    outcomes: dict[str, Outcome]

    @property
    def verdict(self):
        """ "holds", "false" or "holds only if …", computed from the outcomes."""
        return judge(self.outcomes)

    @property
    def line(self):
        """The verdict in one line that is the same in every run."""
        return f"Claim {self.claim.number}: {self.verdict}"

    @property
    def numbers(self):
        """What decided, condition by condition."""
        return "; ".join(f"{name}: {outcome.number}" for name, outcome in self.outcomes.items())

    def __repr__(self):
        return f"“{self.claim.text}”\n{self.numbers}\n{self.claim.why}"


def judge(outcomes):
    """Turn outcomes by condition into a verdict."""
    true = [name for name, outcome in outcomes.items() if outcome.holds]
    if len(true) == len(outcomes):
        return "holds"
    return f"holds only if {' or '.join(true)}" if true else "false"
