"""Print all modules, each with its first line: `python authoring/modules.py [FOLDER]`."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("manyranks", "ddp_course", "ddp_exercises", "ddp_predictions")


def rows_of(folder: str) -> list[str]:
    """Return a line for each module in a folder: its path, and its docstring's first sentence."""
    rows = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first = " ".join(docstring.split("\n\n")[0].split())
        rows.append(f"{path.relative_to(ROOT).as_posix():<48} {first}")
    return rows


if __name__ == "__main__":
    for name in sys.argv[1:] or PACKAGES:
        print("\n".join(rows_of(name)))
