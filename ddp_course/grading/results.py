"""What a submission earned: by task, by exercise, and of several to one exercise the best."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .diagnosis import Verdict

MOST_MESSAGE = 2000


@dataclass
class TaskResult:
    """Points for one task, and what was wrong, in at most MOST_MESSAGE characters.

    `parts` are the properties that its points are for: dicts of name, points, possible and message. `suspicious` are
    remarks for a person to judge by, `answer` is the learner's source, and `hints` the number of hints that were asked
    for.
    """

    id: str
    points: float
    possible: float
    message: str = ""
    parts: list[dict[str, Any]] = field(default_factory=list)
    suspicious: list[str] = field(default_factory=list)
    answer: str = ""
    hints: int = 0

    def __post_init__(self) -> None:
        whole = {"name": "result", "points": self.points, "possible": self.possible, "message": self.message}
        self.parts = self.parts or [whole]


@dataclass
class Result:
    """One submission, graded. `exercise` is None if it could not be told; a `note` costs no points.

    `files` are the names of the notebooks that were handed in for it, as found in the learner's folder.
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
        record = asdict(self) | {"points": self.points, "possible": self.possible}
        if self.message and not self.tasks:
            record["tasks"] = [asdict(TaskResult("notebook", 0, 0, self.message))]
        return {key: value for key, value in record.items() if value or key not in ("message", "note", "files")}


def from_dict(record: dict[str, Any]) -> Result:
    """A `Result` from its form in the JSON report; KeyError or TypeError if it has another form."""
    tasks = [TaskResult(**task) for task in record["tasks"] if task["id"] != "notebook"]
    about = {key: record[key] for key in ("message", "note", "files") if key in record}
    return Result(record["learner"], record["exercise"], tasks, **about)


def best_of(results: Sequence[Result]) -> list[Result]:
    """The results, of each learner's submissions to an exercise the best one alone, with a note."""
    groups: dict[tuple[str, int | None], list[Result]] = {}
    for result in results:
        groups.setdefault((result.learner, result.exercise), []).append(result)
    best: list[Result] = []
    for group in groups.values():
        first = max(group, key=lambda result: result.points)  # of equals it is the first
        count = sum(max(1, len(result.files)) for result in group)
        files = [file for result in group for file in result.files]
        note = f"handed in {count} times; the best counts" if count > 1 else first.note
        best += group if first.exercise is None else [replace(first, note=note, files=files)]
    return best


def result_of(task: str, possible: float, verdict: Verdict) -> TaskResult:
    """The `TaskResult` of a task, by its verdict."""
    whole, parts = sum(part.weight for part in verdict.parts), []
    for part in verdict.parts:
        worth = tidy(possible * part.weight / whole)
        message = cut(part.message)
        parts.append({"name": part.name, "points": 0 if message else worth, "possible": worth, "message": message})
    return TaskResult(task, tidy(sum(part["points"] for part in parts)), possible, cut(verdict.message), parts)


def tidy(points: float) -> float:
    """Whole points without a decimal point."""
    return int(points) if points == int(points) else points


def cut(message: str) -> str:
    """A message that fits into a report."""
    return message if len(message) <= MOST_MESSAGE else f"{message[: MOST_MESSAGE - 2]} …"
