"""What a submission earned: by task, by exercise, and of several to one exercise the best."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ddp_course.checking.checks import find
from ddp_course.checking.diagnosis import Verdict

MOST_MESSAGE = 2000


@dataclass
class TaskResult:
    """Points for one task, and what was wrong, in at most MOST_MESSAGE characters.

    `parts` are the properties that its points are for: dicts of name, points, possible and message.
    `suspicious` are remarks for a person to judge by, and `answer` is the learner's source.
    `comment` and `by_hand`, points that count instead, are a teacher's.
    """

    id: str
    points: float
    possible: float
    message: str = ""
    parts: list[dict[str, Any]] = field(default_factory=list)
    suspicious: list[str] = field(default_factory=list)
    answer: str = ""
    graded: bool = True
    comment: str = ""
    by_hand: float | None = None

    @property
    def earned(self) -> float:
        """The points that count."""
        return self.points if self.by_hand is None else self.by_hand


@dataclass
class Result:
    """One submission, graded. `exercise` is None if it is unknown; a `note` costs no points.

    `files` are {name: hash} of the notebooks that were handed in for it; `about` is what a
    gradebook knows the learner by. It counts as `graded` unless the grader could not do its work.
    `comment` and `extra` points are a teacher's; an `excused` learner gets no grade.
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
    comment: str = ""
    extra: float = 0.0
    excused: bool = False

    @property
    def points(self) -> float:
        """Points earned in all, with those that a teacher gave or took; never less than 0."""
        return max(0.0, sum(task.earned for task in self.tasks) + self.extra)

    @property
    def possible(self) -> float:
        """Points there are."""
        return sum(task.possible for task in self.tasks)

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
        """The points as a gradebook has them: an empty cell if there is no grade."""
        return f"{self.points:g}" if self.has_grade else ""

    @property
    def in_words(self) -> str:
        """The points as people read them."""
        if self.has_grade:
            return f"{self.points:g} of {self.possible:g}"
        return "excused" if self.excused else "not graded"

    def as_dict(self) -> dict[str, Any]:
        """The form of the JSON report."""
        points = self.points if self.has_grade else None
        return asdict(self) | {"points": points, "possible": self.possible}


def from_dict(record: dict[str, Any]) -> Result:
    """A `Result` from its form in the JSON report, without a teacher's comments; KeyError or
    TypeError if it has another form.
    """
    apart = ("tasks", "points", "possible", "comment", "extra", "excused")
    about = {key: value for key, value in record.items() if key not in apart}
    tasks = [TaskResult(**task | {"comment": "", "by_hand": None}) for task in record["tasks"]]
    return Result(tasks=tasks, **about)


def best_of(results: Sequence[Result]) -> list[Result]:
    """The results, with only the best of each learner's submissions to an exercise, and a note on
    their number.
    """
    groups: dict[tuple, list[Result]] = {}
    for result in results:
        groups.setdefault((result.learner, result.exercise), []).append(result)
    best: list[Result] = []
    for group in groups.values():
        first = max(group, key=lambda result: result.points)  # Of equal ones `max` takes the first.
        files = {name: digest for result in group for name, digest in result.files.items()}
        if first.exercise is None:
            best += group
        elif len(files) > 1:
            late = "; handed in late" if "late" in first.note else ""
            note = f"handed in {len(files)} times; the best counts{late}"
            best.append(replace(first, note=note, files=files))
        else:
            best.append(first)
    return best


def merged(earlier: Sequence[Result], new: Sequence[Result]) -> list[Result]:
    """Earlier results, of which those are left out that `new` ones replace, and the new ones, in
    the order of learners.
    """
    replaced: set[tuple] = {(result.learner, "") for result in new}
    for result in new:
        replaced |= keys_of(result)
    others = [result for result in earlier if not keys_of(result) & replaced]
    return best_of(
        sorted([*others, *new], key=lambda result: (result.learner, result.exercise or 0))
    )


def keys_of(result: Result) -> set[tuple]:
    """What a result is of: a learner's exercise, and their files, "" if there is none."""
    names = list(result.files) or [""]
    return {(result.learner, result.exercise), *((result.learner, name) for name in names)}


def result_of(task: str, possible: float, verdict: Verdict) -> TaskResult:
    """The `TaskResult` of a task, by its verdict."""
    weights = find(task).parts
    parts: list[dict[str, Any]] = []
    for name, message in verdict.parts.items():
        worth = possible * weights[name] / sum(weights.values())
        points = 0 if message else worth
        about = {"name": name, "points": points, "possible": worth, "message": clean(message)}
        parts.append(about)
    total = sum(part["points"] for part in parts)
    message = clean(verdict.message)
    return TaskResult(task, total, possible, message, parts, graded=verdict.judged)


def clean(text: object, most: int = MOST_MESSAGE) -> str:
    """Text without control characters, which could move the cursor or colour a terminal, cut to
    length `most`.
    """
    letters = []
    for letter in re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(text)):
        is_control = letter not in "\n\t" and unicodedata.category(letter)[0] == "C"
        letters.append("?" if is_control else letter)
    if len(letters) > most:
        letters[most - 2 :] = " …"
    return "".join(letters)
