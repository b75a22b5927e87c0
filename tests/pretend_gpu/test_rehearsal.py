"""Lessons and solutions run to their end on pretended GPUs, and no fault is found.

A fault is what a real GPU would punish.
"""

import csv
import re

import pytest

from pretend_gpu import build, rehearsal

pytestmark = pytest.mark.skipif(bool(build.why_not()), reason=str(build.why_not()))
NOTEBOOKS = sorted(
    [*rehearsal.ROOT.glob("notebooks/[0-9]*.ipynb"), *rehearsal.ROOT.glob("solutions/[0-9]*.ipynb")]
)


LESSONS = [
    "03_parameter_server",
    pytest.param("13_predict_before_you_buy", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_runs_on_two_pretended_gpus(lesson):
    _, wrong = rehearsal.rehearse(rehearsal.ROOT / f"notebooks/{lesson}.ipynb", 2)
    assert not wrong, "\n".join(wrong)


def test_who_may_wait_is_still_there():
    with rehearsal.WAITS.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        files = [*rehearsal.ROOT.glob(f"ddp_course/**/{row['file'].rpartition('/')[2]}")]
        if row["file"] and files and not row["function"].startswith("<"):
            defined = re.compile(rf"def {row['function']}\(")
            assert any(defined.search(file.read_text()) for file in files), row


def test_it_is_said_how_many_runs_were_made_and_all_are_right():
    with rehearsal.TABLE.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    said = (rehearsal.ROOT / "docs" / "CONTRIBUTING.md").read_text()
    assert f"{len(rows)} of {4 * len(NOTEBOOKS)} were made" in said
    assert [row["notebook"] for row in rows if row["verdict"] != "right"] == []
