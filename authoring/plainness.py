"""Rules of plain code that ruff does not have: `python authoring/plainness.py` prints each break.

tests/authoring/test_plainness.py has an example of each break, and of what is meant.
"""

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (
    "manyranks",
    "ddp_course",
    "ddp_exercises",
    "ddp_predictions",
    "notebooks",
    "exercises/checks",
    "benchmarks",
    "authoring",
    "tests",
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DISPLAYS = (ast.List, ast.Tuple, ast.Set, ast.Dict)
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
OPENING = ("(", "[", "{")
CLOSING = (")", "]", "}")
WIDTH = 100  # as in pyproject.toml
Break = tuple[ast.AST, str]  # The node that breaks a rule, and the words of the rule.


class Found(NamedTuple):
    """A break of a rule: where it is, and the words of the rule."""

    path: str
    line: int
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}"


def parents_of(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    """Return the parent of each node."""
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def names_in(node: ast.AST) -> set[str]:
    """Return every name, attribute and item that an expression reads or writes, as source text."""
    places = (ast.Name, ast.Attribute, ast.Subscript)
    return {ast.unparse(each) for each in ast.walk(node) if isinstance(each, places)}


def assignments_side_by_side(tree: ast.AST) -> Iterator[Break]:
    """Yield each `a, b = x, y`, unless a value needs what a name beside it was before (`b, a`)."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        for target in node.targets:
            if isinstance(target, ast.Tuple):
                written = {ast.unparse(name) for name in target.elts}
                if not written & names_in(node.value):
                    yield node, "one assignment a line: these values do not belong together"


def comprehensions_inside(tree: ast.AST) -> Iterator[Break]:
    """Yield each comprehension inside a comprehension."""
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            inside = list(ast.walk(node))[1:]  # The first one is the node itself.
            if any(isinstance(each, COMPREHENSIONS) for each in inside):
                yield node, "a comprehension inside a comprehension: name it, or write a loop"


def conditions_inside(tree: ast.AST) -> Iterator[Break]:
    """Yield each `x if c else y` that is not a whole assignment, argument or return."""
    parents = parents_of(tree)
    assignments = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)
    allowed = (*assignments, ast.Return, ast.keyword, ast.Lambda)
    rule = "a conditional expression inside an expression: write an if, or give it a name"
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            parent = parents[node]
            is_argument = isinstance(parent, ast.Call) and node in parent.args
            if not is_argument and not isinstance(parent, allowed):
                yield node, rule


def is_boolean(node: ast.AST) -> bool:
    """Return whether an expression is a comparison, a `not`, or an `and` or `or` of these."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.BoolOp):
        return all(map(is_boolean, node.values))
    return isinstance(node, ast.Compare)


def is_words(node: ast.AST) -> bool:
    """Return whether an expression is a text with words in it.

    A text of up to three letters may be a mark or a unit.
    """
    if isinstance(node, ast.JoinedStr):
        return True
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    return len(node.value) > 3 and any(map(str.isalpha, node.value))


def booleans_as_numbers(tree: ast.AST) -> Iterator[Break]:
    """Yield each boolean that is used as a number, as in `text * condition` or `1 + (a > b)`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ARITHMETIC):
            continue
        sides = [node.left, node.right]
        is_product = isinstance(node.op, ast.Mult)
        # Words times what is no number, written out: that is probably a condition.
        repeats = is_product and any(map(is_words, sides)) and not any(map(is_count, sides))
        if any(map(is_boolean, sides)) or repeats:
            yield node, "a boolean as a number: write an if"


def is_count(node: ast.AST) -> bool:
    """Return whether an expression is a number, written out."""
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def is_at_most_one(node: ast.AST) -> bool:
    """Return whether an expression has at most one element: `[x]`, `(x,)`, `x[:1]`, `x[-1:]`."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return len(node.elts) == 1 and not isinstance(node.elts[0], ast.Starred)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        lower = node.slice.lower and ast.unparse(node.slice.lower)
        upper = node.slice.upper and ast.unparse(node.slice.upper)
        return (lower, upper) in ((None, "1"), ("-1", None))
    return False


def loops_over_one(tree: ast.AST) -> Iterator[Break]:
    """Yield each loop over one element, and each over letters of which none is used."""
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension):
            if is_at_most_one(node.iter):
                yield node.iter, "a loop over one element: write an assignment, or an if"
            elif isinstance(node.iter, ast.Constant) and ast.unparse(node.target) == "_":
                yield node.iter, "a loop over letters that are not used: write range"


def iterators_repeated(tree: ast.AST) -> Iterator[Break]:
    """Yield each `[iter(x)] * n`."""
    for node in ast.walk(tree):
        is_product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
        if is_product and ast.unparse(node.left).startswith("[iter("):
            yield node, "one iterator many times: write a function that cuts into batches"


def named_tuples(tree: ast.AST) -> set[str]:
    """Return the names of the classes in a module that are NamedTuples."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = map(ast.unparse, node.bases)
            if any(base.endswith("NamedTuple") for base in bases):
                names.add(node.name)
    return names


def called(node: ast.AST) -> str:
    """Return the name of the function that a call calls; no name if this is no call."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def variables_of(tree: ast.AST, classes: set[str]) -> set[str]:
    """Return the names that have one of these classes, by annotation or by assignment of a call."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            if node.annotation and ast.unparse(node.annotation) in classes:
                names.add(node.arg)
        elif isinstance(node, ast.Assign) and called(node.value) in classes:
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def numbers_for_fields(tree: ast.AST) -> Iterator[Break]:
    """Yield each `each[2]` where `each` is a NamedTuple of this module, and each such `self[2]`."""
    classes = named_tuples(tree)
    variables = variables_of(tree, classes)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in classes:
            yield from indexed(node, {"self"})
    yield from indexed(tree, variables)


def indexed(tree: ast.AST, variables: set[str]) -> Iterator[Break]:
    """Yield each place where one of these variables has a number for its index."""
    for node in ast.walk(tree):
        numbered = isinstance(node, ast.Subscript) and is_count(node.slice)
        if numbered and ast.unparse(node.value) in variables:
            yield node, "a number as the index of a NamedTuple: write the field's name"


def is_data(node: ast.AST) -> bool:
    """Return whether a statement or a decorator holds a table: a display with several rows."""
    for each in ast.walk(node):
        if isinstance(each, DISPLAYS):
            rows = each.keys if isinstance(each, ast.Dict) else each.elts
            if len(rows) >= 2:
                return True
    return False


def layouts_by_hand(tree: ast.AST, source: str) -> Iterator[Break]:
    """Yield each `fmt: skip` and `fmt: off` where there is no table of data."""
    ends: dict[int, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr) and not isinstance(node, ast.Name | ast.Constant):
            ends.setdefault(node.end_lineno or 0, []).append(node)
    rule = "fmt: skip without a table of data: let ruff lay it out"
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_comment = token.type == tokenize.COMMENT
        if is_comment and token.string.startswith(("# fmt: skip", "# fmt: off")):
            line, _ = token.start
            if not any(map(is_data, ends.get(line, []))):
                yield ast.Pass(lineno=line), rule  # A comment is no node: any would do.


def brackets_broken(source: str) -> Iterator[Break]:
    """Yield each bracket over several rows that would fit in one, were it not for a comment.

    A comma before the closing bracket says that its author wants a row for each element.
    """
    rows = source.splitlines()
    commented = set()
    opened: list[int] = []  # the rows of the brackets that are open
    pairs = []  # the first and the last row of each bracket
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            commented.add(row)
            rows[row - 1] = rows[row - 1][:column].rstrip()
        elif token.type == tokenize.OP and token.string in OPENING:
            opened.append(row)
        elif token.type == tokenize.OP and token.string in CLOSING:
            first = opened.pop()
            if before != ",":
                pairs.append((first, row))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.string
    rule = "a comment breaks a bracket: write it above the statement"
    for first, last in pairs:
        has_comment = commented.intersection(range(first, last + 1))
        if first < last and has_comment and len(in_one_row(rows[first - 1 : last])) <= WIDTH:
            yield ast.Pass(lineno=first), rule  # A bracket is no node: any would do.


def in_one_row(rows: list[str]) -> str:
    """Return the rows of a bracket joined to one."""
    text = rows[0]
    for row in filter(None, map(str.strip, rows[1:])):
        touching = text.endswith(OPENING) or row.startswith(CLOSING)
        text += row if touching else f" {row}"
    return text


RULES = (
    assignments_side_by_side,
    comprehensions_inside,
    conditions_inside,
    booleans_as_numbers,
    loops_over_one,
    iterators_repeated,
    numbers_for_fields,
)


def breaks(source: str, path: str = "") -> list[Found]:
    """Return every break of a rule in the source of one module, by line."""
    tree = ast.parse(source)
    broken = [pair for rule in RULES for pair in rule(tree)]
    broken += layouts_by_hand(tree, source)
    broken += brackets_broken(source)
    return sorted(Found(path, node.lineno, words) for node, words in broken)


def files(root: Path = ROOT) -> list[Path]:
    """Return the Python files of all rooms, lessons too: learners read their cells most."""
    return [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]


def main(arguments: list[str] | None = None) -> int:
    """Print the breaks of the rules; return 1 if there are any, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help="only these files")
    options = parser.parse_args(arguments)
    found = []
    for path in map(Path.resolve, options.paths or files()):
        name = path.relative_to(ROOT).as_posix()
        found += breaks(path.read_text(encoding="utf-8"), name)
    for each in found:
        print(each)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
