"""Break the stages line by line and see whether the tests notice: `python tests/soak/mutation.py [--count N]`.

A mutant has one small fault: a statement left out, a condition turned round, a sign or a number changed. It is killed
if a test of its file fails, or if the tests do not end (counted as "hung", too). Every mutant is tried in a copy of the
repository, in an order drawn once, so that a run goes on where the last one ended as long as the sources are the same.
The score goes to results/mutants.json with all that survived; what is explained there (`"why"`) keeps its explanation.
Run it on a machine that does nothing else: tests that are short of time fail without a fault.
"""

import argparse
import ast
import copy
import hashlib
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
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


def verdict(copied, mutant, tests, patience):
    """ "killed" if the tests fail with the mutant's source in its file, "hung" if they do not end, else "survived"."""
    file = copied / mutant["file"]
    before = file.read_text()
    file.write_text(mutant["source"])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copied), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("DDP_COURSE_TESTS", None)
    try:
        ended = subprocess.run(command, cwd=copied, env=environment, capture_output=True, timeout=patience)
        return "killed" if ended.returncode else "survived"
    except subprocess.TimeoutExpired:
        return "hung"
    finally:
        file.write_text(before)


def all_of(stage):
    """Every mutant of a stage in an order drawn once, and a digest of the sources that they are made from."""
    folder = ROOT / "ddp_course" / stage
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]
    everything = [
        {"file": file.relative_to(ROOT).as_posix(), "line": line, "what": what, "source": source}
        for file in files
        for line, what, source in mutants(file.read_text())
    ]
    random.Random(0).shuffle(everything)
    return everything, hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def score(copies, stage, before, args):
    """Try the next mutants of a stage; return the numbers and the survivors, with those of earlier runs."""
    everything, digest = all_of(stage)
    told = {(one["file"], one["what"]): one["why"] for one in before.get("survivors", [])}
    if before.get("sources") != digest:
        before = {}
    tried, survivors = before.get("tried", 0), before.get("survivors", [])
    chosen = everything[tried : None if args.count is None else tried + args.count]

    def attempt(mutant):
        copied = copies.get()
        try:
            return mutant, verdict(copied, mutant, [*TESTS[stage], *COMMON], args.patience)
        finally:
            copies.put(copied)

    sound = {**everything[0], "source": (ROOT / everything[0]["file"]).read_text()}
    if attempt(sound)[1] != "survived":
        raise SystemExit(f"the tests of {stage} fail, or take too long, without any fault: nothing can be said")
    with ThreadPoolExecutor(args.jobs) as pool:
        ended = list(pool.map(attempt, chosen))
    for mutant, found in ended:
        if found == "survived":
            named = {key: mutant[key] for key in ("file", "line", "what")}
            survivors.append({**named, "why": told.get((mutant["file"], mutant["what"]), "")})
            print("survived: {file}:{line} {what}".format(**named), flush=True)
    tried += len(chosen)
    hung = before.get("hung", 0) + sum(found == "hung" for _, found in ended)
    good = (tried - len(survivors)) / max(1, tried)
    numbers = {"of": len(everything), "tried": tried, "killed": tried - len(survivors), "hung": hung, "score": good}
    return {"sources": digest, **numbers, "survivors": survivors}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a part of the name of a stage")
    parser.add_argument("--count", type=int, help="so many more mutants of each stage; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="mutants beside each other")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for the tests of one mutant")
    args = parser.parse_args()
    report = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    with tempfile.TemporaryDirectory(prefix="mutation_") as folder:
        copies = queue.SimpleQueue()
        for number in range(args.jobs):
            for part in PARTS:
                source, target = ROOT / part, Path(folder, str(number), part)
                target.parent.mkdir(exist_ok=True)
                (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
            copies.put(Path(folder, str(number)))
        for stage in (stage for stage in TESTS if args.only in stage):
            found = report[stage] = score(copies, stage, report.get(stage, {}), args)
            print(f"{stage}: {found['killed']} of {found['tried']} killed, {found['score']:.1%}", flush=True)
            REPORT.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(one["score"] >= 0.95 for one in report.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
