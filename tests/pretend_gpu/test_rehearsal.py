"""Lessons and solutions run to their end on pretended GPUs, and nothing is found that a real one
would punish.
"""

import csv
import re

import pytest

from pretend_gpu import build, rehearsal

pytestmark = pytest.mark.skipif(bool(build.why_not()), reason=str(build.why_not()))
NOTEBOOKS = sorted(
    [*rehearsal.ROOT.glob("notebooks/[0-9]*.ipynb"), *rehearsal.ROOT.glob("solutions/[0-9]*.ipynb")]
)
ALWAYS = ("notebooks/03_parameter_server", 4)


def runs():
    """Each notebook with each number of GPUs; all but one are for the week."""
    for path in NOTEBOOKS:
        name = f"{path.parent.name}/{path.stem}"
        for gpus in (1, 2, 4, 8):
            marks = [pytest.mark.slow, pytest.mark.weekly]
            if (name, gpus) == ALWAYS:
                marks = [pytest.mark.slow]
            yield pytest.param(path, gpus, marks=marks, id=f"{name}-{gpus}")


@pytest.mark.parametrize("path, gpus", list(runs()))
def test_a_notebook_runs_on_pretended_gpus(path, gpus):
    _, wrong = rehearsal.rehearse(path, gpus)
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
