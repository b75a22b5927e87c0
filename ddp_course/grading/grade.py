"""`ddp-course grade PATH…`: grade exercises, as table, CSV, JSON and HTML.

For each submission a fresh notebook is made of the pristine one and the learner's answers, and run under nbval in a
sandbox. What passes there is examined again in another sandbox, on inputs drawn anew; from it plain data comes back,
and whether that is right is decided here, in a process in which no answer ever runs.
"""

import argparse
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import nbformat

from ..errors import GradingError
from . import report
from .examine import Verdict, draw, verdict
from .sandbox import Limits, landlock_version, namespaces_allowed
from .submission import (
    NUMBERED,
    cells_for,
    exercise_of,
    find_submissions,
    fresh_notebook,
    load_exercises,
    read_notebook,
    take_answers,
)
from .tasks import SO_FAR, Part, find

CELL_SECONDS = 30.0
GRACE_SECONDS = 15.0
MOST_ANSWER_BYTES = 256 << 20
MOST_MESSAGE = 2000
STOPPED = {
    "time": "it was stopped: not finished after {seconds:g} s",
    "memory": "it was stopped: all its processes together took more than {gib:g} GiB of memory",
    "processes": "it was stopped: it started more than {processes} processes",
    "ended": "the process that ran it was ended by the code in it",
    "failed": "the sandbox could not be set up",
}


@dataclass
class TaskResult:
    """Points for one task, and what was wrong, in at most MOST_MESSAGE characters.

    `parts` are the properties that its points are for: dicts of name, points, possible and message.
    """

    id: str
    points: float
    possible: float
    message: str = ""
    parts: list = field(default_factory=list)

    def __post_init__(self):
        whole = {"name": "result", "points": self.points, "possible": self.possible, "message": self.message}
        self.parts = self.parts or [whole]


@dataclass
class Result:
    """One submission, graded. `exercise` is None if it could not be told; a `note` costs no points."""

    learner: str
    exercise: int | None
    tasks: list = field(default_factory=list)
    message: str = ""
    note: str = ""

    @property
    def points(self):
        """Points earned in all."""
        return sum(task.points for task in self.tasks)

    @property
    def possible(self):
        """Points there are."""
        return sum(task.possible for task in self.tasks)

    @property
    def passed(self):
        """Whether all points were earned."""
        return not self.message and self.points == self.possible > 0

    def as_dict(self):
        """The form of the JSON report."""
        tasks = [asdict(task) for task in self.tasks]
        if self.message and not tasks:
            tasks = [{"id": "notebook", "points": 0, "possible": 0, "message": self.message}]
        head = {"learner": self.learner, "exercise": self.exercise, **({"note": self.note} if self.note else {})}
        return {**head, "points": self.points, "possible": self.possible, "tasks": tasks}


def add_parser(subparsers):
    """Add `grade` to the command line."""
    parser = subparsers.add_parser("grade", help="grade exercises", description=__doc__.split("\n")[0])
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a notebook, or a folder of submissions")
    parser.add_argument("--csv", metavar="FILE", help="write one line a task")
    parser.add_argument("--html", metavar="DIR", help="write a page a learner")
    parser.add_argument("--json", metavar="FILE", help="write everything")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="submissions at a time (default: one a core)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a submission may take (default 120)")
    parser.add_argument("--hidden", action="store_true", help="draw more and harder inputs than the learner's checks")
    parser.add_argument("--seed", type=int, help="draw the inputs of an earlier grading again")
    parser.add_argument("--exercises", type=Path, default=exercises_folder(), help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def usable_cores():
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def exercises_folder():
    """Where the pristine exercises are: a part of the package, which nobody solves in place."""
    return Path(__file__).with_name("pristine")


def run(args):
    """The command itself: 0 if all pass, 1 if some do not, 2 if the grader could not do its work."""
    try:
        if args.jobs < 1 or not args.timeout > 0:
            raise GradingError("--jobs and --timeout must be positive")
        skipped = []
        exercises, submissions = load_exercises(args.exercises), find_submissions(args.paths, skipped)
        seed = secrets.randbelow(100_000) if args.seed is None else args.seed
        report.check_writable(args)
        warn_of_weak_sandbox()
        if skipped:
            print(
                f"no notebooks, so skipped: {', '.join(report.clean(path.name) for path in skipped)}", file=sys.stderr
            )
        print(f"grading {len(submissions)} submissions with inputs of seed {seed}", file=sys.stderr)
        results = grade_and_write(submissions, exercises, seed, args)
    except (GradingError, OSError) as error:
        print(f"ddp-course: {error}", file=sys.stderr)
        return 2
    if len(results) < len(submissions):
        print(f"ddp-course: interrupted after {len(results)} of {len(submissions)} submissions", file=sys.stderr)
        return 2
    return 0 if all(result.passed for result in best_of(results)) else 1


def grade_and_write(submissions, exercises, seed, args):
    """Grade all, writing the reports after each; return the results, after Ctrl-C those that there are."""
    places, done, lock = {id(one): place for place, one in enumerate(submissions)}, {}, threading.Lock()

    def note(submission, result):
        show_progress(result)
        with lock:
            done[places[id(submission)]] = result
            report.write_files(best_of([done[place] for place in sorted(done)]), args, seed)

    with suppress(KeyboardInterrupt):
        grade(submissions, exercises, seed, args.jobs, args.timeout, args.hidden, progress=note)
    results = [done[place] for place in sorted(done)]
    print(report.table(best_of(results)))
    return results


def best_of(results):
    """The results, of each learner's submissions to an exercise the best one alone, with a note."""
    groups = {}
    for result in results:
        groups.setdefault((result.learner, result.exercise), []).append(result)
    best = []
    for group in groups.values():
        one = max(group, key=lambda result: result.points)  # the first of equals
        note = f"handed in {len(group)} times; the best counts" if len(group) > 1 else ""
        best += group if one.exercise is None else [replace(one, note=note)]
    return best


def warn_of_weak_sandbox():
    """Say on standard error what does not hold on this machine."""
    if not namespaces_allowed():
        guard = "Landlock" if landlock_version() else "the rights of your account alone"
        weaker = "it is weaker (docs/GRADING.md says how); for strangers' code use a container"
        print(f"no user namespaces here: the sandbox guards files by {guard}, and {weaker}", file=sys.stderr)


def show_progress(result):
    """One line a submission on standard error, as it is done."""
    exercise = "?" if result.exercise is None else result.exercise
    print(
        f"{report.clean(result.learner)}: exercise {exercise}, {result.points:g} of {result.possible:g}",
        file=sys.stderr,
    )


def grade(submissions, exercises, seed, jobs=1, timeout=120.0, hidden=False, progress=lambda submission, result: None):
    """Grade all submissions, `jobs` at a time; return a Result for each, in their order.

    `progress(submission, result)` is called for each, from one of several threads. Ctrl-C ends it as soon as
    those submissions are done that have begun.
    """
    with Grader(exercises, seed, timeout, hidden) as grader:

        def graded(submission):
            result = grader.grade(submission)
            progress(submission, result)
            return result

        with ThreadPoolExecutor(jobs) as threads:
            try:
                return list(threads.map(graded, submissions))
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise


class Grader:
    """The zygote, and how one submission is graded with it."""

    def __init__(self, exercises, seed, timeout=120.0, hidden=False):
        self.exercises, self.hidden = exercises, hidden
        self.seed = secrets.randbelow(100_000) if seed is None else seed
        self.limits, self.lock = Limits(seconds=timeout), threading.Lock()
        self.judging = threading.Lock()  # judges seed torch's random generator, which all threads share
        self.folder = Path(tempfile.mkdtemp(prefix="ddp_course_grading_"))
        self.start_zygote()

    def start_zygote(self):
        """Start the process that forks sandboxes; again, if something has killed it."""
        self.control, theirs = socket.socketpair()
        environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1"}
        environ.pop("PYTHONPATH", None)
        with theirs:
            self.zygote = subprocess.Popen(
                [sys.executable, "-P", "-m", "ddp_course.grading.zygote"] if sys.version_info >= (3, 11)
                else [sys.executable, "-m", "ddp_course.grading.zygote"],
                stdin=theirs, stdout=subprocess.DEVNULL, stderr=(self.folder / "zygote.log").open("w"),
                env={**environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}, cwd=self.folder, start_new_session=True,
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.control.close()
        try:
            self.zygote.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.zygote.kill()
            self.zygote.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def grade(self, submission):
        """Grade one submission, whatever it is; only the machine's own trouble is raised."""
        exercise = None
        try:
            if submission.trouble:
                raise GradingError(submission.trouble)
            cells = read_notebook(submission.path)
            exercise = exercise_of(submission.path, cells, self.exercises)
            return self.grade_answers(submission.learner, self.exercises[exercise], cells)
        except GradingError as error:
            return self.unread(submission, f'"{submission.path.name}" {error}' if submission.path else str(error))
        except Exception as error:  # whatever is odd about this one, the others' results do not suffer
            return self.unread(submission, f"could not be graded ({type(error).__name__}: {error})", exercise)

    def unread(self, submission, what, exercise=None):
        """0 of what its exercise is worth, for a submission that could not be graded."""
        numbered = NUMBERED.match(submission.path.name) if submission.path else None
        exercise = exercise or (int(numbered[1]) if numbered else None)
        checks = self.exercises[exercise].checks if exercise in self.exercises else {}
        tasks = [TaskResult(task, 0, points, cut(what)) for task, (_, points) in checks.items()]
        return Result(submission.learner, exercise if checks else None, tasks, cut(what))

    def grade_answers(self, learner, pristine, cells):
        """Run the fresh notebook, examine what passes, and put the points together."""
        answers = take_answers(cells, pristine)
        messages, verdicts = dict(answers.troubles), {}
        notebook = fresh_notebook(pristine, answers)
        if len(messages) < len(pristine.checks):
            messages |= self.run_cells(notebook, pristine, set(pristine.checks) - messages.keys())
        promising = [task for task in pristine.checks if task not in messages or SO_FAR in messages[task]]
        if promising:
            verdicts = self.examine(notebook, promising)
        tasks = [
            result_of(task, points, messages.get(task, ""), verdicts.get(task))
            for task, (_, points) in pristine.checks.items()
        ]
        return Result(learner, pristine.exercise, tasks)

    def run_cells(self, notebook, pristine, wanted):
        """Run a fresh notebook under nbval; {task: message} for those of the `wanted` tasks that do not pass."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            path = Path(folder) / f"exercise{pristine.exercise:02d}.ipynb"
            path.write_text(nbformat.writes(notebook), encoding="utf-8")
            cell_seconds = min(CELL_SECONDS, 0.6 * self.limits.seconds)
            order = {"job": "ddp_course.grading.nbval_run:run_notebook", "notebook": str(path)}
            lines, stopped = self.in_sandbox({**order, "cell_seconds": cell_seconds}, folder)
        code = [cell.id for cell in notebook.cells if cell.cell_type == "code"]
        seen = {code[line["cell"]]: line for line in lines if "cell" in line}
        broken = [line["message"] for name, line in seen.items() if not line["passed"] and "check" not in name]
        messages = {}
        for task in wanted:
            line = seen.get(pristine.checks[task][0])
            if line is None:
                messages[task] = stopped or (broken[0] if broken else "the check did not run")
            elif not line["passed"]:
                messages[task] = in_words(task, line["message"], broken, seen.get(pristine.answer(task).id))
        return messages

    def examine(self, notebook, tasks):
        """Put answers to work on inputs drawn anew, and judge what comes back; {task: Verdict}."""
        items = [(task, cells_for(task, notebook)) for task in tasks]
        order = {"job": "ddp_course.grading.examine:examine_answers", "items": items}
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            lines, stopped = self.in_sandbox({**order, "seed": self.seed, "hidden": self.hidden}, folder)
        results = next((line["results"] for line in lines if "results" in line), None)
        if not isinstance(results, list) or len(results) != len(tasks):
            why = stopped or "the answers could not be examined: their process ended early"
            return {task: Verdict(False, why, (Part("result", 1, why),)) for task in tasks}
        with self.judging:
            return {
                task: verdict(find(task), result, draw(task, self.seed, self.hidden))
                for task, result in zip(tasks, results, strict=True)
            }

    def in_sandbox(self, order, folder):
        """Have the zygote do a job; return the lines of JSON it sent, and why it was stopped, or ""."""
        order = {**order, "folder": folder, "limits": asdict(self.limits)}
        ours, theirs = socket.socketpair()
        with ours:
            (Path(folder) / "order.json").write_text(json.dumps(order))
            with theirs, self.lock:
                if self.zygote.poll() is not None:
                    self.control.close()
                    self.start_zygote()
                with suppress(BrokenPipeError):  # killed in this moment: then nothing comes back
                    socket.send_fds(self.control, [folder.encode()], [theirs.fileno()])
            ours.settimeout(self.limits.seconds + GRACE_SECONDS)
            text = receive_all(ours)
        lines = [json.loads(line) for line in text.splitlines()]
        outcome = next((line["outcome"] for line in lines if "outcome" in line), "failed")
        words = STOPPED.get(outcome, "")
        limits = self.limits
        said = words.format(seconds=limits.seconds, gib=limits.memory / 2**30, processes=limits.processes)
        return [line for line in lines if "outcome" not in line], said


def result_of(task, possible, said, verdict):
    """The `TaskResult` of a task: what its check `said`, "" if it passed, and the verdict on it, if there is one.

    An answer that its own check has refused earns no more than a part.
    """
    parts = verdict.parts if verdict and not (said and verdict.right) else ()
    whole = sum(part.weight for part in parts)
    made = [
        {"name": part.name, "points": 0 if part.message else possible * part.weight / whole,
         "possible": possible * part.weight / whole, "message": cut(part.message)}
        for part in parts
    ]  # fmt: skip
    message = said or (verdict.message if verdict else "")
    return TaskResult(task, sum(part["points"] for part in made), possible, cut(message), made)


def cut(message):
    """A message that fits into a report."""
    return message if len(message) <= MOST_MESSAGE else f"{message[: MOST_MESSAGE - 2]} …"


def receive_all(connection):
    """Everything until the other end closes, up to a bound, as bytes of whole lines."""
    parts, total = [], 0
    try:
        while part := connection.recv(1 << 20):
            parts.append(part)
            total += len(part)
            if total > MOST_ANSWER_BYTES:
                break
    except TimeoutError:
        pass
    text = b"".join(parts)
    return text[: text.rfind(b"\n") + 1]


def in_words(task, message, broken, answer):
    """A failed check's message, or that of the answer cell if that is where it broke."""
    if "Kernel dead" in (answer or {}).get("message", message):
        return f"not run: an earlier cell ended everything: {broken[0]}" if broken else "not run: the kernel had died"
    if answer is not None and not answer["passed"]:
        return f"the answer cell fails: {answer['message']}"
    message = message.removeprefix("Wrong: ").removeprefix(f"Exercise {task}: ")
    if broken and "NameError" in message:
        return f"{message} ({broken[0]})"
    return message
