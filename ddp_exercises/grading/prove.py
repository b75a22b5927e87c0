"""Asks a question about a learner's own code that only a person who understands it can answer.

One line is changed; what will the check say? All choices are what the check really said of such
changes, and of the task's known wrong answers, when they ran.
"""

import random
import re
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from ddp_exercises.attempt import Attempt
from ddp_exercises.diagnosis import Verdict
from ddp_exercises.evidence import gather
from ddp_exercises.tasks import Task, cells_with, find

from .grader import Judge
from .guard import enter
from .results import Result, TaskResult, clean

MOST = 6  # At most so many changes are tried.
LETTERS = "abcd"
NO_CODE = ("#", '"')  # A line that begins so is a comment, or the text below a `def`.
RIGHT = "correct"
# Whoever knows Python foresees an error without knowing the task.
RAISED = "your code raised"
# Choices differ in words: a fault spoils several ranks, and which is told first may change.
NUMBERS = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?,?\s*|\((?:right|yours): .*")
# An author should be able to foresee what these do: a neighbour on the other side, an off-by-one,
# a missing division.
CHANGES = {
    r" \+ ": " - ",
    r" - ": " + ",
    r" \+= ": " -= ",
    r"\S+ //?= .*": "pass",
    r" //? \w[\w.]*(\([^()]*\)|\[[^][]*\])*": "",
    r" < ": " <= ",
    r" > ": " >= ",
    r" == ": " != ",
    r"\blen\([^()]*\)": r"\g<0> - 1",
    r"(?<![\w.])0(?![\w.])": "1",
    r"(?<![\w.])1(?![\w.])": "2",
}


class Question(NamedTuple):
    """A question in words, and the letter of the right choice."""

    text: str
    right: str


class Change(NamedTuple):
    """A changed answer, and in words what has become of which line."""

    source: str
    words: str


class Outcome(NamedTuple):
    """The message of the check on an answer with this change."""

    message: str
    change: Change


def question_about(result: Result, judge: Judge, seconds: float) -> Question | None:
    """Return a question about one of a submission's right answers; None if nothing can be asked.

    It is the same for the same learner, answers and seed.
    """
    right_tasks = [task for task in result.tasks if task.answer and not task.message]
    answers = [task.answer for task in right_tasks]
    chance = random.Random(f"{judge.seed} {result.learner} {answers}")
    for task in chance.sample(right_tasks, len(right_tasks)):
        # It is drawn before anything runs: a fault may be told in other words in another run.
        drawn = chance.random()
        said = what_is_said(task, judge, chance, seconds)
        faults = [each for each in said if each != RIGHT and not each.startswith(RAISED)]
        if faults:
            fault, change = said[faults[0]]
            by_words = {NUMBERS.sub("", fault): fault}
            others = [each.message for each in said.values()]
            for message in (*others, RIGHT, *said_of_known(find(task.id), judge, chance)):
                by_words.setdefault(NUMBERS.sub("", message), message)
            _, *choices = list(by_words.values())[: len(LETTERS)]
            choices.sort()
            choices.insert(int(drawn * (len(choices) + 1)), fault)
            lines = [f"{task.id}: {change.words} What does the check say then?"]
            lines += map("  {}) {}".format, LETTERS, choices)
            return Question("\n".join(lines), LETTERS[choices.index(fault)])
    return None


def said_of_known(task: Task, judge: Judge, chance: random.Random) -> list[str]:
    """Return what the check says of the task's known wrong answers, in any order."""
    attempt = Attempt(task, {}, None)
    _, *evidences = judge.known(task)  # The first one does nothing.
    messages = [first_line(judge.compared(attempt, evidence)) for evidence in evidences]
    return chance.sample(messages, len(messages))


def first_line(said: Verdict) -> str:
    """Return the first line of a message about an answer."""
    return clean(said.message).split("\n")[0] or RIGHT


def what_is_said(
    result: TaskResult, judge: Judge, chance: random.Random, seconds: float
) -> dict[str, Outcome]:
    """Return what the check says of changes, by its words without numbers.

    Some changes of a right answer are tried under a submission's limits. Nothing is returned for an
    answer that needs other cells of the learner's.
    """
    changes = list(mutations(result.answer))
    changes = chance.sample(changes, min(MOST, len(changes)))
    task = find(result.id)
    inputs = task.inputs(judge.seed)
    texts = [result.answer, *(change.source for change in changes)]
    attempts = [Attempt(task, inputs, cells_with(result.id, text)) for text in texts]
    with tempfile.TemporaryDirectory(prefix="ddp_course_grading_") as folder:
        evidences = gather(attempts, partial(enter, folder), seconds=seconds)
    said = [first_line(each) for each in map(judge.compared, attempts, evidences)]
    if said[:1] != [RIGHT]:
        return {}
    by_words: dict[str, Outcome] = {}
    for each in map(Outcome, said[1:], changes):
        by_words.setdefault(NUMBERS.sub("", each.message), each)
    return by_words


def mutations(source: str) -> Iterator[Change]:
    """Yield an answer with one line changed, for all CHANGES and all places of each."""
    lines = source.split("\n")
    for place, line in enumerate(lines):
        if line.lstrip().startswith(NO_CODE):
            continue
        for old, new in CHANGES.items():
            for found in re.finditer(old, line):
                changed = line[: found.start()] + found.expand(new) + line[found.end() :]
                text = "\n".join([*lines[:place], changed, *lines[place + 1 :]])
                where = f"line {place + 1} of your answer, `{line.strip()}`,"
                yield Change(text, f"{where} becomes `{changed.strip()}`.")
