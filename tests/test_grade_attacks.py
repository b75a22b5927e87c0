"""No submission gets points that it did not earn, each gets a report, and the others are graded all the same."""

import copy
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pytest

from ddp_course.grading.grade import exercises_folder, grade
from ddp_course.grading.submission import find_submissions, load_exercises

ROOT = Path(__file__).parents[1]
SOLVED = ROOT / "solutions" / "08_pipeline.ipynb"
UNSOLVED = ROOT / "exercises" / "08_pipeline.ipynb"
POINTS = {"8.1": 1, "8.2": 3, "8.3": 1, "8.4": 1}


def notebook(change=lambda cells: None, source=SOLVED):
    """A notebook with `change(cells by id)` made to it, as text."""
    made = nbformat.read(source, as_version=4)
    change({cell.id: cell for cell in made.cells})
    return nbformat.writes(made)


def answer(task, text, source=SOLVED):
    """A notebook in which the answer to one task is `text`."""

    def change(cells):
        cells[f"answer-{task.replace('.', '-')}"].source = text

    return notebook(change, source)


def in_front(text, source=UNSOLVED):
    """A notebook in which `text` runs before the first answer."""

    def change(cells):
        cells["answer-8-1"].source = text + "\n" + cells["answer-8-1"].source

    return notebook(change, source)


def solved_outputs(cells):
    """Outputs of a full success, on every cell of an unsolved notebook."""
    for name, cell in cells.items():
        if name.startswith("check"):
            said = f"Exercise {name[6:].replace('-', '.')}: correct.\n"
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=said)]
            cell.execution_count = 7


def edited_checks(cells):
    """Check cells that check nothing."""
    for name, cell in cells.items():
        if name.startswith("check"):
            cell.source = "print('Exercise: correct.')"


def tags(cells):
    """nbval's own switches on every cell."""
    for cell in cells.values():
        cell.metadata.tags = ["raises-exception", "nbval-skip"]
        cell.source = cell.source if cell.cell_type == "markdown" else "# NBVAL_SKIP\n" + cell.source


def without_checks():
    """A notebook whose check cells were deleted, and the rest put in reverse order."""
    made = nbformat.read(SOLVED, as_version=4)
    made.cells = [cell for cell in reversed(made.cells) if not cell.id.startswith("check")]
    return nbformat.writes(made)


def duplicated():
    """A solved notebook with every check cell there twice."""
    made = nbformat.read(SOLVED, as_version=4)
    for cell in [cell for cell in made.cells if cell.id.startswith("check")]:
        twin = copy.deepcopy(cell)
        twin.id, twin.source = f"{cell.id}-copy", "raise SystemExit"
        made.cells.insert(0, twin)
    return nbformat.writes(made)


def older(source=SOLVED):
    """The notebook in format 4.4, which has no cell ids."""
    raw = json.loads(source.read_text())
    raw["nbformat_minor"] = 4
    for cell in raw["cells"]:
        del cell["id"]
    return json.dumps(raw)


FORGED = """
import ddp_course, ddp_course.grading.check_cell, ddp_course.grading.examine, ddp_course.grading.tasks
def nothing(*args, **kwargs):
    return None
ddp_course.grading.check_cell.check = ddp_course.grading.check = check = nothing
ddp_course.grading.examine.judge = ddp_course.grading.examine.examine = nothing
ddp_course.launch = nothing
for task in list(ddp_course.grading.tasks._tasks.values()):
    task.judge = nothing
"""
LIAR = """
class Liar(list):
    def __eq__(self, other):
        return True
    def __ne__(self, other):
        return False
    def __len__(self):
        return 99
def gpipe(stage, stages, micro_batches):
    return Liar()
"""
WAIT = "while True:\n    pass\n"
FORKS = "import os\nwhile True:\n    os.fork()\n"
SPAWNS = """
import os
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        while True:
            pass
"""
QUIT = "import os\ngetattr(os, '_ex' + 'it')(0)\n"
QUIT_LATER = "def gpipe(stage, stages, micro_batches):\n    import os\n    getattr(os, '_ex' + 'it')(0)\n"
SHADOW = """
from pathlib import Path
for name in ("ddp_course.py", "conftest.py", "sitecustomize.py", "torch.py"):
    Path(name).write_text("def check(*a, **k): pass\\ndef pytest_runtest_makereport(*a): pass\\n")
"""
VANDAL = f"""
import shutil, pathlib
for path in {[str(ROOT / "exercises"), str(ROOT / "solutions")]!r}:
    for file in pathlib.Path(path).glob("*.ipynb"):
        try:
            file.write_bytes(file.read_bytes())
            pathlib.Path(path, "VANDAL").touch()
        except OSError:
            pass
"""
CUNNING = """
import ddp_course.running.wire as wire, torch.distributed as dist, builtins
dist.all_reduce = dist.send = wire.exchange = lambda *a, **k: None
def gpipe(stage, stages, micro_batches):
    builtins.print = lambda *a, **k: None
    return [("F", m) for m in range(micro_batches)] + [("B", m) for m in range(micro_batches)]
"""

# name: (text or bytes of the notebook, points by task or None for none at all, words in some message)
ALL = dict(POINTS)
CASES = {
    "honest": (notebook(), ALL, ""),
    "unsolved": (notebook(source=UNSOLVED), {}, "not solved yet"),
    "stored_outputs": (notebook(solved_outputs, UNSOLVED), {}, "not solved yet"),
    "edited_checks": (notebook(edited_checks, UNSOLVED), {}, "not solved yet"),
    "edited_checks_solved": (notebook(edited_checks), ALL, ""),
    "tagged": (notebook(tags, UNSOLVED), {}, "not solved yet"),
    "tagged_solved": (notebook(tags), ALL, ""),
    "deleted_and_reordered": (without_checks(), ALL, ""),
    "duplicated_checks": (duplicated(), ALL, ""),
    "script_magic": (answer("8.1", "%%script true\ndef gpipe(*a): pass"), {**ALL, "8.1": 0}, "no magics"),
    "forged_checks": (in_front(FORGED), {}, ""),
    "print_redefined": (in_front("def print(*args, **kwargs):\n    pass\n", SOLVED), ALL, ""),
    "always_equal": (answer("8.1", LIAR), {**ALL, "8.1": 0}, ""),
    "replaces_torch": (answer("8.1", CUNNING), {**ALL, "8.1": 0}, "replaces"),
    "shadow_modules": (in_front(SHADOW), {}, ""),
    "os_exit": (in_front(QUIT), {}, "died"),
    "os_exit_later": (answer("8.1", QUIT_LATER), {**ALL, "8.1": 0}, "ended the process"),
    "os_exit_plain": (answer("8.1", "import os\nos._exit(0)"), {**ALL, "8.1": 0}, "_exit"),
    "endless": (answer("8.1", WAIT), {}, "Timeout"),
    "endless_later": (
        answer("8.1", "def gpipe(*args):\n    while True: pass"),
        {**ALL, "8.1": 0},
        "not finished in time",
    ),
    "fork_bomb": (answer("8.1", FORKS), {}, "stopped"),
    "left_running": (answer("8.4", SPAWNS), {**ALL, "8.4": 0}, "most_held"),
    "memory": (answer("8.1", "x = bytearray(100 << 30)\n"), {**ALL, "8.1": 0}, "MemoryError"),
    "gigabyte_printed": (in_front("for _ in range(1024):\n    print('x' * (1 << 20))\n", SOLVED), {}, "printed"),
    "vandal": (in_front(VANDAL), {}, ""),
    "older_format": (older(), ALL, ""),
    "invalid_json": ("{ this is not JSON", None, "not valid JSON"),
    "not_a_notebook": ("[1, 2, 3]", None, "not a notebook"),
    "empty_file": ("", None, "is empty"),
    "not_utf8": (b"\xff\xfe\x00{", None, "not UTF-8"),
    "wrong_number": ((ROOT / "solutions" / "01_single_device.ipynb").read_text(), None, "named as exercise 8"),
}


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The folder of all submissions, and how each was graded."""
    folder = tmp_path_factory.mktemp("submissions")
    for name, (content, _, _) in CASES.items():
        (folder / name).mkdir()
        path = folder / name / "08_pipeline.ipynb"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "no_notebook").mkdir()
    (folder / "no_such_exercise").mkdir()
    (folder / "no_such_exercise" / "77_nothing.ipynb").write_text(notebook())
    (folder / "linked").mkdir()
    outside = tmp_path_factory.mktemp("outside") / "secret.ipynb"
    outside.write_text(notebook())
    (folder / "linked" / "08_pipeline.ipynb").symlink_to(outside)
    (folder / "linked_folder").symlink_to(outside.parent)
    before = fingerprint(folder), fingerprint(ROOT / "exercises")
    processes = set(psutil.pids())
    results = grade(find_submissions([folder]), load_exercises(exercises_folder()), 5, jobs=3, timeout=30.0)
    after = fingerprint(folder), fingerprint(ROOT / "exercises")
    left = [psutil.Process(pid) for pid in psutil.Process().children() and set(psutil.pids()) - processes if ours(pid)]
    return {result.learner: result for result in results}, before == after, left


def ours(pid):
    """Whether a process looks like one that the grader started."""
    try:
        line = " ".join(psutil.Process(pid).cmdline())
        return "grading.zygote" in line
    except psutil.Error:
        return False


def fingerprint(folder):
    """Name, content and time of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return [(str(p), hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in files]


@pytest.mark.parametrize("name", CASES)
def test_points_are_earned(graded, name):
    results, _, _ = graded
    _, points, words = CASES[name]
    result = results[name]
    messages = [result.message, *(task.message for task in result.tasks)]
    if points is None:
        assert result.points == 0 and not result.passed
        assert words in result.message, messages
        return
    earned = {task.id: task.points for task in result.tasks}
    assert earned == {task: points.get(task, 0) for task in POINTS}, messages
    assert any(words in message for message in messages), messages
    assert all(task.message for task in result.tasks if not task.points), "no points, and no word why"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_notebook", "no notebook"),
        ("no_such_exercise", "named as exercise 77"),
        ("linked", "symbolic link"),
        ("linked_folder", "symbolic link"),
    ],
)
def test_what_cannot_be_graded_is_reported(graded, name, words):
    result = graded[0][name]
    assert result.points == 0 and not result.passed and words in result.message


def test_nothing_of_a_submission_is_changed(graded):
    assert graded[1]


def test_no_process_is_left(graded):
    assert graded[2] == []


def test_exit_codes(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "ddp_course.cli", "grade", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)

    assert run(tmp_path / "nowhere").returncode == 2
    assert run(tmp_path).returncode == 2
    good, bad = tmp_path / "08_good.ipynb", tmp_path / "08_bad.ipynb"
    good.write_text(notebook())
    bad.write_text(notebook(source=UNSOLVED))
    reports = ["--json", "out/r.json", "--csv", "out/r.csv", "--html", "out/html", "--jobs", "2"]
    done = run(good, bad, *reports)
    assert done.returncode == 1, done.stderr
    assert "1 of 2 submissions have all points" in done.stdout
    first, second = json.loads((tmp_path / "out" / "r.json").read_text())
    assert first["learner"] == "08_good" and first["points"] == first["possible"] == 6
    assert second["points"] == 0 and second["tasks"][0].keys() == {"id", "points", "possible", "message"}
    assert (
        (tmp_path / "out" / "r.csv")
        .read_text()
        .startswith("learner,exercise,task,points,possible,message\n08_good,8,8.1,1,1,\n")
    )
    assert (tmp_path / "out" / "html" / "08_good.html").exists()
    assert run(good, "--json", "/proc/nowhere/r.json").returncode == 2


def test_only_passing_exits_with_zero(graded):
    assert graded[0]["honest"].passed and not graded[0]["unsolved"].passed
