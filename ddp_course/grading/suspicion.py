"""What a person should look at: answers that reach for what no answer needs, and answers that are alike.

Neither takes points away. Points depend on what `first_sight` refuses and on what the examiner measures.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import combinations

from .first_sight import (
    AROUND_THE_WIRE,
    BUILDS_NAMES,
    BY_NAME,
    FILES,
    LEADS_OUT,
    READERS,
    imports_of,
    names_of,
    strange_import,
    strange_name,
)
from .results import Result, TaskResult

LEAST_NODES = 60  # of a tree: shorter answers are alike because there is one way to write them
ALIKE = 0.95
MOST_REMARKS = 6
SAYS_ITSELF = {"__eq__", "__ne__", "__lt__", "__bool__", "__float__", "__len__", "__class__"}
TELLING = ("solutions", "ddp_course", "order.json", "/proc", ".ipynb", "answer-")


def remarks(source: str, allowed: frozenset[str] = frozenset()) -> list[str]:
    """What is odd about an answer, a line each: it reads files, frames, joined names, the grader itself, and so on."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    refused = strange_import(tree, allowed) or strange_name(tree, allowed)
    found = [refused] if refused else []
    odd = [*odd_imports(tree, allowed), *odd_names(tree, allowed), *replaced(tree)]
    return list(dict.fromkeys([*found, *odd]))[:MOST_REMARKS]


def odd_imports(tree: ast.AST, allowed: frozenset[str]) -> Iterator[str]:
    """Imports that lead to the course, to files, or out of the process."""
    watched = FILES | LEADS_OUT | AROUND_THE_WIRE | READERS
    for line, name in imports_of(tree):
        if name not in allowed and set(name.lstrip(".").split(".")) & watched:
            yield f"line {line}: imports {name}"


def odd_names(tree: ast.AST, allowed: frozenset[str]) -> Iterator[str]:
    """Names, attributes and texts that hardly any answer needs."""
    watched = (LEADS_OUT | FILES | BUILDS_NAMES | AROUND_THE_WIRE) - allowed
    for node in ast.walk(tree):
        for name in names_of(node) & watched:
            yield f"line {getattr(node, 'lineno', '?')}: uses {name}"
        if isinstance(node, ast.Attribute) and node.attr in READERS - allowed:
            yield f"line {node.lineno}: reads with {node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "check":
            yield f"line {node.lineno}: calls check, which is not for answers"
        if names := SAYS_ITSELF & set(defined_by(node)):
            yield f"line {getattr(node, 'lineno', '?')}: a class says by {min(names)} what it is equal to"
        if joined_name(node):
            yield f"line {getattr(node, 'lineno', '?')}: an attribute by a name that is put together"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            for word in (word for word in TELLING if word in node.value):
                yield f"line {node.lineno}: the text {node.value[:40]!r} names {word}"


def defined_by(node: ast.AST) -> Iterator[str]:
    """The names that the body of a class defines."""
    for inner in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(inner, ast.FunctionDef):
            yield inner.name
        yield from (one.id for one in ast.walk(inner) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))


def replaced(tree: ast.AST) -> Iterator[str]:
    """Attributes of imported modules that are given another value."""
    modules = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }  # fmt: skip
    stored = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    for node in stored:
        if isinstance(node.value, ast.Name) and node.value.id in modules:
            yield f"line {node.lineno}: replaces {node.value.id}.{node.attr}"


def joined_name(node: ast.AST) -> bool:
    """Whether a node is a call like getattr(x, name) with anything but a plain text as the name."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME):
        return False
    return len(node.args) > 1 and not isinstance(node.args[1], ast.Constant)


def likeness(answers: Mapping[str, str]) -> list[tuple[str, str, float]]:
    """Pairs of learners whose answers to a task are alike, with how much, whatever names and comments they use.

    `answers` are {learner: source}. Answers too short to be told apart are left out.
    """
    shapes = {learner: shape(source) for learner, source in answers.items()}
    long_enough = {learner: nodes for learner, nodes in shapes.items() if len(nodes) >= LEAST_NODES}
    found = []
    for one, other in combinations(long_enough, 2):
        matcher = SequenceMatcher(None, long_enough[one], long_enough[other], autojunk=False)
        if (
            matcher.real_quick_ratio() >= ALIKE
            and matcher.quick_ratio() >= ALIKE
            and (same := matcher.ratio()) >= ALIKE
        ):
            found.append((one, other, same))
    return found


def shape(source: str) -> list[str]:
    """An answer as a list of its tree's nodes, without docstrings; each name is the number of its first use."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    numbers: dict[str, int] = {}
    nodes = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        name = getattr(node, "id", None) or getattr(node, "arg", None)
        detail = str(numbers.setdefault(name, len(numbers))) if name else getattr(node, "attr", "")
        detail = repr(node.value)[:40] if isinstance(node, ast.Constant) and len(repr(node.value)) < 40 else detail
        nodes.append(f"{type(node).__name__} {detail}")
    return nodes


def note_likeness(results: Sequence[Result]) -> None:
    """Write into the results of both learners which of their answers are alike; only what earned points is compared."""
    by_task: dict[str, dict[str, TaskResult]] = {}
    for result in results:
        for task in result.tasks:
            if task.points and task.answer:
                by_task.setdefault(task.id, {})[result.learner] = task
    for tasks in by_task.values():
        for one, other, same in likeness({learner: task.answer for learner, task in tasks.items()}):
            for learner, neighbour in ((one, other), (other, one)):
                remark = f"alike to that of {neighbour} ({100 * same:.0f} %)"
                tasks[learner].suspicious = [*tasks[learner].suspicious, remark]
