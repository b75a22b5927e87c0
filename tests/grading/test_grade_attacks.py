"""No submission gets points that it did not earn, each gets a report, and the others are graded all the same."""

import copy
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pytest
from answers import collection

from ddp_course import cli
from ddp_course.grading import submission
from ddp_course.grading.grade import Grader, exercises_folder, grade
from ddp_course.grading.submission import Submission, find_submissions, load_exercises
from ddp_course.grading.tasks import find

ROOT = Path(__file__).parents[2]
SOLVED = ROOT / "solutions" / "08_pipeline.ipynb"
UNSOLVED = ROOT / "exercises" / "08_pipeline.ipynb"
POINTS = {task: points for task, (_, points) in load_exercises(exercises_folder())[8].checks.items()}
# An attack that is handed in unsolved proves nothing: that is noticed before anything runs. These run, and are wrong.
WRONG = {
    "answer-8-1": "def gpipe(stage, stages, micro_batches):\n    return []",
    "answer-8-2": "def one_forward_one_backward(stage, stages, micro_batches):\n    return []",
    "answer-8-3": "def bubble(stages, micro_batches):\n    return 0.25",
    "answer-8-4": "def most_held(order):\n    return 0",
}
WRONG |= {
    f"answer-{task.replace('.', '-')}": "\n".join(f"def {name}(*args): pass" for name in find(task).names)
    for task in list(POINTS)[4:]
}


def load(source):
    """A notebook from a file, or with the answers `source`, by cell id."""
    made = nbformat.read(source if isinstance(source, Path) else SOLVED, as_version=4)
    for cell in made.cells:
        if not isinstance(source, Path):
            cell.source = source.get(cell.id, cell.source)
    return made


def notebook(change=lambda cells: None, source=SOLVED):
    """A notebook with `change(cells by id)` made to it, as text."""
    made = load(source)
    change({cell.id: cell for cell in made.cells})
    return nbformat.writes(made)


def answer(task, text, source=SOLVED):
    """A notebook in which the answer to one task is `text`."""

    def change(cells):
        cells[f"answer-{task.replace('.', '-')}"].source = text

    return notebook(change, source)


def in_front(text, source=WRONG):
    """A notebook in which `text` runs before the first answer."""

    def change(cells):
        cells["answer-8-1"].source = text + "\n" + cells["answer-8-1"].source

    return notebook(change, source)


def solved_outputs(cells):
    """Outputs of a full success, on every check cell."""
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


def without_checks(source):
    """A notebook whose check cells were deleted, and the rest put in reverse order."""
    made = load(source)
    made.cells = [cell for cell in reversed(made.cells) if not cell.id.startswith("check")]
    return nbformat.writes(made)


def duplicated(source, role="check", text="raise SystemExit"):
    """A notebook with every check cell (or answer cell) there twice, the first time with another text."""
    made = load(source)
    for cell in [cell for cell in made.cells if cell.id.startswith(role)]:
        twin = copy.deepcopy(cell)
        twin.source = text
        made.cells.insert(0, twin)
    return json.dumps(made)


def older(source=SOLVED):
    """The notebook in format 4.4, which has no cell ids."""
    raw = json.loads(source.read_text())
    raw["nbformat_minor"] = 4
    for cell in raw["cells"]:
        del cell["id"]
    return json.dumps(raw)


def much_older():
    """The notebook in format 3, which has work sheets and calls a source an input."""
    return json.dumps(nbformat.convert(nbformat.from_dict(json.loads(older())), 3))


FORGED = """
import ddp_course, ddp_course.grading.check_cell, ddp_course.grading.examine, ddp_course.grading.tasks
def nothing(*args, **kwargs):
    return None
ddp_course.grading.check_cell.check = ddp_course.grading.check = check = nothing
ddp_course.grading.examine.verdict = ddp_course.grading.examine.examine = nothing
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
MODULES = ("ddp_course.py", "conftest.py", "sitecustomize.py", "torch.py")
SHADOW = f"""
from pathlib import Path
for name in {MODULES!r}:
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
    "wrong": (notebook(source=WRONG), {}, "never goes forward"),
    "stored_outputs": (notebook(solved_outputs, WRONG), {}, "never goes forward"),
    "edited_checks": (notebook(edited_checks, WRONG), {}, "never goes forward"),
    "edited_checks_solved": (notebook(edited_checks), ALL, ""),
    "tagged": (notebook(tags, WRONG), {}, "never goes forward"),
    "tagged_solved": (notebook(tags), ALL, ""),
    "deleted_and_reordered": (without_checks(WRONG), {}, "never goes forward"),
    "deleted_and_reordered_solved": (without_checks(SOLVED), ALL, ""),
    "duplicated_checks": (duplicated(WRONG, text="pass"), {}, "never goes forward"),
    "duplicated_checks_solved": (duplicated(SOLVED), ALL, ""),
    "duplicated_answers": (duplicated(SOLVED, "answer"), {}, "is there twice"),
    "script_magic": (answer("8.1", "%%script true\ndef gpipe(*a): pass"), {**ALL, "8.1": 0}, "no magics"),
    "forged_checks": (in_front(FORGED), {}, ""),
    "print_redefined": (in_front("def print(*args, **kwargs):\n    pass\n", SOLVED), ALL, ""),
    "always_equal": (answer("8.1", LIAR), {**ALL, "8.1": 0}, ""),
    "replaces_torch": (answer("8.1", CUNNING), {**ALL, "8.1": 0}, "replaces"),
    "shadow_modules": (in_front(SHADOW), {}, ""),
    "os_exit": (in_front(QUIT, SOLVED), {}, "died"),
    "os_exit_in_the_middle": (answer("8.3", QUIT), {"8.1": 2, "8.2": 3}, "died"),
    "os_exit_later": (answer("8.1", QUIT_LATER), {**ALL, "8.1": 0}, "ended the process"),
    "os_exit_plain": (answer("8.1", "import os\nos._exit(0)"), {**ALL, "8.1": 0}, "imports os"),
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
    "much_older_format": (much_older(), ALL, ""),
    "modules_beside_it": (notebook(source=WRONG), {}, "never goes forward"),
    "invalid_json": ("{ this is not JSON", None, "not valid JSON"),
    "not_a_notebook": ("[1, 2, 3]", None, "not a notebook"),
    "empty_file": ("", None, "is empty"),
    "not_utf8": (b"\xff\xfe\x00{", None, "not UTF-8"),
    "wrong_number": ((ROOT / "solutions" / "01_single_device.ipynb").read_text(), None, "named as exercise 8"),
}


# Whoever does one of these does it on purpose.
ATTACKS = ["forged_checks", "always_equal", "replaces_torch", "shadow_modules", "fork_bomb", "left_running", "vandal"]
ATTACKS += ["os_exit", "os_exit_in_the_middle", "os_exit_later", "os_exit_plain"]
# All others are not looked at before they run: what holds them then is the sandbox and the judge.
LOOKED_AT = {"os_exit_plain", "script_magic", "unsolved"}


@pytest.fixture(scope="module")
def graded(tmp_path_factory, request):
    """How each submission was graded (of CASES those that are asked for), whether files changed, processes left."""
    folder = tmp_path_factory.mktemp("submissions")
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    for name in [name for name in CASES if name in asked | {"honest", "unsolved"}]:
        content = CASES[name][0]
        (folder / name).mkdir()
        path = folder / name / "08_pipeline.ipynb"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        for module in MODULES if name == "modules_beside_it" else ():
            (folder / name / module).write_text("def check(*args): pass\ndef pytest_runtest_call(item): pass\n")
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
    submissions, exercises = find_submissions([folder]), load_exercises(exercises_folder())
    results = grade([one for one in submissions if one.learner in LOOKED_AT], exercises, 5, jobs=3, timeout=30.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submission, "at_first_sight", lambda source, allowed: "")
        results += grade([one for one in submissions if one.learner not in LOOKED_AT], exercises, 5, 3, 30.0)
    after = fingerprint(folder), fingerprint(ROOT / "exercises")
    return {result.learner: result for result in results}, before == after, started_since(processes)


def started_since(processes):
    """Processes that are not among `processes`, and were started by these tests: they inherit a variable of ours."""
    return [pid for pid in set(psutil.pids()) - processes if ours(pid)]


def ours(pid):
    """Whether a process was started by these tests."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.environ().get("DDP_COURSE_TESTS") == os.environ["DDP_COURSE_TESTS"]
    except psutil.AccessDenied:
        return "ddp_course.grading" in " ".join(process.cmdline())
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
    assert not any("Kernel dead" in message for message in messages), "that names no fault of the learner's"


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_has_a_line_for_a_persons_eye(graded, name):
    assert any(task.suspicious for task in graded[0][name].tasks)
    assert not any(task.suspicious for task in graded[0]["honest"].tasks)


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


# The command, but answers run that would be refused at first sight.
NOT_LOOKED_AT = """
from ddp_course import cli
from ddp_course.grading import submission
submission.at_first_sight = lambda source, allowed: ""
raise SystemExit(cli.main())
"""

# A new Python for `sys.argv[2:]`, without any privilege, and if sys.argv[1] is "forbidden" without user namespaces.
ORDINARY = """
import ctypes, os, sys
from pathlib import Path
user, group = os.getuid(), os.getgid()
if ctypes.CDLL(None).unshare(0x10000000) == 0:
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"65534 {user} 1")
    Path("/proc/self/gid_map").write_text(f"65534 {group} 1")
    if sys.argv[1] == "forbidden":
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
elif sys.argv[1] == "allowed":
    sys.exit(77)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
# Kills the grader and its helpers, if it can reach them: the processes above it that are theirs, and no others.
KILLER = """
import os, psutil
for process in psutil.Process().parents():
    if any("grading.zygote" in part or part == "ddp_course.cli" for part in process.cmdline()):
        try:
            getattr(os, "ki" + "ll")(process.pid, 9)
        except OSError:
            pass
"""
ORPHANS = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    getattr(os, "_ex" + "it")(0)
"""
WEAK_CASES = {
    "0_vandal": (in_front(VANDAL), {}),
    "1_killer": (in_front(KILLER), {}),
    "2_orphans": (in_front(ORPHANS, SOLVED), ALL),
    "3_fork_bomb": (answer("8.1", FORKS), {}),
    "4_os_exit": (in_front(QUIT), {}),
    "5_honest": (notebook(), ALL),
}


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
@pytest.mark.parametrize("namespaces", ["allowed", "forbidden"])
def test_ordinary_users_grade_with_and_without_namespaces(namespaces, tmp_path):
    for name, (content, _) in WEAK_CASES.items():
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "08_pipeline.ipynb").write_text(content)
    before, processes = (fingerprint(tmp_path / "in"), fingerprint(ROOT / "exercises")), set(psutil.pids())
    command = [sys.executable, "-c", ORDINARY, namespaces, "-c", NOT_LOOKED_AT, "grade", str(tmp_path / "in")]
    command += ["--json", str(tmp_path / "r.json"), "--jobs", "2", "--timeout", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode == 77:
        pytest.skip("this system allows no user namespaces")
    assert done.returncode == 1, done.stderr
    assert ("no user namespaces here" in done.stderr) == (namespaces == "forbidden")
    results = {result["learner"]: result for result in json.loads((tmp_path / "r.json").read_text())}
    for name, (_, points) in WEAK_CASES.items():
        earned = {task["id"]: task["points"] for task in results[name]["tasks"]}
        assert earned == {task: points.get(task, 0) for task in POINTS}, results[name]
    assert "stopped" in str(results["3_fork_bomb"])
    assert (fingerprint(tmp_path / "in"), fingerprint(ROOT / "exercises")) == before
    assert started_since(processes) == []


@pytest.mark.parametrize("helper", ["zygote", "examiner"])
def test_grading_goes_on_when_a_helper_is_killed(helper, tmp_path):
    path = tmp_path / "08_good.ipynb"
    path.write_text(notebook())
    with Grader(load_exercises(exercises_folder()), seed=5) as grader:
        for _ in range(2):
            assert grader.grade(Submission("good", path)).passed
            process = getattr(grader, helper).process
            os.kill(process.pid, signal.SIGKILL)
            process.wait()


def test_the_option_hidden_finds_what_the_checks_do_not(tmp_path):
    (seldom,) = [answer for answer in collection(1) if answer.kind == "hidden"]
    path = tmp_path / "01_anna.ipynb"
    path.write_text(answer(seldom.task, seldom.source, ROOT / "solutions" / "01_single_device.ipynb"))
    for option in ([], ["--hidden"]):
        assert cli.main(["grade", str(path), "--json", str(tmp_path / "r.json"), *option]) == len(option)
        (result,) = json.loads((tmp_path / "r.json").read_text())
        found = {task["id"]: task["message"] for task in result["tasks"] if task["message"]}
        assert list(found) == ([seldom.task] if option else [])
        assert not option or seldom.words in found[seldom.task]


def test_exit_codes(tmp_path, capsys, monkeypatch):
    def run(*arguments):
        return cli.main(["grade", *map(str, arguments)])

    monkeypatch.chdir(tmp_path)
    assert run(tmp_path / "nowhere") == 2
    assert run(tmp_path) == 2
    good, bad = tmp_path / "08_good.ipynb", tmp_path / "08_bad.ipynb"
    good.write_text(notebook())
    bad.write_text(notebook(source=UNSOLVED))
    reports = ["--json", "out/r.json", "--csv", "out/r.csv", "--html", "out/html", "--jobs", "2"]
    assert run(good, bad, *reports) == 1
    assert "1 of 2 submissions have all points" in capsys.readouterr().out
    first, second = json.loads((tmp_path / "out" / "r.json").read_text())
    assert first["learner"] == "08_good" and first["points"] == first["possible"] == sum(POINTS.values())
    assert second["points"] == 0
    assert second["tasks"][0].keys() == {
        "id",
        "points",
        "possible",
        "message",
        "parts",
        "suspicious",
        "answer",
        "hints",
    }
    assert (
        (tmp_path / "out" / "r.csv")
        .read_text()
        .startswith("learner,exercise,task,points,possible,message,parts,suspicious,hints\n08_good,8,8.1,2,2,,")
    )
    assert (tmp_path / "out" / "html" / "08_good.html").exists()
    assert run(good, "--json", "/proc/nowhere/r.json") == 2
