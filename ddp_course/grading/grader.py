"""Grade submissions: run each notebook under nbval, try what its checks are given, put the points together."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import psutil

from .attempt import Packed
from .checking import book_of, solved
from .checks import Task, cell_of, find, of_exercise
from .diagnosis import Book, Verdict, nothing, verdict
from .evidence import Attempt, gather
from .guard import FOLDER
from .hints import asked_for
from .laying import Laid, lay
from .results import Result, TaskResult, cut, result_of
from .run_cells import DIED, RESULTS

CELL_SECONDS = 20.0
MOST_SHOWN = 20_000  # characters of an answer in a report
SLOW = "it was stopped: not finished after {:g} s"


class Judge:
    """What the grader holds evidence against: for each task its inputs, the solution's evidence, and known answers."""

    def __init__(self, seed: int, hidden: bool) -> None:
        self.seed, self.hidden, self.lock = seed, hidden, threading.RLock()
        self.book = cache(self.made)

    def inputs(self, task: Task) -> dict[str, Any]:
        """The same for all submissions."""
        return task.inputs(self.seed, self.hidden)

    def made(self, number: str) -> Book:
        """What is known about a task's inputs, made once."""
        task = find(number)
        (right,) = gather([solved(task, self.inputs(task))])
        return book_of(task, self.inputs(task), right)

    def verdict(self, number: str, content: bytes, folder: str) -> Verdict:
        """Try an answer that a notebook has handed over, and say whether it is right."""
        task = find(number)
        with self.lock:
            book = self.book(number)
        (evidence,) = gather([Attempt(number, self.inputs(task), Packed(content))], work=folder)
        with self.lock:
            return verdict(task, evidence, book, self.inputs(task))


def examine(pristine: Any, cells: Sequence, judge: Judge, seconds: float) -> tuple[Laid, dict[str, Verdict]]:
    """Run a submission's cells and try its answers: the laid notebook, and {task: verdict}."""
    with tempfile.TemporaryDirectory(prefix="ddp_course_grading_") as folder:
        laid, said = run(pristine, cells, folder, seconds)
        verdicts = {}
        for task in of_exercise(pristine.metadata.ddp_course.exercise):
            handed, trouble = Path(folder, f"{task.number}.answers"), laid.troubles.get(task.number)
            if trouble is None and handed.exists():
                verdicts[task.number] = judge.verdict(task.number, handed.read_bytes(), folder)
            else:
                verdicts[task.number] = nothing(task, trouble or said.get(task.number) or "its check did not run")
    return laid, verdicts


def run(pristine: Any, cells: Sequence, folder: str, seconds: float) -> tuple[Laid, dict[str, str]]:
    """Run the laid notebook, again without a cell that ended it or did not end; {task: why it handed nothing over}."""
    without: dict[str, str] = {}
    while True:
        laid = lay(pristine, cells, list(without))
        lines, slow = run_once(laid.notebook, folder, seconds)
        names = [cell.id for cell in laid.notebook.cells]
        ended = next((place for place, line in lines.items() if DIED in line or line.startswith("Timeout of")), None)
        if ended is None and slow:
            ended = len(lines)
        if ended is None or ended >= len(names) or len(without) > len(cells):
            break
        without[names[ended]] = lines.get(ended) or SLOW.format(seconds)
    return laid, troubles(laid, {**dict(zip(names, map(lines.get, range(len(names))), strict=True)), **without})


def result(
    learner: str, pristine: Any, points: dict[str, float], cells: Sequence, judge: Judge, seconds: float
) -> Result:
    """A submission's cells, graded: for each task of `points` what it earned, and what was wrong."""
    laid, verdicts = examine(pristine, cells, judge, seconds)
    asked, tasks = asked_for(cell.source for cell in cells), []
    for task, possible in points.items():
        one = result_of(task, possible, verdicts[task])
        one.answer, one.hints = laid.sources.get(task, "")[:MOST_SHOWN], asked.get(task, 0)
        tasks.append(one)
    name_what_comes_first(tasks, laid)
    return Result(learner, pristine.metadata.ddp_course.exercise, tasks)


def name_what_comes_first(tasks: Sequence[TaskResult], laid: Laid) -> None:
    """Add to the messages of answers that use another one that is not right, which one that is."""
    for one in tasks:
        words = set(re.findall(r"\w+", laid.sources.get(one.id, "")))
        others = (other for other in tasks if other is not one and other.points < other.possible)
        first = next((other.id for other in others if words & set(find(other.id).names)), "")
        if one.message and first and f"mend {first} first" not in one.message and one.id not in laid.troubles:
            one.message = cut(f"{one.message} (it uses {first}, which is not right yet: mend {first} first)")


def troubles(laid: Laid, said: dict[str, str | None]) -> dict[str, str]:
    """{task: what its answer cell, or its check, raised}."""
    found = {}
    for task in laid.sources:
        of_task = [message for name, message in said.items() if name.startswith(f"{cell_of(task)}-") and message]
        check = said.get(f"check-{task.replace('.', '-')}")
        if of_task or check:
            found[task] = f"the answer cell fails: {of_task[-1]}" if of_task else f"its check fails: {check}"
    return found


def run_once(notebook: Any, folder: str, seconds: float) -> tuple[dict[int, str], bool]:
    """Run a notebook under nbval: {place of a cell: its error, or ""}, and whether it was stopped."""
    path, results = Path(folder, "notebook.ipynb"), Path(folder, RESULTS)
    path.write_text(nbformat.writes(notebook), encoding="utf-8")
    results.unlink(missing_ok=True)
    homes = {name: folder for name in ("HOME", "TMPDIR", "IPYTHONDIR", "MPLCONFIGDIR", "JUPYTER_RUNTIME_DIR", FOLDER)}
    settings = {
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",
        "PYTHONPATH": path_of_python(),
    }
    command = [sys.executable, "-m", "ddp_course.grading.run_cells", str(path), f"{min(CELL_SECONDS, 0.6 * seconds)}"]
    child = subprocess.Popen(
        command, cwd=folder, env={**os.environ, **homes, **settings}, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        child.wait(seconds)
        slow = False
    except subprocess.TimeoutExpired:
        slow = True
    finally:
        child.kill()
        end_all(folder)
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return {line["cell"]: line["message"] for line in lines}, slow


def path_of_python() -> str:
    """Where this process finds its modules; not in folders that a submission may write to."""
    return os.pathsep.join(entry for entry in sys.path if entry and Path(entry).is_absolute())


def end_all(folder: str) -> None:
    """Kill all processes that were started for a folder, whatever group or session they went to."""
    while ours := [one for one in psutil.process_iter() if started_for(one, folder)]:
        for one in ours:
            with suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(ours, timeout=1)


def started_for(process: psutil.Process, folder: str) -> bool:
    """Whether a living process has the folder in its environment."""
    with suppress(psutil.Error, OSError):
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(FOLDER) == folder
    return False
