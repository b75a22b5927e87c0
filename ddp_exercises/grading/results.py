"""The results of submissions: by task, by exercise, and the best of several to one exercise."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ddp_exercises.diagnosis import Verdict
from ddp_exercises.errors import GradingError
from ddp_exercises.tasks import Task

MOST_MESSAGE = 2000
COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Characters that move the cursor, turn the direction of writing, or are no text at all.
CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]"
)


@dataclass(kw_only=True)
class ByHand:
    """What a teacher adds to a task or an exercise.

    That is a comment and `extra` points, which may be less than 0. An exercise may be `excused`,
    which is no grade, and no zero either.
    """

    comment: str = ""
    extra: float = 0.0
    excused: bool = False


@dataclass
class Part:
    """A property that earns points of a task; its `message` says what is wrong, if anything is."""

    name: str
    points: float
    possible: float
    message: str = ""


@dataclass
class TaskResult(ByHand):
    """The points for one task, and what was wrong, in at most MOST_MESSAGE characters.

    `suspicious` are remarks for a person to judge by, and `notes` say how the answer was found.
    `answer` is the learner's source, `published` how it equals the course's own ("verbatim",
    "renamed", or not), and `misconception` the name of the known wrong answer that it has given.
    """

    id: str
    points: float
    possible: float
    message: str = ""
    parts: list[Part] = field(default_factory=list)
    suspicious: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    published: str = ""
    misconception: str = ""
    answer: str = ""
    graded: bool = True

    @property
    def earned(self) -> float:
        """The points that count, with those that a teacher gave or took."""
        return round(self.points + self.extra, 9)


@dataclass
class Result(ByHand):
    """One submission, graded; `exercise` is None if it is unknown, and a `note` costs no points.

    `files` are {name: hash} of the notebooks that were handed in for it; by `about` a gradebook
    knows the learner. It counts as `graded` unless the grader could not do its work. The `question`
    about the learner's own code, if one was asked for, has its text and the right answer.
    """

    learner: str
    exercise: int | None
    tasks: list[TaskResult] = field(default_factory=list)
    message: str = ""
    note: str = ""
    files: dict[str, str] = field(default_factory=dict)
    seed: int | None = None
    about: dict[str, str] = field(default_factory=dict)
    graded: bool = True
    question: dict[str, str] = field(default_factory=dict)

    @property
    def points(self) -> float:
        """The points earned in all, with those that a teacher gave or took; never less than 0."""
        return max(0.0, round(sum(task.earned for task in self.tasks) + self.extra, 9))

    @property
    def possible(self) -> float:
        """The points that can be earned."""
        return sum(task.possible for task in self.tasks)

    @property
    def next_task(self) -> str:
        """The first task with points to be earned; "" if there is none."""
        return next((task.id for task in self.tasks if task.earned < task.possible), "")

    @property
    def passed(self) -> bool:
        """Whether all points were earned."""
        return not self.message and self.points >= self.possible > 0

    @property
    def has_grade(self) -> bool:
        """Whether there is a grade: the grader could do its work, and nobody is excused."""
        return not self.excused and self.graded and all(task.graded for task in self.tasks)

    @property
    def mark(self) -> str:
        """The points as a gradebook has them: an empty cell stands for no grade."""
        return f"{self.points:g}" if self.has_grade else ""

    @property
    def in_words(self) -> str:
        """The points as people read them."""
        if self.has_grade:
            return f"{self.points:g} of {self.possible:g}"
        return "excused" if self.excused else "not graded"

    def as_dict(self) -> dict[str, Any]:
        """Return the result in the form of the JSON report."""
        points = self.points if self.has_grade else None
        return asdict(self) | {"points": points, "possible": self.possible}


def read_results(path: str | Path) -> list[Result]:
    """Return the results in a JSON report, without a teacher's comments; none if there is no file.

    Raises GradingError for a file that is no report.
    """
    if not Path(path).exists():
        return []
    results = []
    nothing_by_hand = asdict(ByHand())
    try:
        for record in json.loads(Path(path).read_text(encoding="utf-8")):
            tasks = []
            for task in record["tasks"]:
                parts = [Part(**part) for part in task["parts"]]
                tasks.append(TaskResult(**task | nothing_by_hand | {"parts": parts}))
            del record["points"], record["possible"]
            results.append(Result(**record | nothing_by_hand | {"tasks": tasks}))
    except (ValueError, KeyError, TypeError) as error:
        raise GradingError(
            f'"{path}" is no report to resume from ({type(error).__name__}: {error})'
        ) from error
    return results


def grouped(results: Sequence[Result], key: Callable[[Result], Any]) -> dict[Any, list[Result]]:
    """Return the results in groups, by their keys."""
    groups = defaultdict(list)
    for result in results:
        groups[key(result)].append(result)
    return groups


def best_of(results: Sequence[Result]) -> list[Result]:
    """Return the best of each learner's submissions to an exercise, with a note of their number."""
    # A submission that answers no exercise is compared with no other.
    groups = grouped(results, lambda each: (each.learner, each.exercise or tuple(each.files)))
    best_results = []
    for group in groups.values():
        # Of equal results `max` takes the first.
        best = max(group, key=lambda result: result.points)
        files = {name: digest for result in group for name, digest in result.files.items()}
        if len(files) > 1:
            late = "; handed in late" if "late" in best.note else ""
            note = f"handed in {len(files)} times; the best counts{late}"
            best = replace(best, note=note, files=files)
        best_results.append(best)
    return best_results


def merged(earlier: Sequence[Result], new: Sequence[Result]) -> list[Result]:
    """Return earlier results and new ones, in the order of learners.

    An earlier result is left out if there is a new one of the same learner's exercise or file.
    """
    # These learners may have handed in nothing before.
    graded_anew = {(result.learner, None) for result in new}
    graded_anew.update(*map(subjects, new))
    results = [result for result in earlier if not subjects(result) & graded_anew]
    results += new
    return best_of(sorted(results, key=lambda result: (result.learner, result.exercise or 0)))


def subjects(result: Result) -> set[tuple]:
    """Return what a result is about: (learner, exercise), and (learner, file) for each file.

    Without an exercise and files it is (learner, None).
    """
    pairs = {(result.learner, each) for each in (result.exercise, *result.files) if each}
    return pairs or {(result.learner, None)}


def result_of(task: Task, possible: float, verdict: Verdict) -> TaskResult:
    """Return the `TaskResult` of a task, by its verdict."""
    parts = []
    for name, message in verdict.parts.items():
        worth = possible * task.parts[name] / sum(task.parts.values())
        points = 0.0 if message else worth
        parts.append(Part(name, points, worth, clean(message)))
    return TaskResult(
        task.number,
        sum(part.points for part in parts),
        possible,
        clean(verdict.message),
        parts,
        misconception=verdict.misconception,
        graded=verdict.judged,
    )


def first_line(message: str) -> str:
    """Return the first line of a message, at most 200 characters of it."""
    return message.strip().split("\n")[0][:200]


def clean(text: object, most: int = MOST_MESSAGE) -> str:
    """Return text of at most `most` characters, without colours and control characters."""
    plain = CONTROL.sub("?", COLOUR.sub("", str(text)))
    return plain if len(plain) <= most else f"{plain[: most - 2]} …"
