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
# Each mistake, and how it must show: by a kind of finding, or in the words of an error.
MISTAKES = {
    "missing_wait": "race",
    "too_early": "race",
    "not_awaited": "race",
    "freed_early": "race",
    "other_device": "Expected all tensors to be on the same device",
    "other_collective": "NCCL would hang here",
    "new_thread": "context",
    "item_in_the_loop": "waits",
}
MUTANTS = {  # in a file of the course, a line, what stands there instead, and how it must show
    "the thread does not wait for the gradient": (
        "running/communication.py", "                ready.wait()", "                pass", "race",
    ),
    "nobody waits for the thread's stream": (
        "running/communication.py", "                finished.wait()", "                pass",
        "race",
    ),
    "the thread stays on GPU 0": (
        "running/communication.py", "torch.cuda.set_device(stream.device)", "pass", "context",
    ),
    "nobody waits for the backend": (
        "stage6_ddp/communication.py", "            work.wait()", "            pass", "race",
    ),
    "a pipeline connects its ranks when a message is due": (
        "stage8_pipeline/transfers.py", "            self.connect(schedule)", "            pass",
        "communicator",
    ),
}  # fmt: skip
EVERY_DAY = {"missing_wait", "nobody waits for the backend"}  # the others run in make test-rest


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


def found(findings):
    """The kinds of findings. That a run fails is none: it may have failed for any reason."""
    kinds = {
        "race": findings.races,
        "context": findings.foreign,
        "communicator": findings.late,
        "waits": findings.syncs.total() >= 40,
    }
    return {kind for kind, those in kinds.items() if those}


def marked(names):
    """Parameters of a test, slow but for a few."""
    return [
        pytest.param(name, marks=[] if name in EVERY_DAY else [pytest.mark.slow]) for name in names
    ]


def test_the_stages_train_with_nccl_as_one_device_does_and_nothing_is_found(tmp_path):
    done, findings = run("train_all.py", log=tmp_path / "log")
    assert done.returncode == 0, done.stderr[-2000:]
    assert not found(findings) - {"waits"}, findings
    assert findings.communicators >= 2 and set(findings.peaks) == {0, 1}
    plans = [count for place, count in findings.syncs.items() if "(rebuild)" in place]
    assert sum(plans) == 6, "stage 6's plan is read once for each of 2 ranks and 3 wrappers"


@pytest.mark.parametrize("mutant", marked(MUTANTS))
def test_a_wait_that_is_missing_in_the_course_is_found(mutant, tmp_path):
    file, line, instead, shows = MUTANTS[mutant]
    shutil.copytree(ROOT / "ddp_course", tmp_path / "ddp_course")
    path = tmp_path / "ddp_course" / file
    assert path.read_text().count(line) == 1, line
    path.write_text(path.read_text().replace(line, instead))
    done, findings = run("train_all.py", log=tmp_path / "log", course=tmp_path)
    assert shows in found(findings), (done.stderr[-2000:], findings)


@pytest.mark.parametrize("mistake", marked(MISTAKES))
def test_a_planted_mistake_is_found_and_the_right_way_is_silent(mistake, tmp_path):
    done, findings = run("mistakes.py", mistake, "right", log=tmp_path / "right")
    assert done.returncode == 0 and not found(findings), (done.stderr[-2000:], findings)
    assert not findings.syncs, findings.syncs
    done, findings = run("mistakes.py", mistake, "wrong", log=tmp_path / "wrong")
    shows = MISTAKES[mistake]
    assert shows in found(findings) or (done.returncode != 0 and shows in done.stderr), (
        done.stderr[-2000:],
        findings,
    )
