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
PACKAGES = {  # A package or a part of one may weigh so much, with 2 % of air for mended faults.
    "manyranks": 60_000,  # 11,800 of it rehearse, 4,000 run whole programs in virtual time.
    # Of this 3,000 guard models that change after they were wrapped or split, 500 are a backend.
    # 1,800 take a learner's own model, data, loss and optimizer.
    "ddp_course": 47_000,
    # 1,200 compare a learner's own training with the stages, 800 ask about earlier lessons; 300
    # hold virtual time against real sockets, 300 say where a cell stopped and what still runs.
    "ddp_course/lab": 30_500,
    # 5,000 of it find odd answers, ask about them and show a class; 700 are certificates.
    "ddp_exercises": 30_100,
    "ddp_predictions": 11_000,
}
HEAVIEST_ROOM = 15_000  # No room of the library may weigh more.
DENSEST = 11.0  # A room may have so many nodes per line of code.
SMALLEST = 60  # A room with fewer lines of code has no density worth a limit.


def measure(text):
    """Return the counts of one file: nodes of the syntax tree, lines of code, and comments."""
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
    """Return the counts by room: a room is a folder of a package, with the folders inside it."""
    counts = {}
    for package in {name.split("/")[0]: None for name in PACKAGES}:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).parts
            room = "/".join(parts[:2]) if len(parts) > 2 else package
            counts.setdefault(room, Counter()).update(measure(path.read_text(encoding="utf-8")))
    return counts


def weight_of(name, totals):
    """Return the nodes of a package without those of its parts that have a limit of their own."""
    parts = [part for part in PACKAGES if part.startswith(f"{name}/")]
    return sum(
        nodes
        for room, nodes in totals.items()
        if (room == name or room.startswith(f"{name}/")) and room not in parts
    )


def main():
    """Print every room with its weight; return 1 if something is beyond its limit, else 0."""
    beyond = False
    totals = {}
    print(f"{'room':<32}{'nodes':>9}{'per line':>10}{'comments per 100 lines':>25}")
    for room, count in rooms().items():
        totals[room] = count["nodes"]
        density = count["nodes"] / max(1, count["code"])
        comments = 100 * count["comments"] / max(1, count["code"])
        too_dense = count["code"] >= SMALLEST and density > DENSEST
        too_large = room.startswith("manyranks") and count["nodes"] > HEAVIEST_ROOM
        beyond |= too_dense or too_large
        mark = f"   more than {DENSEST} per line" if too_dense else ""
        mark += f"   more than {HEAVIEST_ROOM:,}" if too_large else ""
        print(f"{room:<32}{count['nodes']:>9,}{density:>10.1f}{comments:>25.1f}{mark}")
    for package, limit in PACKAGES.items():
        weight = weight_of(package, totals)
        too_heavy = weight > limit
        beyond |= too_heavy
        mark = "   TOO HEAVY" if too_heavy else ""
        print(f"{package:<32}{weight:>9,} of {limit:,}{mark}")
    return int(beyond)


if __name__ == "__main__":
    sys.exit(main())
