"""A submission harms nobody: no files of others, no processes, no terminal, and no time."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from textwrap import indent

import psutil
import pytest
from answers import hand_in, submission_of

from ddp_course.lab.folders import course_folder
from ddp_exercises.attempt import Evidence
from ddp_exercises.grading import grader, guard, landlock, run_cells
from ddp_exercises.grading.answers import load_exercises
from ddp_exercises.grading.grader import grade
from ddp_exercises.grading.guard import enter
from ddp_exercises.grading.submissions import find_submissions
from ddp_exercises.tasks import cells_with, of_exercise, solution

EXERCISES = load_exercises()
SERVER = multiprocessing.get_context("forkserver")  # The server loads torch once for all tests.
SERVER.set_forkserver_preload(["ddp_exercises.grading.grader", "ddp_exercises.evidence"])


def tried_inside(folder, code):
    """Return what a piece of code raises, or "", in a process under a submission's limits."""
    receiver, sender = SERVER.Pipe()
    process = SERVER.Process(target=run_inside, args=(str(folder), code, sender))
    process.start()
    process.join(300)
    return receiver.recv() if receiver.poll() else f"exit code {process.exitcode}"


def run_inside(folder, code, sender):
    enter(folder)
    try:
        exec(code, {})
        sender.send("")
    except Exception as error:
        sender.send(f"{type(error).__name__}: {error}")


@pytest.fixture
def folders(tmp_path):
    """A submission's own folder, and another learner's with a notebook in it."""
    own = tmp_path / "own"
    other = tmp_path / "other"
    own.mkdir()
    other.mkdir()
    (other / "04.ipynb").write_text("whole")
    return own, other


WAYS_OUT = [
    "import shutil; shutil.rmtree('{other}')",
    "import os; fd = os.open('{other}', os.O_RDONLY); os.unlink('04.ipynb', dir_fd=fd)",
    "import torch; torch.save([1], '{other}/04.ipynb')",
    "import sqlite3; sqlite3.connect('{other}/x.db').execute('create table t (x)')",
    "import os; os.link('{other}/04.ipynb', 'mine')",
    "import os; os.mkfifo('{other}/fifo')",
    "import os; os.rename('{other}/04.ipynb', 'mine')",
    "import os; os.symlink('{other}/04.ipynb', 'link'); open('link', 'w').write('')",
    "import ctypes; assert ctypes.CDLL(None).unlink(b'{other}/04.ipynb') == 0",
]


@pytest.mark.parametrize("code", WAYS_OUT)
@pytest.mark.skipif(not landlock.version(), reason="this kernel has no Landlock")
def test_no_file_of_another_is_touched(code, folders):
    own, other = folders
    assert tried_inside(own, code.format(other=other)), "nothing was raised"
    assert [path.name for path in other.iterdir()] == ["04.ipynb"]
    assert (other / "04.ipynb").read_text() == "whole"


SOLUTION = course_folder("solutions") / "04_ring_all_reduce.ipynb"


@pytest.mark.parametrize(
    "code",
    [
        f"open('{SOLUTION}')",
        f"import os; os.open('{SOLUTION.name}', 0, dir_fd=os.open('{SOLUTION.parent}', 0))",
        f"import os; os.symlink('{SOLUTION.parent}', 'x'); open('x/{SOLUTION.name}')",
        f"import ctypes; assert ctypes.CDLL(None).open(b'{SOLUTION}', 0) > 0",
    ],
)
def test_no_solution_is_read(code, folders):
    assert tried_inside(folders[0], code), "nothing was raised"
    beside = SOLUTION.parent.parent / "exercises" / SOLUTION.name
    assert tried_inside(folders[0], f"open('{beside}')") == ""


def test_own_files_and_own_processes_are_free(folders):
    code = (
        "import os, shutil, signal, tempfile, torch\n"
        "os.makedirs('a/b'); open('a/b/c', 'w').write('x'); shutil.rmtree('a')\n"
        "torch.save([1], 'x.pt'); os.rename('x.pt', 'y.pt')\n"
        "open('helper.py', 'w').write('x = 1')\n"
        "import helper; tempfile.mkdtemp(); open('/dev/null', 'w').write('x')\n"
        "child = os.fork()\n"
        "if not child: signal.pause()\n"
        "os.kill(child, 9); os.waitpid(child, 0); print('x' * 10**6)"
    )
    assert tried_inside(folders[0], code) == ""


@pytest.mark.parametrize(
    "way",
    [
        "import os; os.kill({pid}, 9)",
        "import os; os.killpg({pid}, 9)",
        "import psutil; psutil.Process({pid}).kill()",
        "import ctypes; assert ctypes.CDLL(None).kill({pid}, 9) == 0",
    ],
)
@pytest.mark.skipif(landlock.version() < 6, reason="this kernel's Landlock has no signals")
def test_no_process_of_another_is_ended(way, folders):
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    other = subprocess.Popen(command, start_new_session=True)
    try:
        assert tried_inside(folders[0], way.format(pid=other.pid)), "nothing was raised"
        assert other.poll() is None
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()


SEGMENTS = (
    "import os, _posixshmem as shm\n"
    "def fill(name):\n"
    "    handle = shm.shm_open(name, os.O_CREAT | os.O_RDWR, 0o600)\n"
    "    os.write(handle, bytes(32 << 20))\n"
)


def test_shared_memory_is_bounded_whether_it_has_a_name_or_not(folders):
    assert "Cannot allocate" in tried_inside(folders[0], "import mmap; mmap.mmap(-1, 16 << 30)")
    many = f"{SEGMENTS}for number in range(40): fill(f'/ddp_course_test_{{number}}')"
    assert "No space left" in tried_inside(folders[0], many)
    few = f"{SEGMENTS}import multiprocessing\nfill('/ddp_course_test')\nmultiprocessing.Lock()"
    assert tried_inside(folders[0], few) == ""
    assert not [path for path in Path("/dev/shm").iterdir() if "ddp_course_test" in path.name]


def test_where_it_cannot_be_bounded_there_is_none(folders, monkeypatch):
    monkeypatch.setattr(guard.linux, "unshare_as_anyone", refuse)
    assert guard.own_view([]) == []


def refuse(flags):
    raise PermissionError


FIRST_CORE = min(psutil.Process().cpu_affinity())
LONG = "import time\nstart = time.process_time()\nwhile time.process_time() < start + 2: pass"


def test_a_cells_time_is_the_processors_where_others_compute_and_the_clocks_where_it_waits(
    tmp_path,
):
    receiver, sender = SERVER.Pipe()
    process = SERVER.Process(target=use_a_busy_core, args=(str(tmp_path), sender))
    others = [SERVER.Process(target=spin) for _ in range(4)]
    try:
        for each in (*others, process):
            each.start()
        error, used, took = receiver.recv()
        assert error == ""
        assert used < 4 < took
        error, *_ = receiver.recv()
        assert "time.sleep(60)) was still running" in error
        process.join(60)
    finally:
        for each in (*others, process):
            each.kill()


def use_a_busy_core(folder, sender):
    """Run a cell that computes and one that sleeps, beside four processes on the same core.

    Each may take at most 4 seconds.
    """
    import ipykernel.inprocess.ipkernel  # noqa: F401 (a kernel begins sooner then)
    import torch  # noqa: F401

    for name in ("work", "answers", "ipython"):
        (Path(folder) / name).mkdir()
    os.environ["IPYTHONDIR"] = f"{folder}/ipython"
    kernel = run_cells.Kernel(folder, 0.0)
    psutil.Process(kernel.process.pid).cpu_affinity([FIRST_CORE])
    kernel.run("pass", 60)
    for code in (LONG, "time.sleep(60)"):
        start = time.monotonic()
        used = kernel.used
        error = kernel.run(code, 4.0)
        sender.send((error, kernel.used - used, time.monotonic() - start))
    run_cells.end_children()


def spin():
    os.sched_setaffinity(0, {FIRST_CORE})
    while True:
        pass


def test_what_an_answer_writes_to_the_terminal_is_dropped(folders, capfd):
    assert (
        tried_inside(folders[0], "import os; os.write(1, b'x' * 10**5); print('y' * 10**5)") == ""
    )
    assert capfd.readouterr().out == ""


def test_slow_cells_have_one_deadline_and_leave_the_rest_time(tmp_path):
    slow = ["import time; time.sleep(60)"] * 5
    path = hand_in(tmp_path / "slow", {"1.1": solution("1.1")}, slow)
    start = time.monotonic()
    (result,) = grade([submission_of(path)], EXERCISES, seed=3, timeout=40.0)
    assert [task.message for task in result.tasks] == ["", "", ""]
    assert time.monotonic() - start < 4 * 40, "each had 40 seconds"


def test_where_the_courses_own_cells_take_long_the_learners_slow_ones_are_left_out(tmp_path):
    """On a busy machine the import took so long that it was left out, and no check was there."""
    given = EXERCISES[1].given
    imports = f"import time; time.sleep(4)\n{given['imports']}"
    exercises = {1: EXERCISES[1]._replace(given=given | {"imports": imports})}
    path = hand_in(tmp_path / "slow", {"1.1": solution("1.1")}, ["time.sleep(2)"] * 8)
    submission = submission_of(path)
    submission.cells = [cell for cell in submission.cells if cell.id != "imports"]
    (result,) = grade([submission], exercises, seed=3, timeout=30.0)
    assert [task.message for task in result.tasks] == ["", "", ""]


WAITS = "import signal\n    signal.pause()"
WAITING = {
    "1.1": f"def train_step(*anything):\n    {WAITS}",
    "1.2": f"def accumulate(*anything):\n    {WAITS}",
    "1.3": f"def gradient_bytes(model):\n    {WAITS}",
}


def test_cells_and_answers_that_wait_have_one_deadline_together(tmp_path, monkeypatch):
    """Each that waits for ever is told its line, and one of them that is right would be told so."""
    monkeypatch.setattr(grader, "SLOWER", 0.0)  # On a busy machine they would have longer.
    judge = grader.Judge(3)
    for task in of_exercise(1):
        judge.right(task)
    path = hand_in(tmp_path / "ada", WAITING, ["import time; time.sleep(60)"])
    start = time.monotonic()
    result = grader.grade_one(submission_of(path), EXERCISES, judge, 30.0)
    assert time.monotonic() - start < 4 * 30, "each had 30 seconds"
    for task in result.tasks:
        assert "not finished in time: still running on rank 0 (line 3 of your cell" in task.message


def test_what_one_answer_waits_for_costs_no_other_its_points(tmp_path):
    path = hand_in(tmp_path / "ada", WAITING | {"1.3": solution("1.3")})
    (result,) = grade([submission_of(path)], EXERCISES, seed=3, timeout=40.0)
    assert [task.points for task in result.tasks] == [0, 0, 2]


def test_an_answer_may_wait_longer_where_the_solution_took_longer(tmp_path):
    judge = grader.Judge(3)
    right = judge.right
    judge.right = lambda task: right(task)._replace(seconds=10.0)
    waits = "import signal\nsignal.sigtimedwait([], 8)\n"
    answers = {"1.1": (cells_with("1.1", waits + solution("1.1")))}
    assert verdicts_of(judge, answers, tmp_path, seconds=4.0) == {"1.1": ""}
    judge.right = right
    said = verdicts_of(judge, answers, tmp_path, seconds=4.0)
    assert said["1.1"].startswith("not finished in time")


def verdicts_of(judge, answers, folder, seconds):
    """Return {task: what is said of the answer}, where a submission has so many seconds left."""
    verdicts = judge.verdicts(answers, str(folder), seconds)
    return {number: said.message for number, said in verdicts}


def test_what_no_time_was_left_for_is_told_who_took_it(tmp_path, monkeypatch):
    monkeypatch.setattr(grader, "SLOWER", 0.0)
    answers = {number: cells_with(number, text) for number, text in WAITING.items()}
    said = verdicts_of(grader.Judge(3), answers, tmp_path, seconds=0.5)
    assert said["1.1"].startswith("not finished in time")
    assert said["1.2"] == said["1.3"] == "not tried: 1.1 took all of the time"


def test_a_launch_that_no_time_was_left_for_is_told_who_took_it(tmp_path, monkeypatch):
    """1.1 and 3.1 run on unlike numbers of ranks: the first launch takes all of the time."""

    def gathered(attempts, limits=None, *of_a_company, seconds=None):
        if limits is None:
            return [Evidence({}, seconds=1.0)]  # This evidence is the solution's.
        if of_a_company and attempts[0].task.number == "1.1":
            return [Evidence({}, "not finished in time")]
        return []

    monkeypatch.setattr(grader, "gather", gathered)
    said = verdicts_of(grader.Judge(3), {"1.1": b"", "3.1": b""}, tmp_path, seconds=5.0)
    assert said["1.1"] == "not finished in time"
    assert said["3.1"] == "not tried: 1.1 took all of the time"


def test_ranks_work_where_the_cells_do(tmp_path):
    answer = (
        solution("3.1") + "\n_collect = collect\n\ndef collect(tensor, server=0, group=None):\n"
    )
    answer += "    import helper\n    open('log.txt', 'a').write('x')\n"
    answer += "    return _collect(tensor, server, group)\n"
    own = [
        "open('helper.py', 'w').write('x = 1')",
        "import shutil, os\nopen('results', 'w').close()",
    ]
    path = hand_in(tmp_path / "log", {"3.1": answer}, own)
    (result,) = grade([submission_of(path)], EXERCISES, seed=3)
    assert [task.message for task in result.tasks] == [""] * 4


WRITES_TO_ALL_FILES = (
    "import os\nfor file in range(3, 128):\n    try: os.write(file, bytes([0, 0, 16, 0]))\n"
    "    except OSError: pass\nos.closerange(3, 128)"
)


USES_WHAT_LIES_BESIDE = f"import helper\nassert open('data.txt').read() == 'x'\n{solution('1.1')}"


def test_files_beside_a_notebook_lie_beside_it_when_it_runs(tmp_path):
    path = hand_in(tmp_path / "ada", {"1.1": USES_WHAT_LIES_BESIDE})
    (path.parent / "helper.py").write_text("")
    (path.parent / "data.txt").write_text("x")
    with zipfile.ZipFile(tmp_path / "ben.zip", "w") as archive:
        for file in path.parent.iterdir():
            archive.write(file, f"mine/{file.name}")
    results = grade(find_submissions([tmp_path])[0], EXERCISES, seed=3)
    assert [result.tasks[0].message for result in results] == ["", ""]


def test_a_link_beside_a_notebook_is_left_out(tmp_path):
    path = hand_in(tmp_path / "ada", {"1.1": USES_WHAT_LIES_BESIDE})
    (path.parent / "helper.py").write_text("")
    (path.parent / "data.txt").symlink_to(SOLUTION)
    (result,) = grade(find_submissions([tmp_path])[0], EXERCISES, seed=3)
    assert "No such file" in result.tasks[0].message


def test_a_link_to_a_folder_is_not_followed(tmp_path):
    path = hand_in(tmp_path / "class" / "ada", {"1.1": solution("1.1")})
    (path.parent / "again").symlink_to(path.parent)
    (path.parent / "disk").symlink_to("/")
    (tmp_path / "named").symlink_to(tmp_path / "class")
    for folder in ("class", "named"):
        (work,), _ = find_submissions([tmp_path / folder])
        assert work.learner == "ada"


def test_a_cell_that_writes_to_all_open_files_costs_what_it_is_in(tmp_path, capfd):
    path = hand_in(tmp_path / "ada", {"1.1": solution("1.1")}, [WRITES_TO_ALL_FILES])
    (result,) = grade([submission_of(path)], EXERCISES, seed=3)
    assert [task.message for task in result.tasks] == [""] * 3
    assert capfd.readouterr().err == ""


def test_an_answer_that_writes_to_all_open_files_shows_nothing_to_the_teacher(tmp_path, capfd):
    body = WRITES_TO_ALL_FILES.replace("bytes([0, 0, 16, 0])", "b'on your terminal\\n'")
    answer = f"def collect(tensor, server=0, group=None):\n{indent(body, '    ')}"
    path = hand_in(tmp_path / "ada", {"3.1": answer})
    (result,) = grade([submission_of(path)], EXERCISES, seed=3)
    assert [task.points > 0 for task in result.tasks] == [False, True, False, True]
    assert capfd.readouterr() == ("", "")


def test_the_graders_own_fault_is_no_zero(tmp_path, monkeypatch):
    path = hand_in(tmp_path / "anna", {"1.1": solution("1.1")})
    monkeypatch.setattr("ddp_exercises.grading.grader.run", lambda *_: 1 / 0)
    (result,) = grade([submission_of(path)], EXERCISES, seed=3)
    assert not result.has_grade
    assert result.mark == ""
    assert "fault of the grader" in result.message
