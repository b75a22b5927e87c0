"""A claim, the conditions under which it is tested, and how a verdict follows from what was found."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

KINDS = ("measured", "counted", "simulated", "derived")


class Outcome(NamedTuple):
    """What one experiment found: whether the claim held, and the number that decided it, as text."""

    holds: bool
    number: str


@dataclass(frozen=True)
class Claim:
    """A sentence that people say about distributed training, and the experiments that decide about it.

    `conditions` maps what is assumed ("the loss is a sum") to an experiment without arguments. `kind` says where its
    numbers come from, a word of KINDS. `expected` is the verdict that the course stands by. `controls` are experiments
    of the same kind whose outcome should be the opposite: they show that the experiment can tell.
    """

    number: int
    text: str
    kind: str
    conditions: dict[str, Callable[[], Outcome]]
    expected: str
    why: str
    controls: dict[str, Callable[[], Outcome]] = field(default_factory=dict)

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f'claim {self.number} is "{self.kind}"; a finding is one of {", ".join(KINDS)}')

    def test(self, only: list[str] | None = None) -> "Finding":
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
    def verdict(self) -> str:
        """ "holds", "false" or "holds only if …", computed from the outcomes."""
        return verdict_on(self.outcomes)

    @property
    def line(self) -> str:
        """Verdict and kind in one line that is the same in every run."""
        return f"Claim {self.claim.number} ({self.claim.kind}): {self.verdict}"

    @property
    def numbers(self) -> str:
        """What decided, condition by condition."""
        return "; ".join(f"{name}: {outcome.number}" for name, outcome in self.outcomes.items())

    def __repr__(self):
        return f"“{self.claim.text}”\n{self.claim.kind}: {self.numbers}\n{self.claim.why}"

    def _repr_html_(self):
        return str(Table([self]))


class Table:
    """Several findings below one another, as text or as a small HTML table each."""

    def __init__(self, findings: list[Finding]):
        self.findings = findings

    @property
    def line(self) -> str:
        """A line for each finding, the same in every run."""
        return "\n".join(finding.line for finding in self.findings)

    def __repr__(self):
        return "\n\n".join(map(repr, self.findings))

    def __str__(self):
        return "".join(map(_html, self.findings))

    _repr_html_ = __str__


def verdict_on(outcomes: dict[str, Outcome]) -> str:
    """Turn outcomes by condition into a verdict; conditions "K = 2", "K = 16", … are a scale with an end."""
    true = [name for name, outcome in outcomes.items() if outcome.holds]
    if len(true) == len(outcomes):
        return "holds"
    scale = all(re.fullmatch(r"K = \d+", name) for name in outcomes)
    if scale and len(true) > 1 and true == list(outcomes)[: len(true)]:
        return f"holds up to {true[-1]}"
    return f"holds only if {' or '.join(true)}" if true else "false"


def _unbroken(text):
    """As HTML: no line ends inside 3e-01, behind whose minus a browser would break it."""
    return re.sub(r"(?<=\de-)(?=\d)", "&NoBreak;", escape(text))


def _html(finding):
    cell = '<td style="text-align:left;white-space:normal;vertical-align:top">{}</td>'
    head = '<th style="text-align:left">{}</th>'
    rows = [
        "".join(cell.format(_unbroken(text)) for text in (name, "yes" if outcome.holds else "no", outcome.number))
        for name, outcome in finding.outcomes.items()
    ]
    titles = "".join(head.format(text) for text in ("if", "holds", finding.claim.kind))
    body = "".join(f"<tr>{row}</tr>" for row in (titles, *rows))
    return (
        f'<div style="max-width:60em"><b>“{escape(finding.claim.text)}”</b> {escape(finding.verdict)}.'
        f"<table>{body}</table><p>{escape(finding.claim.why)}</p></div>"
    )
