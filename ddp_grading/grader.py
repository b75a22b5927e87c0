"""Grade submissions: run each notebook's cells, try what its checks are given, put the points
together.
"""

import multiprocessing
import re
import secrets
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

from ddp_course.checking.any_order import confirmed
from ddp_course.checking.attempt import Attempt
from ddp_course.checking.checks import cell_of, find
from ddp_course.checking.diagnosis import Verdict, nothing, verdict
from ddp_course.checking.evidence import (
    Evidence,
    gather,
    known,
    solved,
)
from ddp_course.errors import GradingError

from .guard import enter
from .remarks import remarks
from .results import Result, TaskResult, clean, result_of
from .run_cells import run_cells
from .submissions import Laid, Pristine, Submission, exercise_of, lay

END_SECONDS = 10.0
MOST_SHOWN = 20_000  # A report shows at most this many characters of an answer.
LOADED = ["ddp_grading.run_cells", "ipykernel.inprocess.ipkernel", "torch.distributed"]


def grade(
    submissions: Sequence[Submission],
    exercises: dict[int, Pristine],
    seed: int | None = None,
    jobs: int = 1,
    timeout: float = 120.0,
    progress: Callable[[Submission, Result], None] = lambda submission, result: None,
    task_done: Callable[[TaskResult], None] = lambda task: None,
) -> list[Result]:
    """Grade all submissions, `jobs` at a time; return a Result for each, in their order.

    `progress(submission, result)` is called for each submission, and `task_done(result)` for each
    task, from one of several threads. Ctrl-C ends the grading as soon as the submissions that have
    begun are done.
    """
    judge = Judge(secrets.randbelow(100_000) if seed is None else seed)

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

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.lock = threading.RLock()
        self.book = cache(self.made)

    def made(self, number: str) -> tuple[dict, Evidence, Callable[[], Sequence[Evidence]]]:
        """A task's inputs, the solution's evidence, and a function that gets the known wrong
        answers' evidence once.
        """
        task = find(number)
        inputs = task.inputs(self.seed)
        (right,) = gather([solved(task, inputs)])
        return inputs, right, cache(lambda: gather(known(task, inputs)))

    def verdict(self, number: str, content: bytes, folder: str) -> Verdict:
        """Try an answer that a notebook has handed over, and say whether it is right."""
        with self.lock:
            inputs, right, others = self.book(number)
        attempt = Attempt(number, inputs, content)
        (evidence,) = gather([attempt], partial(enter, folder))
        with self.lock:
            judged = verdict(find(number), evidence, right, others)
        return confirmed(judged, attempt, partial(enter, folder))


def grade_one(
    submission: Submission,
    exercises: dict[int, Pristine],
    judge: Judge,
    seconds: float,
    task_done: Callable,
) -> Result:
    """Grade one submission, whatever it is; an error of the grader itself is reported as such."""
    files = {submission.file: submission.digest} if submission.file else {}
    result = Result(submission.learner, None, files=files, seed=judge.seed, about=submission.about)
    result.note = "handed in late" if submission.late else ""
    points: dict[str, float] = {}
    try:
        result.exercise = exercise_of(submission, exercises)
        points = exercises[result.exercise].points
        if submission.fault:
            raise GradingError(submission.fault)
        pristine = exercises[result.exercise]
        result.tasks = points_of(pristine, submission, judge, seconds, task_done)
    except GradingError as error:
        result.message = clean(f'"{submission.name}" {error}' if submission.name else error)
    except Exception as error:  # One odd submission must not spoil the others' results.
        result.graded = False
        result.message = clean(
            f"not graded, by a fault of the grader ({type(error).__name__}: {error}); please"
            " report it"
        )
    if not result.tasks:
        for task, worth in points.items():
            result.tasks.append(result_of(task, worth, nothing(find(task), result.message)))
    result.tasks = result.tasks or [TaskResult("notebook", 0, 0, result.message)]
    return result


def points_of(
    pristine: Pristine, submission: Submission, judge: Judge, seconds: float, task_done: Callable
) -> list[TaskResult]:
    """Run a submission's cells and try its answers, each in fresh processes: what each task
    earned.
    """
    given = pristine.given.get("imports", "")
    results: list[TaskResult] = []
    laid = lay(pristine, submission.cells)
    with tempfile.TemporaryDirectory(prefix="ddp_course_grading_") as folder:
        errors = run(laid, folder, seconds)
        for number, worth in pristine.points.items():
            answers = Path(folder, "answers", f"{number}.answers")
            trouble = laid.troubles.get(number)
            if trouble is None and answers.exists():
                judged = judge.verdict(number, answers.read_bytes(), f"{folder}/work")
            else:
                error = trouble or error_of(number, errors) or "its check did not run"
                judged = nothing(find(number), error)
            result = result_of(number, worth, judged)
            source = laid.sources.get(number, "")
            if trouble is None:
                result.answer = clean(source, MOST_SHOWN)
                result.suspicious = remarks(clean(source), given)
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


def run(laid: Laid, folder: str, seconds: float) -> dict[str, str]:
    """Run a submission's cells in a process of their own; return {id: its error, or ""}."""
    if laid.sources.keys() <= laid.troubles.keys():
        return {}  # Nothing was answered, so nothing runs.
    for name in ("work", "answers", "ipython"):
        Path(folder, name).mkdir()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = processes().Process(target=run_cells, args=(laid.cells, folder, seconds, sender))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise RuntimeError("the notebook could not be run") from None
    finally:
        child.terminate()  # The child then ends all that it has started.
        child.join(END_SECONDS)
        child.kill()
        child.join()


def error_of(task: str, errors: dict[str, str]) -> str:
    """The error of a task's last answer cell, or of its check; `errors` are {id of a cell: its
    error}.
    """
    for name, error in reversed(errors.items()):
        if error and name.startswith(f"{cell_of(task)}-"):
            return f"the answer cell fails: {error}"
    check = errors.get(cell_of(task).replace("answer", "check"))
    return f"its check fails: {check}" if check else ""


@cache
def processes() -> Any:
    """How processes are started: forked from one that has loaded torch and the kernel."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    return context
