"""Pretended GPUs find planted mistakes and mutants of the course's own waits, and are silent on the
right code.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pretend_gpu
from pretend_gpu import build

HOME = Path(__file__).parent
ROOT = HOME.parents[1]
pytestmark = pytest.mark.skipif(bool(build.why_not()), reason=str(build.why_not()))
MISTAKES = (
    "missing_wait", "too_early", "not_awaited", "freed_early", "other_device", "other_collective",
    "new_thread", "item_in_the_loop",
)  # fmt: skip
MUTANTS = {  # in a file of the course, a line and what stands there instead
    "the thread does not wait for the gradient": (
        "running/communication.py", "                ready.wait()", "                pass",
    ),
    "nobody waits for the thread's stream": (
        "running/communication.py", "                finished.wait()", "                pass",
    ),
    "the thread stays on GPU 0": (
        "running/communication.py", "torch.cuda.set_device(stream.device)", "pass",
    ),
    "nobody waits for the backend": (
        "stage6_ddp/communication.py", "            work.wait()", "            pass",
    ),
}  # fmt: skip


def run(script, *arguments, log, course=ROOT):
    """Run a script on two pretended GPUs with the course in `course`: what it printed, and
    findings.
    """
    environment = pretend_gpu.environment(2, log, patience=15)
    environment["PYTHONPATH"] += os.pathsep + str(course)
    done = subprocess.run(
        [sys.executable, str(HOME / script), *arguments],
        env=environment, cwd=course, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done, pretend_gpu.read(log)


def is_found(done, findings):
    """Whether a mistake shows."""
    return done.returncode != 0 or findings.races or findings.foreign


def test_the_stages_train_with_nccl_as_one_device_does_and_nothing_is_found(tmp_path):
    done, findings = run("train_all.py", log=tmp_path / "log")
    assert not is_found(done, findings), (done.stderr[-2000:], findings)
    assert findings.communicators >= 2 and set(findings.peaks) == {0, 1}
    plans = [count for place, count in findings.syncs.items() if "(rebuild)" in place]
    assert sum(plans) == 6, "stage 6's plan is read once for each of 2 ranks and 3 wrappers"


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wait_that_is_missing_in_the_course_is_found(mutant, tmp_path):
    file, line, instead = MUTANTS[mutant]
    shutil.copytree(ROOT / "ddp_course", tmp_path / "ddp_course")
    path = tmp_path / "ddp_course" / file
    assert path.read_text().count(line) == 1, line
    path.write_text(path.read_text().replace(line, instead))
    assert is_found(*run("train_all.py", log=tmp_path / "log", course=tmp_path))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found_and_the_right_way_is_silent(mistake, tmp_path):
    done, findings = run("mistakes.py", mistake, "right", log=tmp_path / "right")
    assert not is_found(done, findings) and not findings.syncs, (done.stderr[-2000:], findings)
    done, findings = run("mistakes.py", mistake, "wrong", log=tmp_path / "wrong")
    assert is_found(done, findings) or findings.syncs.total() == 40
