"""Grade submissions: run each notebook under nbval, try what its checks are given, put the points together."""

import json
import multiprocessing
import os
import re
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import nbformat

from ..errors import GradingError, LaunchError
from .attempt import Attempt
from .checking import known, solved
from .checks import cell_of, find
from .diagnosis import Verdict, nothing, verdict
from .evidence import BUSY, TRIES, Evidence, gather, launch
from .guard import HIDDEN
from .hints import asked_for
from .remarks import remarks
from .results import Result, TaskResult, cut, result_of
from .run_cells import DIED, RESULTS, run_cells
from .submissions import NUMBERED, Cell, Laid, Pristine, Submission, exercise_of, lay, read_notebook

CELL_SECONDS, END_SECONDS = 20.0, 10.0
MOST_SHOWN = 20_000  # characters of an answer in a report
SLOW = "it was stopped: not finished after {:g} s"
NETWORK = "DDP_COURSE_NETWORK"


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
    task_done: Callable[[TaskResult], None] = lambda task: None,
) -> list[Result]:
    """Grade all submissions, `jobs` at a time; return a Result for each, in their order.

    `progress(submission, result)` is called for each submission, and `task_done(result)` for each task, from one of
    several threads. Ctrl-C ends it as soon as those submissions are done that have begun.
    """
    judge = Judge(secrets.randbelow(100_000) if seed is None else seed, hidden)

    def graded(submission: Submission) -> Result:
        result = grade_one(submission, exercises, judge, timeout, task_done)
        progress(submission, result)
        return result

    with private_network(), ThreadPoolExecutor(jobs) as threads:
        try:
            return list(threads.map(graded, submissions))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


@contextmanager
def private_network() -> Iterator[None]:
    """While the block runs, launches have a network with a loopback alone, where the system allows it."""
    before, os.environ[NETWORK] = os.environ.get(NETWORK), "private"
    try:
        try:
            launch(int, world_size=1, device="cpu")
        except LaunchError:
            del os.environ[NETWORK]
        yield
    finally:
        os.environ.pop(NETWORK, None)
        os.environ |= {NETWORK: before} if before else {}


class Judge:
    """What the grader holds evidence against: for each task its inputs, the solution's evidence, and known answers."""

    def __init__(self, seed: int, hidden: bool) -> None:
        self.seed, self.hidden, self.lock = seed, hidden, threading.RLock()
        self.book = cache(self.made)

    def made(self, number: str) -> tuple[dict, Evidence, Callable[[], Sequence[Evidence]]]:
        """A task's inputs, the solution's evidence, and how to get that of the known wrong answers, made once."""
        task = find(number)
        inputs = task.inputs(self.seed, self.hidden)
        tries = (gather([solved(task, inputs)])[0] for _ in range(TRIES))
        right = next((evidence for evidence in tries if evidence.values is not None), Evidence(None, BUSY))
        return inputs, right, cache(lambda: gather(known(task, inputs)))

    def verdict(self, number: str, content: bytes, folder: str) -> Verdict:
        """Try an answer that a notebook has handed over, and say whether it is right."""
        with self.lock:
            inputs, right, others = self.book(number)
        (evidence,) = gather([Attempt(number, inputs, content)], work=folder)
        with self.lock:
            return verdict(find(number), evidence, right, others)


def grade_one(
    submission: Submission, exercises: dict[int, Pristine], judge: Judge, seconds: float, task_done: Callable
) -> Result:
    """Grade one submission, whatever it is; a fault of the grader's own is said to be one."""
    files, exercise = [submission.file] if submission.file else [], None
    try:
        if submission.path is None or submission.trouble:
            raise GradingError(submission.trouble)
        cells = read_notebook(submission.path)
        exercise = exercises[exercise_of(submission.path, cells, exercises)]
        tasks = points_of(exercise, cells, judge, seconds, task_done)
        return Result(submission.learner, exercise.exercise, tasks, files=files)
    except GradingError as error:
        message = f'"{submission.path.name}" {error}' if submission.path else str(error)
    except Exception as error:  # whatever is odd about this one, the others' results do not suffer
        message = f"could not be graded, by a fault of the grader ({type(error).__name__}: {error}); please report it"
    numbered = NUMBERED.match(submission.path.name) if submission.path else None
    exercise = exercise or (exercises.get(int(numbered[1])) if numbered else None)
    points = exercise.points if exercise else {}
    tasks = [result_of(task, worth, nothing(find(task), message)) for task, worth in points.items()]
    return Result(submission.learner, exercise.exercise if exercise else None, tasks, cut(message), files=files)


def points_of(
    pristine: Pristine, cells: Sequence[Cell], judge: Judge, seconds: float, task_done: Callable
) -> list[TaskResult]:
    """Run a submission's cells and try its answers, each in fresh processes: what each task earned."""
    asked = asked_for(cell.source for cell in cells)
    given = next((cell.source for cell in pristine.notebook.cells if cell.id == "imports"), "")
    results: list[TaskResult] = []
    with tempfile.TemporaryDirectory(prefix="ddp_course_grading_") as folder:
        laid, errors = run(pristine.notebook, cells, folder, seconds)
        for number, worth in pristine.points.items():
            answers, trouble = Path(folder, f"{number}.answers"), laid.troubles.get(number)
            if trouble is None and answers.exists():
                judged = judge.verdict(number, answers.read_bytes(), folder)
            else:
                judged = nothing(find(number), trouble or errors.get(number) or "its check did not run")
            result, source = result_of(number, worth, judged), laid.sources.get(number, "")
            if trouble is None:
                result.answer, result.suspicious = source[:MOST_SHOWN], remarks(source, given)
                name_what_comes_first(result, results, source)
            result.hints = asked.get(number, 0)
            results.append(result)
            task_done(result)
    return results


def name_what_comes_first(result: TaskResult, before: Sequence[TaskResult], source: str) -> None:
    """Add to the message of an answer that uses an earlier one which is not right, which one that is."""
    words = set(re.findall(r"\w+", source))
    wrong = (other.id for other in before if other.points < other.possible and words & set(find(other.id).names))
    first = next(wrong, "")
    if result.message and first and f"mend {first} first" not in result.message:
        result.message = cut(f"{result.message} (it uses {first}, which is not right yet: mend {first} first)")


def run(pristine: Any, cells: Sequence[Cell], folder: str, seconds: float) -> tuple[Laid, dict[str, str]]:
    """Run the laid notebook, again without a cell that ended it or did not end; {task: why it handed nothing over}."""
    without: dict[str, str] = {}
    while True:
        laid = lay(pristine, cells, list(without))
        if laid.sources.keys() <= laid.troubles.keys():
            return laid, {}  # nothing was answered, so nothing runs
        messages, slow = run_once(laid.notebook, folder, seconds)
        names = [cell.id for cell in laid.notebook.cells]
        ends = (place for place, text in messages.items() if DIED in text or text.startswith("Timeout of"))
        last = next(ends, len(messages) if slow else len(names))
        if last >= len(names) or len(without) > len(cells):
            break
        without[names[last]] = messages.get(last) or SLOW.format(seconds)
    by_cell = {name: messages.get(place, "") for place, name in enumerate(names)} | without
    return laid, {task: error for task in laid.sources if (error := error_of(task, by_cell))}


def error_of(task: str, messages: dict[str, str]) -> str:
    """What the last answer cell of a task raised, or its check, by the messages {id of a laid cell: its error}."""
    of_task = [message for name, message in messages.items() if name.startswith(f"{cell_of(task)}-") and message]
    check = messages.get(cell_of(task).replace("answer", "check"))
    return f"the answer cell fails: {of_task[-1]}" if of_task else f"its check fails: {check}" if check else ""


def run_once(notebook: Any, folder: str, seconds: float) -> tuple[dict[int, str], bool]:
    """Run a notebook under nbval: {place of a cell: its error, or ""}, and whether it was stopped."""
    path, results = Path(folder, "notebook.ipynb"), Path(folder, RESULTS)
    path.write_text(nbformat.writes(notebook), encoding="utf-8")
    results.unlink(missing_ok=True)
    arguments = (path, min(CELL_SECONDS, 0.6 * seconds), os.environ.get(HIDDEN, "[]"))
    child = processes().Process(target=run_cells, args=arguments)
    child.start()
    child.join(seconds)
    if slow := child.is_alive():
        child.terminate()  # it ends all that it has started
        child.join(END_SECONDS)
    child.kill()
    child.join()
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return {line["cell"]: line["message"] for line in lines}, slow


@cache
def processes() -> Any:
    """How processes are started: forked from one that has loaded nbval and torch, where that can be done."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["ddp_course.grading.run_cells", "nbval.plugin", "ipykernel.kernelapp", "torch.distributed"]
    )
    return context
