"""The clinic's patients fail as they say, in time, and leave nothing behind; mended, they train."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import still_running

from ddp_exercises.tasks import find

CLINIC = Path(__file__).parents[1] / "exercises" / "clinic"
find("11.5")
CAUSES = sys.modules["exercise_checks.11"].CAUSES
FAILS = {  # These are {patient: (its exit code, words that it prints)}.
    1: (1, "Received data size doesn't match"),
    2: (1, "Timed out waiting"),
    3: (1, "Received data size doesn't match"),
    4: (1, "Received data size doesn't match"),
    5: (1, "Connection closed by peer"),
    6: (0, "rank 2, epoch 1"),
    7: (0, "loss nan"),
    8: (1, "Duplicate GPU detected : rank 1 and rank 0"),
    9: (1, "EADDRINUSE"),
    10: (0, "weights"),
    11: (1, "Expected to mark a variable ready only once"),
}


def torchrun(script, folder):
    """Run a script on three ranks; return (exit code, what it printed)."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=3",
        str(script),
    ]
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TMPDIR": str(folder),
    }
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environ, timeout=600
    )
    everywhere = psutil.process_iter(["environ"])
    left = [p.pid for p in everywhere if (p.info["environ"] or {}).get("TMPDIR") == str(folder)]
    assert not still_running(left), "processes are left behind"
    return done.returncode, done.stdout + done.stderr


def runs_of(number):
    """Return how often a patient runs: the tenth goes on from its own checkpoint."""
    return 2 if number == 10 else 1


@pytest.mark.slow
@pytest.mark.parametrize("number", FAILS)
def test_a_patient_fails_as_it_says(number, tmp_path):
    code, words = FAILS[number]
    script = CLINIC / f"patient_{number:02}.py"
    assert script.read_text().count("\n") <= 40
    for _ in range(runs_of(number)):
        found, printed = torchrun(script, tmp_path)
        assert found == code, printed[-3000:]
        assert words in printed, printed[-3000:]
    if number == 10:
        assert len(set(re.findall(r"weights ([-\d.]+)", printed))) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=() if n in (2, 10) else pytest.mark.weekly) for n in FAILS]
)
def test_a_mended_patient_trains(number, tmp_path):
    wrong, right = solution()[number]
    text = (CLINIC / f"patient_{number:02}.py").read_text()
    assert text.count(wrong) == 1
    (tmp_path / "mended.py").write_text(text.replace(wrong, right))
    for _ in range(runs_of(number)):
        code, printed = torchrun(tmp_path / "mended.py", tmp_path)
        assert code == 0, printed[-3000:]
        assert "epoch 2" in printed, printed[-3000:]
        assert "nan" not in printed, printed[-3000:]
    sums = set(re.findall(r"weights ([-\d.]+)", printed))
    expected = 1 if number == 10 else 0  # The tenth prints its weights, equal on all ranks.
    assert len(sums) == expected, printed[-3000:]


def solution():
    """Return what the solution of task 11.5 says is wrong in each patient, and what is right."""
    cells = json.loads(next(CLINIC.parents[1].glob("solutions/11_*.ipynb")).read_text())["cells"]
    names = {}
    answer = next(cell for cell in cells if cell["id"] == "answer-11-5")
    exec("".join(answer["source"]), names)
    return names["mended"]()


# Both stand in one line, as the stack may be read before the sleep.
WAITS = "import time\nprint('here', flush=True); time.sleep(600)\n"


@pytest.mark.parametrize(
    ("script", "place"),
    [("import slow", ""), (WAITS, "<module> (main.py:2)")],
    ids=["imports", "waits"],
)
def test_a_rank_that_still_imports_does_not_stand_still(tmp_path, script, place):
    (tmp_path / "slow.py").write_text(WAITS)
    (tmp_path / "main.py").write_text(script)
    spec = importlib.util.spec_from_file_location("stacks", CLINIC / "stacks.py")
    stacks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stacks)
    command = [sys.executable, "main.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            found = stacks.innermost(process.pid)
        finally:
            process.kill()
    if "ermission" in found:
        pytest.skip(found)
    assert found == place


def test_lesson_11_shows_the_line_at_which_the_patient_hangs():
    text = next(CLINIC.parents[1].glob("notebooks/11_*.ipynb")).read_text()
    shown = re.findall(r"rank (\d): <module> \(patient_02.py:(\d+)\)", text)
    assert [rank for rank, _ in shown] == ["0", "1", "2"]
    lines = (CLINIC / "patient_02.py").read_text().splitlines()
    for _, line in shown:
        assert "all_reduce" in lines[int(line) - 1], line


def test_every_cause_is_a_line_of_its_patient():
    for number, (_, pieces) in CAUSES.items():
        lines = (CLINIC / f"patient_{number:02}.py").read_text().splitlines()
        for piece in pieces:
            assert any(piece in line for line in lines), number


def test_the_slow_training_of_the_elastic_job_trains(tmp_path):
    hurry = tmp_path / "hurry"
    hurry.touch()
    options = ["--problem=digits", "--stage=6", "--steps=2"]
    trained = subprocess.run(
        [sys.executable, CLINIC / "slow_train.py", *options],
        env={**os.environ, "HURRY": str(hurry)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "step 2/2" in trained.stdout, trained.stderr
