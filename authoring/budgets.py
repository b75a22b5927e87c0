"""How many lines a room may have: `python authoring/budgets.py` prints the table, and fails beyond a budget.

A change that adds lines deletes as many others, or gives a reason for a larger number here.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = {  # The folders and files of a pattern may have this many lines of Python.
    "ddp_course": 16_000,
    "ddp_course/stage[1-5]_*.py": 470,
    "ddp_course/stage6_ddp": 1_400,
    "ddp_course/stage7_sharded": 750,
    "ddp_course/stage8_pipeline.py": 450,
    "ddp_course/stage9_tensor.py": 220,
    "ddp_course/collectives": 460,
    "ddp_course/running": 4_500,
    "ddp_course/measuring": 2_900,
    "ddp_course/showing": 1_450,
    "ddp_course/grading": 1_900,
    "ddp_course/commands": 800,
    "exercises/checks": 2_300,
    "tests": 17_000,
}


def lines(room, root=ROOT):
    """Lines of the Python files that `room` names, and of those in the folders that it names."""
    files = {file for place in root.glob(room) for file in (place.rglob("*.py") if place.is_dir() else [place])}
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main():
    """Print every room beside its budget; return 1 if one is beyond it, else 0."""
    beyond = False
    for room, budget in BUDGETS.items():
        count = lines(room)
        beyond |= count > budget
        print(f"{room:<32}{count:>7,} lines of {budget:>6,}{'   TOO MANY' if count > budget else ''}")
    return int(beyond)


if __name__ == "__main__":
    sys.exit(main())
