"""What a person should look at: answers that reach for what no answer needs, and answers that are alike.

Neither takes points away.
"""

import ast
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

from .checks import solution
from .results import Result, TaskResult

LEAST_NODES = 60  # of a tree: shorter answers are alike because there is one way to write them
ALIKE = 0.95
MOST_REMARKS = 6
LEADS_OUT = frozenset({
    "_exit", "__builtins__", "__closure__", "__code__", "__dict__", "__globals__", "__import__", "__subclasses__",
    "_getframe", "builtins", "ctypes", "currentframe", "eval", "exec", "f_back", "f_globals", "f_locals",
    "get_objects", "importlib", "inspect", "kill", "linecache", "multiprocessing", "os", "open", "pathlib", "pickle",
    "popen", "settrace", "shutil", "socket", "subprocess", "system", "tempfile",
})  # fmt: skip
SAYS_ITSELF = {"__eq__", "__ne__", "__lt__", "__bool__", "__float__", "__len__", "__class__"}
TELLING = ("solutions", "answers/", "checks/", "grading", "/proc", ".ipynb")


def remarks(source: str, given: str = "") -> list[str]:
    """What is odd about an answer, a line each; what the notebook that was `given` out imports is not."""
    tree, usual = parsed(source), parsed(given)
    known = {name for node in ast.walk(usual) for name in names_in(node)}
    imports = {ast.unparse(node) for node in ast.walk(usual) if isinstance(node, ast.Import | ast.ImportFrom)}
    lines = []
    for node in ast.walk(tree):
        texts = [f"uses {name}" for name in names_in(node) if name in LEADS_OUT - known]
        if isinstance(node, ast.ImportFrom | ast.Import) and ast.unparse(node) not in imports:
            texts += [ast.unparse(node)[:80]] if "ddp_course" in ast.unparse(node) else []
        if isinstance(node, ast.ClassDef):
            own = SAYS_ITSELF & {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
            texts += [f"a class says by {name} what it is equal to" for name in sorted(own)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            texts += [f"the text {node.value[:40]!r} names {word}" for word in TELLING if word in node.value]
        lines += [f"line {node.lineno}: {text}" for text in texts]  # type: ignore[attr-defined]
    return list(dict.fromkeys(lines))[:MOST_REMARKS]


def parsed(source: str) -> ast.Module:
    """The tree of a piece of Python; an empty one of magics, or of what is no Python: the kernel says so."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def names_in(node: ast.AST) -> list[str]:
    """The names of a node: a variable, an attribute, or all parts of an import."""
    if isinstance(node, ast.Name | ast.Attribute):
        return [node.id if isinstance(node, ast.Name) else node.attr]
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return []
    modules = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
    return [name for module in modules for name in module.split(".")]


def shape(source: str) -> list[str]:
    """An answer as a list of its tree's nodes, without docstrings; each name is the number of its first use."""
    numbers: dict[str, int] = {}
    nodes = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        name = getattr(node, "id", None) or getattr(node, "arg", None)
        detail = str(numbers.setdefault(name, len(numbers))) if name else getattr(node, "attr", "")
        detail = repr(node.value)[:40] if isinstance(node, ast.Constant) else detail
        nodes.append(f"{type(node).__name__} {detail}")
    return nodes


def alike(nodes: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two shapes are nearly the same."""
    matcher = SequenceMatcher(None, nodes, other, autojunk=False)
    return min(matcher.real_quick_ratio(), matcher.quick_ratio()) >= ALIKE and matcher.ratio() >= ALIKE


def clusters(answers: Mapping[str, str], lesson: str = "") -> list[list[str]]:
    """Groups of learners whose answers to a task are alike, whatever names and comments they use.

    `answers` are {learner: source}. Answers too short to be told apart are left out, and those like the lesson's code.
    """
    known, groups = shape(lesson), []
    for learner, source in answers.items():
        nodes = shape(source)
        if len(nodes) < LEAST_NODES or alike(nodes, known):
            continue
        group = next((group for group in groups if alike(nodes, group[0][1])), None)
        if group is None:
            groups.append([(learner, nodes)])
        else:
            group.append((learner, nodes))
    return [[learner for learner, _ in group] for group in groups if len(group) > 1]


def note_likeness(results: Sequence[Result]) -> None:
    """Write into the results of learners whose answers are alike who they are; only what earned points is compared."""
    by_task: dict[str, dict[str, TaskResult]] = {}
    for result in results:
        for task in result.tasks:
            if task.points and task.answer:
                by_task.setdefault(task.id, {})[result.learner] = task
    for number, tasks in by_task.items():
        for group in clusters({learner: task.answer for learner, task in tasks.items()}, solution(number)):
            for learner in group:
                tasks[learner].suspicious = [*tasks[learner].suspicious, f"alike: {', '.join(group)}"]
