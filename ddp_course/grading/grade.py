"""Grade submissions: run each notebook under nbval, have its answers examined, put the points together.

For each submission a fresh notebook is made of the pristine one and the learner's answers, and run under nbval in a
sandbox. The answers that got through are put to work in a second sandbox, on inputs that the examiner draws; plain data
comes back, and whether that is right is decided by the examiner, in a process in which no answer ever runs.
"""

import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import nbformat

from ..errors import GradingError
from . import checks, grader
from .examine import Verdict
from .frames import ORDER, send_frame
from .harness import cut_out
from .hints import asked_for
from .laying import as_cell
from .probing import answer_cell
from .results import Result, TaskResult, cut, result_of
from .sandbox import Limits
from .service import Service
from .submission import (
    NUMBERED,
    Pristine,
    Submission,
    cells_for,
    exercise_of,
    fresh_notebook,
    read_notebook,
    remarks_on,
    take_answers,
)
from .tasks import Part, find

CELL_SECONDS = 30.0
GRACE_SECONDS = 15.0
MOST_ANSWER_BYTES = 16 << 20
MOST_SHOWN = 20_000  # characters of an answer in a report
STOPPED = {
    "time": "it was stopped: not finished after {seconds:g} s",
    "memory": "it was stopped: all its processes together took more than {gib:g} GiB of memory",
    "processes": "it was stopped: it started more than {processes} processes",
    "ended": "the process that ran it was ended by the code in it",
    "failed": "the sandbox could not be set up",
}


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def exercises_folder() -> Path:
    """Where the pristine exercises are: a part of the package, which nobody solves in place."""
    return Path(__file__).with_name("pristine")


def grade(
    submissions: Sequence[Submission],
    exercises: dict[int, Pristine],
    seed: int | None,
    jobs: int = 1,
    timeout: float = 120.0,
    hidden: bool = False,
    progress: Callable[[Submission, Result], None] = lambda submission, result: None,
) -> list[Result]:
    """Grade all submissions, `jobs` at a time; return a Result for each, in their order.

    `progress(submission, result)` is called for each, from one of several threads. Ctrl-C ends it as soon as
    those submissions are done that have begun.
    """
    with Grader(exercises, seed, timeout, hidden) as grader:

        def graded(submission: Submission) -> Result:
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
    """The zygote of sandboxes, the examiner, and how one submission is graded with them."""

    def __init__(
        self, exercises: dict[int, Pristine], seed: int | None, timeout: float = 120.0, hidden: bool = False
    ) -> None:
        self.exercises, self.hidden = exercises, hidden
        self.seed = secrets.randbelow(100_000) if seed is None else seed
        self.limits = Limits(seconds=timeout)
        self.judge = grader.Judge(self.seed, hidden)
        self.folder = Path(tempfile.mkdtemp(prefix="ddp_course_grading_"))
        self.zygote = Service("ddp_course.grading.zygote", self.folder)
        self.examiner = Service("ddp_course.grading.examiner", self.folder)

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *error: object) -> None:
        self.zygote.end()
        self.examiner.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def grade(self, submission: Submission) -> Result:
        """Grade one submission, whatever it is; only the machine's own trouble is raised."""
        exercise, files = None, [submission.file] if submission.file else []
        try:
            if submission.path is None or submission.trouble:
                raise GradingError(submission.trouble)
            cells = read_notebook(submission.path)
            exercise = exercise_of(submission.path, cells, self.exercises)
            if exercise in checks.exercises():
                return replace(self.grade_anew(submission, self.exercises[exercise]), files=files)
            return replace(self.grade_answers(submission.learner, self.exercises[exercise], cells), files=files)
        except GradingError as error:
            return self.unread(submission, f'"{submission.path.name}" {error}' if submission.path else str(error))
        except Exception as error:  # whatever is odd about this one, the others' results do not suffer
            return self.unread(submission, f"could not be graded ({type(error).__name__}: {error})", exercise)

    def grade_anew(self, submission: Submission, pristine: Pristine) -> Result:
        """Grade a submission to an exercise that has checks/NN.py."""
        raw = json.loads(submission.path.read_text(encoding="utf-8-sig"))
        cells = [as_cell(cell) for cell in raw["cells"] if cell["cell_type"] == "code"]
        points = {task: worth for task, (_, worth) in pristine.checks.items()}
        return grader.result(submission.learner, pristine.notebook, points, cells, self.judge, self.limits.seconds)

    def unread(self, submission: Submission, what: str, exercise: int | None = None) -> Result:
        """0 of what its exercise is worth, for a submission that could not be graded."""
        numbered = NUMBERED.match(submission.path.name) if submission.path else None
        exercise = exercise or (int(numbered[1]) if numbered else None)
        checks = self.exercises[exercise].checks if exercise in self.exercises else {}
        tasks = [result_of(task, points, None, what) for task, (_, points) in checks.items()]
        files = [submission.file] if submission.file else []
        return Result(submission.learner, exercise if checks else None, tasks, cut(what), files=files)

    def grade_answers(self, learner: str, pristine: Pristine, cells: list[tuple[str, str]]) -> Result:
        """Run the fresh notebook, have examined what gets through, and put the points together."""
        answers = take_answers(cells, pristine)
        messages = dict(answers.troubles)
        notebook = fresh_notebook(pristine, answers)
        if waiting := [task for task in pristine.checks if task not in messages]:
            messages |= self.run_cells(notebook, pristine, waiting)
        waiting = [task for task in pristine.checks if task not in messages]
        items = [(task, cells_for(task, notebook)) for task in waiting]
        said = self.examine(items) if waiting else []
        verdicts = dict(zip(waiting, said, strict=True))
        tasks, asked = [], asked_for(source for _, source in cells)
        for task, (_, points) in pristine.checks.items():
            one = result_of(task, points, verdicts.get(task), messages.get(task, ""))
            touched = answers.sources[task] != pristine.answer(task).source
            one.answer = answers.sources[task][:MOST_SHOWN] if touched else ""
            measured = verdicts[task].suspicious if task in verdicts else ()
            one.suspicious = [*remarks_on(task, answers, pristine), *map(cut, measured)] if touched else []
            one.hints = asked.get(task, 0)
            tasks.append(one)
        name_what_comes_first(tasks, items)
        return Result(learner, pristine.exercise, tasks)

    def run_cells(self, notebook: Any, pristine: Pristine, wanted: list[str]) -> dict[str, str]:
        """Run a fresh notebook under nbval; {task: message} for those `wanted` tasks whose answer cell fails."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            path = Path(folder) / f"exercise{pristine.exercise:02d}.ipynb"
            path.write_text(nbformat.writes(notebook), encoding="utf-8")
            cell_seconds = min(CELL_SECONDS, 0.6 * self.limits.seconds)
            order = {"job": "ddp_course.grading.nbval_run:run_notebook", "notebook": str(path)}
            with self.sandbox({**order, "cell_seconds": cell_seconds}, folder, ()) as outcome:
                lines, stopped = self.hear(outcome)
        code = [cell.id for cell in notebook.cells if cell.cell_type == "code"]
        seen = {code[line["cell"]]: line for line in lines if "cell" in line}
        broken = [line["message"] for line in seen.values() if not line["passed"]]
        messages = {}
        for task in wanted:
            line = seen.get(pristine.answer(task).id)
            if line is None:
                messages[task] = stopped or (broken[0] if broken else "its answer cell did not run")
            elif not line["passed"]:
                dead = "Kernel dead" in line["message"]
                said = f"not run: an earlier cell ended everything: {broken[0]}" if dead else line["message"]
                messages[task] = said if dead else f"the answer cell fails: {said}"
        return messages

    def examine(self, items: Sequence[tuple[str, list]]) -> list[Verdict]:
        """Have answers, as (task, cells), put to work on inputs drawn anew, and judged."""
        tasks = [find(task) for task, _ in items]
        probes = {one.number: cut_out(one.probe, one.prepare) for one in tasks}  # here, once for all submissions
        order = {"items": items, "probes": probes, "seed": self.seed, "hidden": self.hidden}
        job = {"job": "ddp_course.grading.answering:host_answers"}
        host, examiners = socket.socketpair()
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryDirectory(dir=self.folder) as folder, ours:
            with theirs, examiners, host, self.sandbox(job, folder, (host,)) as outcome:
                self.examiner.send("submission", [examiners, theirs])
                for one in (host, examiners, theirs):
                    one.close()  # so that the end of a process shows as the end of its socket
                ours.settimeout(self.limits.seconds)
                try:
                    send_frame(ours, ORDER, json.dumps(order).encode())
                    said = [verdict_from(line) for line in read_lines(ours, self.limits.seconds)]
                except OSError:
                    said = []
                _, stopped = self.hear(outcome)
        why = stopped or "its answer could not be examined: what it returned took too long to look at"
        return [*said, *[Verdict(False, why, task.lost(why)) for task in tasks[len(said) :]]]

    def sandbox(self, order: dict[str, Any], folder: str, sockets: Sequence[socket.socket]) -> socket.socket:
        """Have the zygote do a job; return the socket through which its lines and its outcome come."""
        order = {**order, "folder": folder, "limits": asdict(self.limits)}
        (Path(folder) / "order.json").write_text(json.dumps(order))
        ours, theirs = socket.socketpair()
        with theirs:
            self.zygote.send(folder, [theirs, *sockets])
        return ours

    def hear(self, connection: socket.socket) -> tuple[list[dict], str]:
        """The lines of JSON that a sandbox sent, and why it was stopped, or ""."""
        lines = read_lines(connection, self.limits.seconds + GRACE_SECONDS)
        outcome = next((line["outcome"] for line in lines if "outcome" in line), "failed")
        words, limits = STOPPED.get(outcome, ""), self.limits
        said = words.format(seconds=limits.seconds, gib=limits.memory / 2**30, processes=limits.processes)
        return [line for line in lines if "outcome" not in line], said


def name_what_comes_first(tasks: Sequence[TaskResult], items: Sequence[tuple[str, list]]) -> None:
    """Add to the messages of tasks whose answers, in `items`, use another one that is not right, which one that is."""
    unfinished = {answer_cell(one.id): one.id for one in tasks if one.points < one.possible}
    used = {task: [unfinished[name] for name, _ in cells if name in unfinished] for task, cells in items}
    for one in tasks:
        first = next((task for task in used.get(one.id, ()) if task != one.id), "")
        if one.message and first and f"mend {first} first" not in one.message:
            one.message = cut(f"{one.message} (it uses {first}, which is not right yet: mend {first} first)")


def verdict_from(line: dict[str, Any]) -> Verdict:
    """A verdict as the examiner has written it down."""
    parts = tuple(Part(**part) for part in line["parts"])
    return Verdict(line["right"] is True, line["message"], parts, tuple(line["suspicious"]))


def read_lines(connection: socket.socket, seconds: float) -> list[dict]:
    """The lines of JSON that come until the other end closes, or for so long; of a flood only its beginning."""
    content, deadline = bytearray(), time.monotonic() + seconds
    try:
        while len(content) < MOST_ANSWER_BYTES:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = connection.recv(1 << 20)
            if not part:
                break
            content += part
    except OSError:
        pass
    return [json.loads(line) for line in bytes(content[: content.rfind(b"\n") + 1]).splitlines()]
