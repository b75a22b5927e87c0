"""Grade submissions: run each notebook under nbval, try what its checks are given, put the points together."""

import json
import multiprocessing
import os
import re
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import nbformat
import psutil

from ..errors import GradingError
from .attempt import Packed
from .checking import book_of, solved
from .checks import Task, cell_of, find
from .diagnosis import Book, Verdict, nothing, verdict
from .evidence import Attempt, gather
from .guard import FOLDER
from .hints import asked_for
from .laying import Cell, Laid, lay
from .remarks import remarks
from .results import Result, TaskResult, cut, result_of
from .run_cells import DIED, RESULTS, run_cells
from .submissions import NUMBERED, Pristine, Submission, exercise_of, read_notebook

CELL_SECONDS = 20.0
MOST_SHOWN = 20_000  # characters of an answer in a report
SLOW = "it was stopped: not finished after {:g} s"


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def exercises_folder() -> Path:
    """Where the pristine exercises are: a part of the package, which nobody solves in place."""
    return Path(__file__).with_name("pristine")


def grade(
    submissions: Sequence[Submission],
    exercises: dict[int, Pristine],
    seed: int | None = None,
    jobs: int = 1,
    timeout: float = 120.0,
    hidden: bool = False,
    progress: Callable[[Submission, Result], None] = lambda submission, result: None,
    each: Callable[[TaskResult], None] = lambda task: None,
) -> list[Result]:
    """Grade all submissions, `jobs` at a time; return a Result for each, in their order.

    `progress(submission, result)` is called for each submission, and `each(result)` for each task as it is done, from
    one of several threads. Ctrl-C ends it as soon as those submissions are done that have begun.
    """
    judge = Judge(secrets.randbelow(100_000) if seed is None else seed, hidden)

    def graded(submission: Submission) -> Result:
        result = grade_one(submission, exercises, judge, timeout, each)
        progress(submission, result)
        return result

    with ThreadPoolExecutor(jobs) as threads:
        try:
            return list(threads.map(graded, submissions))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
        finally:
            threads.shutdown()
            end_helpers()


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


def grade_one(
    submission: Submission, exercises: dict[int, Pristine], judge: Judge, seconds: float, each: Callable
) -> Result:
    """Grade one submission, whatever it is; a fault of the grader's own is said to be one."""
    files, exercise = [submission.file] if submission.file else [], None
    try:
        if submission.path is None or submission.trouble:
            raise GradingError(submission.trouble)
        cells = read_notebook(submission.path)
        exercise = exercises[exercise_of(submission.path, cells, exercises)]
        return Result(
            submission.learner, exercise.exercise, points_of(exercise, cells, judge, seconds, each), files=files
        )
    except GradingError as error:
        said = f'"{submission.path.name}" {error}' if submission.path else str(error)
    except Exception as error:  # whatever is odd about this one, the others' results do not suffer
        said = f"could not be graded, by a fault of the grader ({type(error).__name__}: {error}); please report it"
    numbered = NUMBERED.match(submission.path.name) if submission.path else None
    exercise = exercise or (exercises.get(int(numbered[1])) if numbered else None)
    points = exercise.points if exercise else {}
    tasks = [result_of(task, worth, nothing(find(task), said)) for task, worth in points.items()]
    return Result(submission.learner, exercise.exercise if exercise else None, tasks, cut(said), files=files)


def points_of(
    pristine: Pristine, cells: Sequence[Cell], judge: Judge, seconds: float, each: Callable
) -> list[TaskResult]:
    """Run a submission's cells and try its answers, each in fresh processes: what each task earned."""
    asked, given = asked_for(cell.source for cell in cells), given_imports(pristine)
    tasks: list[TaskResult] = []
    with tempfile.TemporaryDirectory(prefix="ddp_course_grading_") as folder:
        laid, said = run(pristine.notebook, cells, folder, seconds)
        for number, worth in pristine.points.items():
            handed, trouble = Path(folder, f"{number}.answers"), laid.troubles.get(number)
            if trouble is None and handed.exists():
                told = judge.verdict(number, handed.read_bytes(), folder)
            else:
                told = nothing(find(number), trouble or said.get(number) or "its check did not run")
            one, answer = result_of(number, worth, told), laid.sources.get(number, "")
            if trouble is None:
                one.answer, one.suspicious = answer[:MOST_SHOWN], remarks(answer, given)
                name_what_comes_first(one, tasks, answer)
            one.hints = asked.get(number, 0)
            tasks.append(one)
            each(one)
    return tasks


def given_imports(pristine: Pristine) -> str:
    """The source of the pristine notebook's import cell."""
    return next((cell.source for cell in pristine.notebook.cells if cell.id == "imports"), "")


def name_what_comes_first(one: TaskResult, before: Sequence[TaskResult], answer: str) -> None:
    """Add to the message of an answer that uses an earlier one which is not right, which one that is."""
    words = set(re.findall(r"\w+", answer))
    wrong = (other.id for other in before if other.points < other.possible and words & set(find(other.id).names))
    first = next(wrong, "")
    if one.message and first and f"mend {first} first" not in one.message:
        one.message = cut(f"{one.message} (it uses {first}, which is not right yet: mend {first} first)")


def run(pristine: Any, cells: Sequence[Cell], folder: str, seconds: float) -> tuple[Laid, dict[str, str]]:
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
    said = {name: lines.get(place, "") for place, name in enumerate(names)} | without
    return laid, {task: trouble for task in laid.sources if (trouble := what_failed(task, said))}


def what_failed(task: str, said: dict[str, str]) -> str:
    """What the last answer cell of a task raised, or its check; {id of a laid cell: its error} was `said`."""
    of_task = [message for name, message in said.items() if name.startswith(f"{cell_of(task)}-") and message]
    check = said.get(cell_of(task).replace("answer", "check"))
    return f"the answer cell fails: {of_task[-1]}" if of_task else f"its check fails: {check}" if check else ""


def run_once(notebook: Any, folder: str, seconds: float) -> tuple[dict[int, str], bool]:
    """Run a notebook under nbval: {place of a cell: its error, or ""}, and whether it was stopped."""
    path, results = Path(folder, "notebook.ipynb"), Path(folder, RESULTS)
    path.write_text(nbformat.writes(notebook), encoding="utf-8")
    results.unlink(missing_ok=True)
    environment = dict.fromkeys(("HOME", "TMPDIR", "IPYTHONDIR", "MPLCONFIGDIR", "JUPYTER_RUNTIME_DIR", FOLDER), folder)
    modules = os.pathsep.join(entry for entry in sys.path if entry and Path(entry).is_absolute())
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",
        "PYTHONPATH": modules,
    }
    child = processes().Process(
        target=run_cells, args=(path, min(CELL_SECONDS, 0.6 * seconds), environment), daemon=True
    )
    child.start()
    child.join(seconds)
    slow = child.is_alive()
    child.kill()
    end_all(folder)
    child.join()
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return {line["cell"]: line["message"] for line in lines}, slow


@cache
def processes() -> Any:
    """How processes are started: forked from one that has loaded nbval, where that can be done."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ddp_course.grading.run_cells", "nbval.plugin"])
    return context


def end_helpers() -> None:
    """End the process that others are forked from, and Python's own that watches it; the next run starts new ones.

    Python ends both with this process, and has no public way to do so before.
    """
    for helper in (forkserver._forkserver, resource_tracker._resource_tracker):
        with suppress(AttributeError):
            helper._stop()


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
