"""Whether the cells of a lesson can be run again: `python authoring/rebound.py`.

A cell reads a name that another cell has bound. If two cells bind that name, the reader runs with
the wrong value as soon as they are run in another order, without a word: the title says 1 MiB, the
points are of 16 MiB. So a top-level name that some cell reads from outside is bound by one cell
only. The body of a function counts as reading, since it looks a name up whenever it is called.
"""

import ast
import sys
from pathlib import Path

import jupytext

LESSONS = Path(__file__).parent / "lessons"


class Names(ast.NodeVisitor):
    """The names that a cell binds, and those that it reads before it has bound them itself."""

    def __init__(self, source: str) -> None:
        self.bound: set[str] = set()
        self.read: set[str] = set()
        magic = source.startswith("%%")  # What follows is not run in the notebook itself.
        lines = [] if magic else source.splitlines()
        python = [line for line in lines if not line.startswith(("%", "!"))]
        self.visit(ast.parse("\n".join(python)))

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.bound.add(node.id)
        elif node.id not in self.bound:
            self.read.add(node.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        names = {name.id for name in ast.walk(node.target) if isinstance(name, ast.Name)}
        self.read |= names - self.bound
        self.bound |= names
        self.visit(node.value)

    def visit_For(self, node: ast.For) -> None:
        for part in (node.iter, node.target, *node.body, *node.orelse):
            self.visit(part)

    def visit_comprehension_of(self, node: ast.AST) -> None:
        self.read |= names_from_outside(node) - self.bound

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_comprehension_of

    def visit_function(self, node) -> None:
        """Note what a body reads.

        It looks names up whenever it is called, also those that this cell binds.
        """
        self.read |= names_from_outside(node)
        if not isinstance(node, ast.Lambda):
            self.bound.add(node.name)

    visit_FunctionDef = visit_ClassDef = visit_Lambda = visit_function

    def visit_alias(self, node: ast.alias) -> None:
        self.bound.add((node.asname or node.name).partition(".")[0])


def names_from_outside(node: ast.AST) -> set[str]:
    """Return the names that a function or a comprehension reads and does not bind itself."""
    inside = list(ast.walk(node))
    names = [each for each in inside if isinstance(each, ast.Name)]
    own = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    own |= {each.arg for each in inside if isinstance(each, ast.arg)}
    own |= {each.name for each in inside if isinstance(each, ast.ExceptHandler) and each.name}
    return {name.id for name in names} - own


def faults(lesson: Path) -> list[str]:
    """Return a line for each name that a cell reads from outside, and that several cells bind."""
    readers: dict[str, str] = {}
    binders: dict[str, list[str]] = {}
    for cell in jupytext.read(lesson, fmt="py:percent").cells:
        if cell.cell_type == "code":
            title = cell.metadata.get("title") or cell.source.partition("\n")[0]
            names = Names(cell.source)
            for name in names.read:
                readers.setdefault(name, title)
            for name in names.bound:
                binders.setdefault(name, []).append(title)
    lines = []
    for name in sorted(readers.keys() & binders.keys()):
        first, *others = binders[name]
        for title in others:
            lines.append(
                f"{lesson.name}: {first} and {title} bind {name}, which {readers[name]} reads"
            )
    return lines


def main() -> int:
    """Print every fault; return the exit code."""
    found = False
    for lesson in sorted(LESSONS.glob("[0-9]*.py")):
        for line in faults(lesson):
            print(line)
            found = True
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
