"""The probe of a task without its judge: what may be taken to where the answer runs.

A task's file holds how an answer is put to work and how it is judged, side by side, since that reads best. The process
in which an answer runs gets only the first half: the source of the probe, and of what it uses, cut out of the file.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import resolve_name

TASKS = "ddp_course.grading.tasks"
Found = dict[tuple[str, str], str]


@cache
def cut_out(probe: Callable, prepare: Callable | None = None) -> str:
    """Source that defines `probe`, `prepare`, and all that they use; no relative imports, and nothing of the judge's.

    ValueError if one uses a task's class, which has the judge in it.
    """
    found: Found = {}
    last = [] if prepare else ["prepare = None"]
    for function in filter(None, (prepare, probe)):
        own = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        take(names_used(own), function.__module__, found)
        last.append(absolute(own, function.__module__))
    return "\n".join([*found.values(), *last, f"probe = {probe.__name__}", ""])


def names_used(tree: ast.AST) -> list[str]:
    """All plain names in a piece of source, in order, each once."""
    return list(dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)))


def take(names: list[str], module: str, found: Found) -> None:
    """Add to `found` what the top level of a module defines under these names, what that needs first."""
    defined = top_level(module)
    for name in names:
        node = defined.get(name)
        if node is None or (module, name) in found:
            continue
        if isinstance(node, ast.ImportFrom) and (home := home_of(node, module)).startswith(TASKS):
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            take([original], home, found)
            continue
        if isinstance(node, ast.ClassDef) and node.decorator_list and "task" in names_used(node.decorator_list[0]):
            raise ValueError(f"a probe uses {name}, which is a task with its judge: move what it needs to a function")
        found[module, name] = ""  # on the way: two functions may call each other
        take([used for used in names_used(node) if used != name], module, found)
        del found[module, name]
        found[module, name] = absolute(node, module)


def top_level(module: str) -> dict[str, ast.stmt]:
    """{name: statement} of all that the top level of a module defines or imports."""
    tree = ast.parse(inspect.getsource(sys.modules.get(module) or import_module(module)))
    defined: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(alias.asname or alias.name.split(".")[0]): node for alias in node.names}
        else:
            stored = (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            defined |= dict.fromkeys(stored, node)
    return defined


def home_of(node: ast.ImportFrom, module: str) -> str:
    """The absolute name of the module that an import in `module` names."""
    package = module if hasattr(sys.modules[module], "__path__") else module.rpartition(".")[0]
    return resolve_name("." * node.level + (node.module or ""), package)


def absolute(node: ast.stmt, module: str) -> str:
    """The source of a statement of a module, its relative imports made absolute."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.ImportFrom) and inner.level:
            inner.module, inner.level = home_of(inner, module), 0
    return ast.unparse(node)


def run_imports(*sources: str) -> None:
    """Do what pieces of source import, at any depth, so that it is there when they run."""
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(ast.unparse(node), {})
