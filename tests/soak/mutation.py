"""Break the stages line by line and see whether the tests notice: `python tests/soak/mutation.py [--count N]`.

A mutant has one small fault: a statement left out, a condition turned round, a sign or a number changed. It is killed
if a test of its file fails. Every mutant is tried in a copy of the repository. The score goes to results/mutants.json
with all that survived; what is explained there (`"why"`) keeps its explanation in the next run.
"""

import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "results" / "mutants.json"
PARTS = ["ddp_course", "tests", "authoring", "pyproject.toml", "docs", "requirements.lock"]
TESTS = {
    "stage5_bucketed.py": ["tests/test_stage5_bucketed.py", "tests/running/test_communication.py"],
    "stage6_ddp": ["tests/stage6_ddp"],
    "stage7_sharded": ["tests/stage7_sharded"],
    "stage8_pipeline.py": ["tests/test_stage8_pipeline.py"],
    "collectives": ["tests/collectives"],
}
COMMON = ["tests/stage6_ddp/test_after_errors.py", "tests/stage6_ddp/test_programs.py"]  # they look at several
TURNED = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt}
TURNED |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And}
TURNED |= {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
LEFT_OUT = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Return)


def mutants(source):
    """Yield (line, what was done, mutated source) for every fault of a file, each in a tree of its own."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    for place, node in enumerate(nodes):
        for what, change in faults(node):
            twin = copy.deepcopy(tree)
            change(list(ast.walk(twin))[place])
            yield node.lineno if hasattr(node, "lineno") else 0, what, ast.unparse(ast.fix_missing_locations(twin))


def faults(node):
    """Yield (description, function that changes such a node) for each fault that a node can have."""
    for field in ("body", "orelse", "finalbody"):
        for index, statement in enumerate(getattr(node, field, []) if isinstance(node, ast.stmt | ast.Module) else []):
            if isinstance(statement, LEFT_OUT) and not is_docstring(statement):
                yield f"line {statement.lineno} left out", left_out(field, index)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in TURNED:
        yield f"{ast.unparse(node)} turned round", lambda twin: twin.ops.__setitem__(0, TURNED[type(twin.ops[0])]())
    if isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign) and type(node.op) in TURNED:
        yield f"{ast.unparse(node)} with another operator", lambda twin: setattr(twin, "op", TURNED[type(twin.op)]())
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} turned round", lambda twin: setattr(twin, "value", not twin.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield f"{node.value} plus 1", lambda twin: setattr(twin, "value", twin.value + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"{ast.unparse(node)} without not", lambda twin: setattr(twin, "op", ast.UAdd())


def left_out(field, index):
    """A function that replaces a statement of a body by nothing."""
    return lambda twin: getattr(twin, field).__setitem__(index, ast.Pass())


def is_docstring(statement):
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def killed(copied, file, source, tests, patience):
    """Whether the tests fail, or do not end, with `source` in place of `file`."""
    before = file.read_text()
    file.write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copied), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("DDP_COURSE_TESTS", None)
    try:
        return (
            subprocess.run(command, cwd=copied, env=environment, capture_output=True, timeout=patience).returncode != 0
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(before)


def main():
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a part of the name of a stage")
    parser.add_argument("--count", type=int, help="so many mutants, chosen at random; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=900.0, help="seconds for the tests of one mutant")
    args = parser.parse_args()
    report = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    with tempfile.TemporaryDirectory(prefix="mutation_") as folder:
        copied = Path(folder)
        for part in PARTS:
            source = ROOT / part
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copied / part)
        for stage in (stage for stage in TESTS if args.only in stage):
            report[stage] = score(copied, stage, report.get(stage, {}), args)
            found = report[stage]
            print(f"{stage}: {found['killed']} of {found['mutants']} killed, {found['score']:.1%}", flush=True)
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(one["score"] >= 0.95 for one in report.values()) else 1


def score(copied, stage, before, args):
    """Try the mutants of a stage; return the numbers and the survivors."""
    folder = copied / "ddp_course" / stage
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]
    everything = [(file, *mutant) for file in files for mutant in mutants(file.read_text())]
    chosen = everything if args.count is None else random.Random(args.seed).sample(everything, args.count)
    explained = {(one["file"], one["what"]): one.get("why", "") for one in before.get("survivors", [])}
    survivors = []
    for file, line, what, source in chosen:
        name = file.relative_to(copied).as_posix()
        if not killed(copied, file, source, [*TESTS[stage], *COMMON], args.patience):
            survivors.append({"file": name, "line": line, "what": what, "why": explained.get((name, what), "")})
            print(f"survived: {name}:{line} {what}", flush=True)
    good = len(chosen) - len(survivors)
    numbers = {"mutants": len(chosen), "of": len(everything), "killed": good, "score": good / max(1, len(chosen))}
    return {**numbers, "survivors": survivors}


if __name__ == "__main__":
    sys.exit(main())
