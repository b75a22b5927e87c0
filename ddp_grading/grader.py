"""Grade submissions: run each notebook under nbval, try what its checks are given, put the points
together.
"""

import json
import multiprocessing
import re
import secrets
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import nbformat

from ddp_course.checking.attempt import Attempt
from ddp_course.checking.checks import cell_of, find
from ddp_course.checking.diagnosis import Verdict, nothing, verdict
from ddp_course.checking.evidence import BUSY, TRIES, Evidence, gather, known, solved
from ddp_course.errors import GradingError

from .remarks import remarks
from .results import Result, TaskResult, clean, result_of
from .run_cells import RESULTS, run_cells
from .submissions import NUMBERED, Cell, Laid, Pristine, Submission, exercise_of, lay, read_notebook

CELL_SECONDS, END_SECONDS = 20.0, 10.0
MOST_SHOWN = 20_000  # A report shows at most this many characters of an answer.
LOADED = ["ddp_grading.run_cells", "nbval.plugin", "ipykernel.kernelapp", "torch.distributed"]
SLOW = "it was stopped: not finished after {:g} s"
DIED = "the code in it ended its own process, took too much memory, or could not be stopped"


def grade(
    submissions: Sequence[Submission],
    exercises: dict[int, Pristine],
    seed: int | None = None,
    jobs: int = 1,
    timeout: float = 120.0,
    hidden: bool = False,
    progress: Callable[[Submission, Result], None] = lambda submission, result: None,
    task_done: Callable[[TaskResult], None] = lambda task: None,
) -> list[Result]:
    """Grade all submissions, `jobs` at a time; return a Result for each, in their order.

    `progress(submission, result)` is called for each submission, and `task_done(result)` for each
    task, from one of several threads. Ctrl-C ends the grading as soon as the submissions that have
    begun are done.
    """
    judge = Judge(secrets.randbelow(100_000) if seed is None else seed, hidden)

    def graded(submission: Submission) -> Result:
        result = grade_one(submission, exercises, judge, timeout, task_done)
        progress(submission, result)
        return result

    with ThreadPoolExecutor(jobs) as threads:
        try:
            return list(threads.map(graded, submissions))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


class Judge:
    """What the grader compares evidence with: for each task its inputs, the solution's evidence,
    and known answers.
    """

    def __init__(self, seed: int, hidden: bool) -> None:
        self.seed, self.hidden, self.lock = seed, hidden, threading.RLock()
        self.book = cache(self.made)

    def made(self, number: str) -> tuple[dict, Evidence, Callable[[], Sequence[Evidence]]]:
        """A task's inputs, the solution's evidence, and a function that gets the known wrong
        answers' evidence once.
        """
        task = find(number)
        inputs = task.inputs(self.seed, self.hidden)
        tries = (gather([solved(task, inputs)])[0] for _ in range(TRIES))
        right = next(
            (evidence for evidence in tries if evidence.values is not None), Evidence(None, BUSY)
        )
        return inputs, right, cache(lambda: gather(known(task, inputs)))

    def verdict(self, number: str, content: bytes, folder: str) -> Verdict:
        """Try an answer that a notebook has handed over, and say whether it is right."""
        with self.lock:
            inputs, right, others = self.book(number)
        (evidence,) = gather([Attempt(number, inputs, content)], work=folder)
        with self.lock:
            return verdict(find(number), evidence, right, others)


def grade_one(
    submission: Submission,
    exercises: dict[int, Pristine],
    judge: Judge,
    seconds: float,
    task_done: Callable,
) -> Result:
    """Grade one submission, whatever it is; an error of the grader itself is reported as such."""
    name = submission.path.name if submission.path else ""
    numbered = NUMBERED.match(name)
    number = int(numbered[1]) if numbered else None
    result = Result(submission.learner, None, files=[submission.file] if submission.file else [])
    try:
        cells = read_notebook(submission.path)
        number = exercise_of(cells, number, exercises)
        result.tasks = points_of(exercises[number], cells, judge, seconds, task_done)
    except GradingError as error:
        result.message = clean(f'"{name}" {error}' if name else error)
    except Exception as error:  # One odd submission must not spoil the others' results.
        fault = (
            f"could not be graded, by a fault of the grader ({type(error).__name__}: {error});"
            " please report it"
        )
        result.message = clean(fault)
    result.exercise = number if number in exercises else None
    points = exercises[number].points.items() if number in exercises else ()
    nothing_earned = [
        result_of(task, worth, nothing(find(task), result.message)) for task, worth in points
    ]
    result.tasks = result.tasks or nothing_earned or [TaskResult("notebook", 0, 0, result.message)]
    return result


def points_of(
    pristine: Pristine, cells: Sequence[Cell], judge: Judge, seconds: float, task_done: Callable
) -> list[TaskResult]:
    """Run a submission's cells and try its answers, each in fresh processes: what each task
    earned.
    """
    given = next((cell.source for cell in pristine.notebook.cells if cell.id == "imports"), "")
    results: list[TaskResult] = []
    with tempfile.TemporaryDirectory(prefix="ddp_course_grading_") as folder:
        laid, errors = run(pristine.notebook, cells, folder, seconds)
        for number, worth in pristine.points.items():
            answers, trouble = Path(folder, f"{number}.answers"), laid.troubles.get(number)
            if trouble is None and answers.exists():
                judged = judge.verdict(number, answers.read_bytes(), folder)
            else:
                judged = nothing(
                    find(number), trouble or errors.get(number) or "its check did not run"
                )
            result, source = result_of(number, worth, judged), laid.sources.get(number, "")
            if trouble is None:
                result.answer, result.suspicious = (
                    clean(source, MOST_SHOWN),
                    remarks(clean(source), given),
                )
                name_what_comes_first(result, results, source)
            results.append(result)
            task_done(result)
    return results


def name_what_comes_first(result: TaskResult, before: Sequence[TaskResult], source: str) -> None:
    """If a wrong answer uses an earlier answer that is wrong too, add that task to its message."""
    words = set(re.findall(r"\w+", source))
    wrong = (
        other.id
        for other in before
        if other.points < other.possible and words & set(find(other.id).names)
    )
    first = next(wrong, "")
    if result.message and first and f"mend {first} first" not in result.message:
        result.message = clean(
            f"{result.message} (it uses {first}, which is not right yet: mend {first} first)"
        )


def run(
    pristine: Any, cells: Sequence[Cell], folder: str, seconds: float
) -> tuple[Laid, dict[str, str]]:
    """Run the laid notebook, again without a cell that ended it or hung; return it and {task: why
    it has no answer}.
    """
    without: dict[str, str] = {}
    while True:
        laid = lay(pristine, cells, list(without))
        if laid.sources.keys() <= laid.troubles.keys():
            return laid, {}  # Nothing was answered, so nothing runs.
        messages, slow = run_once(laid.notebook, folder, seconds)
        names = [cell.id for cell in laid.notebook.cells]
        if len(messages) == len(names) or len(without) > len(cells):
            break
        without[names[len(messages)]] = SLOW.format(seconds) if slow else DIED
    by_cell = dict(zip(names, messages, strict=False)) | without
    return laid, {task: error for task in laid.sources if (error := error_of(task, by_cell))}


def error_of(task: str, messages: dict[str, str]) -> str:
    """The error of a task's last answer cell, or of its check; `messages` are {id of a laid cell:
    its error}.
    """
    of_task = [
        message
        for name, message in messages.items()
        if name.startswith(f"{cell_of(task)}-") and message
    ]
    check = messages.get(cell_of(task).replace("answer", "check"))
    return (
        f"the answer cell fails: {of_task[-1]}"
        if of_task
        else f"its check fails: {check}"
        if check
        else ""
    )


def run_once(notebook: Any, folder: str, seconds: float) -> tuple[list[str], bool]:
    """Run a notebook under nbval: the error, or "", of each cell that ended, and whether the run
    was stopped.
    """
    path, results = Path(folder, "notebook.ipynb"), Path(folder, RESULTS)
    nbformat.write(notebook, path)
    results.write_text("")
    child = processes().Process(target=run_cells, args=(path, min(CELL_SECONDS, 0.6 * seconds)))
    child.start()
    child.join(seconds)
    if slow := child.is_alive():
        child.terminate()  # The child then ends all that it has started.
        child.join(END_SECONDS)
    child.kill()
    child.join()
    if child.exitcode == 1:  # The child ended by an error of its own.
        raise RuntimeError("the notebook could not be run")
    return list(map(json.loads, results.read_text().splitlines())), slow


@cache
def processes() -> Any:
    """How processes are started: forked from one that has loaded nbval and torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context
