"""Claims: what people say about distributed training, each put to the test in a cell of a lesson.

`claims.decide` prints a claim in a lesson, the verdict that follows from its outcomes, such as
"holds only if the message is large", and why. `claims.decided` returns all claims, read from the
lessons' outputs, and `ddp-course claims` prints them as a table.
"""

import json
import re
from typing import NamedTuple

from ..folders import course_folder

KINDS = ("measured", "virtual time", "counted", "simulated", "derived")
# These are the lines that `decide` prints.
PRINTED = re.compile(rf"“(.*)”\nClaim (\d+) \(({'|'.join(KINDS)})\): (.*)\n(.*)")


class Decision(NamedTuple):
    """A claim as a lesson has decided it; `kind` says where the numbers come from."""

    number: int
    text: str
    kind: str
    verdict: str
    why: str
    lesson: str


def decide(number: int, text: str, kind: str, outcomes: dict[str, bool], why: str) -> None:
    """Print claim `number`, its verdict, and why.

    The verdict follows from `outcomes`, which say whether the claim held under each condition. The
    lines are the same in every run: numbers that differ from run to run are printed elsewhere.
    """
    print(f"“{text}”\nClaim {number} ({kind}): {verdict(outcomes)}\n{why}")


def verdict(outcomes: dict[str, bool]) -> str:
    """Return the verdict on outcomes by condition.

    If of "K = 2", "K = 4", "K = 16", … only the first two hold, it is "holds up to K = 4".
    """
    conditions = list(outcomes)
    met = [name for name, holds in outcomes.items() if holds]
    if met == conditions:
        return "holds"
    if not met:
        return "false"
    by_size = all(re.fullmatch(r"K = \d+", name) for name in conditions)
    # For one size alone "only if K = 2" is clearer.
    if by_size and len(met) > 1 and met == conditions[: len(met)]:
        return f"holds up to {met[-1]}"
    return f"holds only if {' or '.join(met)}"


def decided() -> list[Decision]:
    """Return all claims in the lessons' stored outputs, sorted by number."""
    decisions = []
    for path in sorted(course_folder("notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            printed = ""
            for output in cell.get("outputs", ()):
                printed += "".join(output.get("text", ()))
            for text, number, kind, outcome, why in PRINTED.findall(printed):
                decisions.append(Decision(int(number), text, kind, outcome, why, path.stem))
    return sorted(decisions)
