"""Grades submissions: runs each notebook's cells, tries its answers, and adds up the points."""

import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue

from ddp_exercises.any_order import confirm
from ddp_exercises.attempt import Attempt, Evidence, make_attempts
from ddp_exercises.diagnosis import Verdict, nothing, verdict
from ddp_exercises.errors import GradingError
from ddp_exercises.evidence import ONE_HOST, SLOWER, gather, known_attempts, solution_attempt
from ddp_exercises.tasks import find
from manyranks.launching.launch import launch
from manyranks.orders import every

from .answers import Answer, Exercises, Pristine, assemble, check_of, find_answers, trouble
from .guard import enter
from .remarks import published, remarks
from .results import Result, TaskResult, clean, first_line, result_of
from .run_cells import run_cells
from .submissions import Submission, copy_neighbours, exercise_of
from .watched import make_watched

LONGEST = 10.0  # On a busy machine the clock may show so many times a submission's time.
NOT_RUN = "its check did not run"
MOST_SHOWN = 20_000  # A report shows at most so many characters of an answer.


def grade(
    submissions: Sequence[Submission],
    exercises: Exercises,
    seed: int,
    jobs: int = 1,
    timeout: float = 120.0,
) -> Iterator[Result]:
    """Grade all submissions, `jobs` at a time; yield the Result of each as soon as it is known.

    Ctrl-C ends the grading as soon as the submissions that have begun are done, and yielded.
    """
    judge = Judge(seed)
    ended: SimpleQueue[Future] = SimpleQueue()
    with ThreadPoolExecutor(jobs) as threads:
        try:
            for submission in submissions:
                graded = threads.submit(grade_one, submission, exercises, judge, timeout)
                graded.add_done_callback(ended.put)
            for _ in submissions:
                yield ended.get().result()
        except KeyboardInterrupt:
            threads.shutdown(cancel_futures=True)
            while not ended.empty():
                graded = ended.get()
                if not graded.cancelled() and not graded.exception():
                    yield graded.result()
            raise
        finally:
            threads.shutdown(cancel_futures=True)


class Judge:
    """Compares evidence with that of solutions and known answers, on inputs drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.lock = threading.RLock()
        self.right = cache(lambda task: gather([solution_attempt(task, task.inputs(seed))])[0])
        self.known = cache(lambda task: gather(known_attempts(task, task.inputs(seed))))

    def verdicts(
        self, answers: dict[str, bytes], folder: str, seconds: float
    ) -> Iterator[tuple[str, Verdict]]:
        """Try the answers that a notebook has handed over; yield (task, verdict) as it is known.

        All launches together take what is left of the submission's `seconds`, or a multiple of the
        time that the solutions took here, if that is longer.

        Answers that run on equally many ranks, and in one way, share a launch, which takes at most
        half of the time that is left. If ranks send, this launch decides for every order of their
        messages. An answer that fails in company, or is not reached there, is tried again alone, in
        an equal part of the rest, as an answer before it may have spoilt it.
        """
        limits = partial(enter, folder)
        companies: dict[tuple, list[Attempt]] = {}
        solutions_took = 0.0
        for number, content in answers.items():
            task = find(number)
            with self.lock:
                solutions_took += self.right(task).seconds
            attempt = Attempt(task, task.inputs(self.seed), content)
            companies.setdefault((task.ranks, bool(task.every_order)), []).append(attempt)
        left = max(seconds, SLOWER * solutions_took)
        failed: list[tuple[Attempt, Verdict]] = []
        for (_, in_every_order), company in companies.items():
            on_rank = make_watched if in_every_order else make_attempts
            link = every.SLOW if in_every_order else ONE_HOST
            began = time.monotonic()
            evidences = gather(company, limits, on_rank, link, left / 2)
            left -= time.monotonic() - began
            for attempt, evidence in zip_longest(company, evidences):
                if evidence:
                    last_tried = attempt.task.number
                    said = self.compared(attempt, evidence)
                else:
                    said = nothing(attempt.task, f"not tried: {last_tried} took all of the time")
                if said.message:
                    failed.append((attempt, said))
                else:
                    yield attempt.task.number, said
        for place, (attempt, said) in enumerate(failed):
            began = time.monotonic()
            said = self.try_alone(attempt, said, limits, left / (len(failed) - place))
            left -= time.monotonic() - began
            yield attempt.task.number, said

    def try_alone(
        self, attempt: Attempt, said: Verdict, limits: Callable, seconds: float
    ) -> Verdict:
        """Return the verdict on an attempt alone in a launch, and in every order of its messages.

        If there is no time for the launch, return `said`, the verdict before.
        """
        # Each of the two launches has one half of the time.
        if attempt.task.every_order:
            seconds /= 2
        evidences = gather([attempt], limits, seconds=seconds)
        if not evidences:
            return said
        return confirm(self.compared(attempt, evidences[0]), attempt, limits, seconds)

    def compared(self, attempt: Attempt, evidence: Evidence) -> Verdict:
        """Return the verdict on an attempt with this evidence."""
        task = attempt.task
        with self.lock:
            return verdict(task, evidence, self.right(task), partial(self.known, task))


def grade_one(
    submission: Submission,
    exercises: Exercises,
    judge: Judge,
    seconds: float,
    progress: Callable = lambda result: None,
) -> Result:
    """Grade one submission, whatever it is; an error of the grader itself is reported as such.

    `progress(result)` is called for each task as soon as it is judged. This raises no errors.
    """
    files = {submission.file: submission.digest} if submission.file else {}
    result = Result(submission.learner, None, files=files, seed=judge.seed, about=submission.about)
    late = "handed in late" if submission.late else ""
    result.note = "; ".join(filter(None, [late, submission.note]))
    try:
        result.exercise = exercise_of(submission, exercises)
        pristine = exercises[result.exercise]
        if submission.fault:
            raise GradingError(submission.fault)
        result.tasks = points_of(pristine, submission, judge, seconds, progress)
    except GradingError as error:
        result.message = clean(f'"{submission.name}" {error}' if submission.name else error)
    except Exception as error:
        # One odd submission must not spoil the others' results.
        result.graded = False
        result.message = clean(
            f"not graded, by a fault of the grader ({type(error).__name__}:"
            f" {first_line(str(error))}); please report it"
        )
    if result.exercise and not result.tasks:
        for number, worth in exercises[result.exercise].points.items():
            task = find(number)
            result.tasks.append(result_of(task, worth, nothing(task, result.message)))
    return result


def points_of(
    pristine: Pristine, submission: Submission, judge: Judge, seconds: float, progress: Callable
) -> list[TaskResult]:
    """Return what each task earned, once a submission's cells have run and its answers were tried.

    Each answer is tried in fresh processes.
    """
    results: list[TaskResult] = []
    cells = submission.cells
    found = find_answers(pristine, cells)
    with tempfile.TemporaryDirectory(prefix="ddp_course_grading_") as folder:
        for name in ("work", "answers", "ipython"):
            Path(folder, name).mkdir()
        copy_neighbours(submission.place, Path(folder, "work"))
        errors: dict[str, str] = {}
        left = seconds
        if found:
            errors, left = run(assemble(pristine, cells, found), folder, seconds)
        answers = handed_over(Path(folder, "answers"), pristine.points)
        found = {task: each for task, each in found.items() if each.places or task in answers}
        verdicts = judge.verdicts(answers, f"{folder}/work", left)
        judged = {}
        for number, worth in pristine.points.items():
            task = find(number)
            if number not in answers:
                if number in found:
                    judged[number] = nothing(task, error_of(number, found[number], errors))
                else:
                    judged[number] = nothing(task, trouble(number, pristine, cells))
            # Verdicts come as they are known, not in the order of tasks.
            while number not in judged:
                other, judged[other] = next(verdicts)
            result = result_of(task, worth, judged[number])
            if number in found:
                source = found[number].source
                result.notes = found[number].notes
                result.answer = clean(source, MOST_SHOWN)
                result.published = published(number, result.answer)
                result.suspicious = remarks(clean(source), pristine.given.get("imports", ""))
                if result.message:
                    name_what_comes_first(result, results, source)
            results.append(result)
            progress(result)
    return results


def handed_over(folder: Path, numbers: Iterable[str]) -> dict[str, bytes]:
    """Return what the cells have handed over to the checks of these tasks."""
    files = {number: folder / f"{number}.answers" for number in numbers}
    return {number: file.read_bytes() for number, file in files.items() if file.exists()}


def name_what_comes_first(result: TaskResult, before: Sequence[TaskResult], source: str) -> None:
    """Add to a wrong answer's message the earlier task that it uses, if that is wrong, too."""
    words = set(re.findall(r"\w+", source))
    for other in before:
        if other.points < other.possible and words & set(find(other.id).names):
            advice = f"mend {other.id} first"
            if advice not in result.message:
                result.message = clean(
                    f"{result.message} (it uses {other.id}, which is not right yet: {advice})"
                )
            break


def run(cells: dict[str, str], folder: str, seconds: float) -> tuple[dict[str, str], float]:
    """Run cells, {id: source}, in a launch of their own.

    Return their errors, {id: the error, or ""}, and how many of the `seconds` are left.
    """
    (outcome,) = launch(
        run_cells,
        cells,
        folder,
        seconds,
        world_size=1,
        device="cpu",
        timeout=LONGEST * seconds,
    )
    return outcome


def error_of(task: str, answer: Answer, errors: dict[str, str]) -> str:
    """Return why an answer was not handed over: the last error of its cells, or its check's.

    `errors` are {id of a cell: its error}.
    """
    for place in reversed(answer.places):
        if error := errors.get(f"own-{place}"):
            return f"the answer cell fails: {error}"
    return f"its check fails: {errors[check_of(task)]}" if errors[check_of(task)] else NOT_RUN
