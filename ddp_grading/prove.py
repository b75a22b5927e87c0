"""A question about a learner's own code, which only who understands it can answer: one line is
changed; what will the check say?

All that may be chosen from is what the check said of such changes when they ran.
"""

import ast
import random
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from ddp_course.checking.attempt import Attempt
from ddp_course.checking.evidence import gather
from ddp_course.checking.tasks import cells_with, find

from .grader import Judge
from .guard import enter
from .results import Result, TaskResult, clean, first_line

MOST = 6  # So many changes are tried.
LETTERS = "abcd"
RIGHT = "correct"
OTHER: dict[type, str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
}


class Question(NamedTuple):
    """A question in words, and the letter of the right choice."""

    text: str
    right: str


def question_about(result: Result, judge: Judge, seconds: float) -> Question | None:
    """A question about one of the right answers of a submission, the same for the same answers and
    seed. None if nothing can be asked about any.
    """
    right_tasks = [task for task in result.tasks if task.answer and not task.message]
    chance = random.Random(f"{judge.seed} {[task.answer for task in right_tasks]}")
    for task in chance.sample(right_tasks, len(right_tasks)):
        with tempfile.TemporaryDirectory(prefix="ddp_course_grading_") as folder:
            if question := ask(task, judge, chance, folder, seconds):
                return question
    return None


def ask(
    result: TaskResult, judge: Judge, chance: random.Random, folder: str, seconds: float
) -> Question | None:
    """A question about a right answer; None if its changes tell nothing, or if it needs other cells
    of the learner's. All changes run under a submission's limits.
    """
    changes = list(mutations(result.answer))
    changes = chance.sample(changes, min(MOST, len(changes)))
    texts = [result.answer, *(change.source for change in changes)]
    inputs = find(result.id).inputs(judge.seed)
    attempts = [Attempt(result.id, inputs, cells_with(result.id, text)) for text in texts]
    evidences = gather(attempts, partial(enter, folder), seconds=seconds)
    said = []
    for attempt, evidence in zip(attempts, evidences, strict=False):
        message = judge.compared(attempt, evidence).message
        said.append(first_line(clean(message)) or RIGHT)
    told = dict(zip(said[1:], changes, strict=False))  # {what the check says: the change}
    faults = [message for message in told if message != RIGHT]
    if said[:1] != [RIGHT] or not faults:
        return None
    fault = chance.choice(faults)
    others = [message for message in {**told, RIGHT: None} if message != fault]
    choices = [fault, *others[: len(LETTERS) - 1]]
    chance.shuffle(choices)
    lines = [f"{result.id}: {told[fault].in_words} What does the check say then?"]
    lines += [f"  {letter}) {text}" for letter, text in zip(LETTERS, choices, strict=False)]
    return Question("\n".join(lines), LETTERS[choices.index(fault)])


class Change(NamedTuple):
    """An answer with one line changed, and which."""

    source: str
    in_words: str


def mutations(source: str) -> Iterator[Change]:
    """Each change of an answer that its author should foresee: a neighbour on the other side, an
    off-by-one, a division that is missing.
    """
    lines = source.split("\n")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # There is a magic in it.
        return
    nodes: Iterator[Any] = ast.walk(tree)
    for node in nodes:
        text = changed(node)
        if text and node.lineno == node.end_lineno:
            number = node.lineno
            old = lines[number - 1].encode()
            new = old[: node.col_offset].decode() + text + old[node.end_col_offset :].decode()
            words = f"line {number} of your answer, `{lines[number - 1].strip()}`,"
            changed_lines = [*lines[: number - 1], new, *lines[number:]]
            yield Change("\n".join(changed_lines), f"{words} becomes `{new.strip()}`.")


def changed(node: Any) -> str:
    """What stands instead of an expression or statement; "" if nothing does."""
    match node:
        case ast.BinOp(left, ast.Div() | ast.FloorDiv(), _):
            return ast.unparse(left)
        case ast.AugAssign(_, ast.Div() | ast.FloorDiv(), _):
            return "pass"
        case ast.Constant(int(number)) if type(number) is int:
            return str(number + 1)
        case ast.Call(ast.Name("len")):
            return f"{ast.unparse(node)} - 1"
        case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]):
            other = OTHER.get(type(op))
            return f"{ast.unparse(left)} {other} {ast.unparse(right)}" if other else ""
        case ast.AugAssign(left, op, right) if type(op) in OTHER:
            return f"{ast.unparse(left)} {OTHER[type(op)]}= {ast.unparse(right)}"
    return ""
