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
    """

    id: str
    points: float
    possible: float
    message: str = ""
    parts: list[dict[str, Any]] = field(default_factory=list)
    suspicious: list[str] = field(default_factory=list)
    answer: str = ""


@dataclass
class Result:
    """One submission, graded. `exercise` is None if it is unknown; a `note` costs no points.

    `files` are the names of the notebooks that were handed in for it, as found in the learner's
    folder.
    """

    learner: str
    exercise: int | None
    tasks: list[TaskResult] = field(default_factory=list)
    message: str = ""
    note: str = ""
    files: list[str] = field(default_factory=list)

    @property
    def points(self) -> float:
        """Points earned in all."""
        return sum(task.points for task in self.tasks)

    @property
    def possible(self) -> float:
        """Points there are."""
        return sum(task.possible for task in self.tasks)

    @property
    def passed(self) -> bool:
        """Whether all points were earned."""
        return not self.message and self.points == self.possible > 0

    def as_dict(self) -> dict[str, Any]:
        """The form of the JSON report."""
        return asdict(self) | {"points": self.points, "possible": self.possible}


def from_dict(record: dict[str, Any]) -> Result:
    """A `Result` from its form in the JSON report; KeyError or TypeError if it has another form."""
    about = {
        key: value for key, value in record.items() if key not in ("tasks", "points", "possible")
    }
    return Result(tasks=[TaskResult(**task) for task in record["tasks"]], **about)


def best_of(results: Sequence[Result]) -> list[Result]:
    """The results, with only the best of each learner's submissions to an exercise, and a note on
    their number.
    """
    best: list[Result] = []
    for work in dict.fromkeys((result.learner, result.exercise) for result in results):
        group = [result for result in results if (result.learner, result.exercise) == work]
        first = max(
            group, key=lambda result: result.points
        )  # Of equal results, `max` takes the first.
        count = sum(max(1, len(result.files)) for result in group)
        files = [file for result in group for file in result.files]
        note = f"handed in {count} times; the best counts" if count > 1 else first.note
        best += group if first.exercise is None else [replace(first, note=note, files=files)]
    return best


def result_of(task: str, possible: float, verdict: Verdict) -> TaskResult:
    """The `TaskResult` of a task, by its verdict."""
    weights = find(task).parts
    parts: list[dict[str, Any]] = []
    for name, message in verdict.parts.items():
        worth = possible * weights[name] / sum(weights.values())
        parts.append(
            {
                "name": name,
                "points": 0 if message else worth,
                "possible": worth,
                "message": clean(message),
            }
        )
    return TaskResult(
        task, sum(part["points"] for part in parts), possible, clean(verdict.message), parts
    )


def clean(text: object, most: int = MOST_MESSAGE) -> str:
    """Text without control characters, which could move the cursor or colour a terminal, cut to
    length `most`.
    """
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", str(text)).encode("utf-8", "replace").decode()
    text = "".join(
        letter if letter in "\n\t" or unicodedata.category(letter)[0] != "C" else "?"
        for letter in text
    )
    return text if len(text) <= most else f"{text[: most - 2]} …"
