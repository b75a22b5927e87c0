"""Three hints for each task, each saying a little more: `hint("4.2")`, `hint("4.2", 2)` …."""

import re
from functools import cache
from pathlib import Path

LEVELS = 3


@cache
def all_hints() -> dict[str, list[str]]:
    """Return the hints of each task, in order, as hints.md has them."""
    text = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    # A section is "## 4.2" and, below it, a line for each hint: "1. …", "2. …", "3. …".
    sections = re.findall(r"^## (\d+\.\d+)\n((?:\d\. .+\n)+)", text, re.MULTILINE)
    return {task: re.findall(r"^\d\. (.+)$", body, re.MULTILINE) for task, body in sections}


def hint(number: str, level: int = 1) -> None:
    """Print one of the hints for a task; raises ValueError if there is no such task or level."""
    # A learner may write hint(4.2), without quotes.
    hints = all_hints().get(str(number))
    if hints is None:
        raise ValueError(f'there is no task {number}; hint("4.2") is how this is called')
    if level not in range(1, LEVELS + 1):
        raise ValueError(f"there are hints 1 to {LEVELS} for each task, not {level}")
    more = f' hint("{number}", {level + 1}) says more.' if level < LEVELS else ""
    print(f"Hint {level} of {LEVELS} for {number}: {hints[level - 1]}{more}")
