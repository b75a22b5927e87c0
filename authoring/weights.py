"""What there is to understand in each room: `python authoring/weights.py` prints the table.

The weight of a file is the number of nodes of its syntax tree. Width and line breaks do not change
it: a room becomes lighter when a feature goes or two become one. Nodes per line of code say how
much a reader meets at once. Beyond a limit of a package or of a line, the exit code is 1.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {  # A package may weigh so much.
    "ddp_course": 114_284,
    "ddp_grading": 14_727,
    "ddp_predictions": 10_809,
}
DENSEST = 11.0  # A room may have so many nodes per line of code.
SMALLEST = 60  # A room with fewer lines of code has no density worth a limit.


def measure(text):
    """Counts of one file: nodes of the syntax tree, lines of code, and comments."""
    tree = ast.parse(text)
    docstrings = set()  # These are the lines of docstrings, which are no code.
    for node in ast.walk(tree):
        may_have_one = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if may_have_one and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            docstrings.update(range(docstring.lineno, docstring.end_lineno + 1))
    code = set()
    comments = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments += 1
        elif token.string.strip():
            code.update(range(token.start[0], token.end[0] + 1))
    nodes = sum(1 for _ in ast.walk(tree))
    return Counter(nodes=nodes, code=len(code - docstrings), comments=comments)


def rooms(root=ROOT):
    """Counts by room: a room is a folder of a package, with the folders inside it."""
    counts = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).parts
            room = "/".join(parts[:2]) if len(parts) > 2 else package
            counts.setdefault(room, Counter()).update(measure(path.read_text(encoding="utf-8")))
    return counts


def main():
    """Print every room with its weight; return 1 if something is beyond its limit, else 0."""
    beyond = False
    totals = Counter()
    print(f"{'room':<32}{'nodes':>9}{'per line':>10}{'comments per 100 lines':>25}")
    for room, count in rooms().items():
        totals[room.split("/")[0]] += count["nodes"]
        density = count["nodes"] / max(1, count["code"])
        comments = 100 * count["comments"] / max(1, count["code"])
        too_dense = count["code"] >= SMALLEST and density > DENSEST
        beyond |= too_dense
        mark = f"   more than {DENSEST} per line" if too_dense else ""
        print(f"{room:<32}{count['nodes']:>9,}{density:>10.1f}{comments:>25.1f}{mark}")
    for package, limit in PACKAGES.items():
        too_heavy = totals[package] > limit
        beyond |= too_heavy
        mark = "   TOO HEAVY" if too_heavy else ""
        print(f"{package:<32}{totals[package]:>9,} of {limit:,}{mark}")
    return int(beyond)


if __name__ == "__main__":
    sys.exit(main())
