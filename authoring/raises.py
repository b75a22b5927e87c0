"""Which public functions raise an error and do not say so: `python authoring/raises.py` lists them.

A function says so in its docstring, with a form of "raise" or "refuse" or the name of the error.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("manyranks", "ddp_course", "ddp_exercises", "ddp_predictions")


def public_functions(node: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Yield the public functions and methods of a module."""
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name.startswith("_"):
            continue
        if isinstance(child, ast.ClassDef):
            yield from public_functions(child)
        elif isinstance(child, ast.FunctionDef):
            yield child


def errors_of(node: ast.AST) -> Iterator[str]:
    """Yield what a function raises itself, as source text; functions inside it do not count."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(child, ast.Raise) and child.exc is not None:
            yield ast.unparse(child.exc).partition("(")[0]
        yield from errors_of(child)


def silent(source: str) -> list[tuple[int, str]]:
    """Return the line and the name of each public function whose docstring is silent on errors."""
    functions = []
    for function in public_functions(ast.parse(source)):
        words = ast.get_docstring(function)
        errors = list(errors_of(function))
        if words and errors:
            forms = ("aise", "efuse", *errors)  # Their first letters may be large or small.
            if not any(form in words for form in forms):
                functions.append((function.lineno, function.name))
    return functions


def main() -> int:
    """Print the functions of all packages; return 1 if there are any, else 0."""
    count = 0
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for line, name in silent(path.read_text(encoding="utf-8")):
                place = f"{path.relative_to(ROOT)}:{line}"
                print(f"{place}: the docstring of {name} does not say what it raises, and when")
                count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
