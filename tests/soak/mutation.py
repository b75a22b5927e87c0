"""Break the course by small faults and see whether its tests notice.

Call it as `python tests/soak/mutation.py --count 30`. Run `pip install cosmic-ray` first. Its
operators make the mutants: an operator or a number is changed, a condition is negated, a decorator
or a loop's body is left out. `--count` mutants of each file are drawn. Each is put into a copy of
this folder, and counts as killed if the file's tests fail or do not end in time. Prints the share
of killed mutants and the diffs of the survivors; `--only stage7` takes the files with this word in
their path. The results of each file are kept in results/mutants.json.
"""

import argparse
import ast
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from touched import named_like

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "results/mutants.json"
TESTS = {  # Each pattern names the files that the tests beside it check.
    "ddp_course/collectives/*.py": "tests/collectives",
    "ddp_course/stage4_*.py": "tests/test_stage4_ring.py",
    "ddp_course/stage5_*.py": "tests/test_stage5_bucketed.py",
    "ddp_course/stage6_ddp/*.py": "tests/stage6_ddp",
    "ddp_course/stage7_sharded/*.py": "tests/stage7_sharded",
    "ddp_course/stage8_pipeline/*.py": (
        "tests/test_stage8_pipeline.py tests/stage7_sharded/test_stage7_programs.py"
    ),
    "ddp_course/stage9_*.py": "tests/test_stage9_tensor.py",
    # A module of these has a file of tests with its name, or the tests of its folder.
    "ddp_course/lab/measuring/*.py": None,
    "manyranks/devices/*.py": None,
    "manyranks/launching/stacks.py": None,
    "ddp_course/lab/showing/*.py": None,
    "ddp_exercises/grading/comments.py": "tests/exercises/test_comments.py",
    "ddp_exercises/grading/gradebooks.py": "tests/exercises/test_gradebooks.py",
    "ddp_exercises/grading/people.py": "tests/exercises/test_people.py",
    "ddp_exercises/grading/tables.py": (
        "tests/exercises/test_people.py tests/exercises/test_gradebooks.py"
    ),
    "ddp_exercises/grading/re*.py": (
        "tests/exercises/test_grade_reports.py tests/exercises/test_gradebooks.py"
    ),
}
MARKS = "not slow and not weekly"
CONFIG = """[cosmic-ray]
module-path = "{module}"
timeout = {seconds}
excluded-modules = []
test-command = "{python} -m pytest -x -q -m '{marks}' -p no:cacheprovider {tests}"
[cosmic-ray.distributor]
name = "local"
"""


def tests_of_modules():
    """Return {module: the tests that check it}; of several fitting patterns the last one counts."""
    tests_of = {}
    for pattern, tests in TESTS.items():
        for file in sorted(ROOT.glob(pattern)):
            module = str(file.relative_to(ROOT))
            tests_of[module] = tests or named_like(module)
    return tests_of


def annotations_of(source):
    """Return (begin, end) of each annotation, both as (line, column).

    A fault there changes nothing.
    """
    places = []
    for node in ast.walk(ast.parse(source)):
        for name in ("annotation", "returns"):
            part = getattr(node, name, None)
            if part is not None:
                begin = (part.lineno, part.col_offset)
                places.append((begin, (part.end_lineno, part.end_col_offset)))
    return places


def keep_some(table, annotations, count, seed):
    """Draw `count` mutants from a session's table, none in an annotation; delete the others."""
    place = "start_pos_row, start_pos_col"
    order = "operator_name, operator_args, occurrence"  # The job_id is another number every time.
    jobs = []
    others = []
    for job, *at in table.execute(f"SELECT job_id, {place} FROM mutation_specs ORDER BY {order}"):
        in_annotation = any(begin <= tuple(at) <= end for begin, end in annotations)
        if in_annotation:
            others.append((job,))
        else:
            jobs.append((job,))
    random.Random(seed).shuffle(jobs)
    for name in ("mutation_specs", "work_items"):
        table.executemany(f"DELETE FROM {name} WHERE job_id = ?", jobs[count:] + others)


def mutate(copy, module, tests, count, seed, seconds):
    """Try `count` mutants of one file; return (how many were tried, the diffs of survivors)."""
    config = copy / "mutation.toml"
    session = copy / "mutation.sqlite"
    config.write_text(
        CONFIG.format(
            module=module, seconds=seconds, python=sys.executable, marks=MARKS, tests=tests
        )
    )
    session.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    def cosmic_ray(*arguments):
        return subprocess.run(
            arguments, cwd=copy, env=environment, check=True, capture_output=True, text=True
        ).stdout

    # The run stops if the tests fail without a mutant.
    cosmic_ray("cosmic-ray", "baseline", config.name)
    cosmic_ray("cosmic-ray", "init", config.name, session.name)
    with sqlite3.connect(session) as table:
        keep_some(table, annotations_of((copy / module).read_text(encoding="utf-8")), count, seed)
    cosmic_ray("cosmic-ray", "exec", config.name, session.name)
    with sqlite3.connect(session) as table:
        results = table.execute("SELECT test_outcome, diff FROM work_results").fetchall()
    survivors = [diff for outcome, diff in results if "survived" in outcome.lower()]
    print(
        f"{module}: {len(results) - len(survivors)} of {len(results)} killed",
        *survivors,
        sep="\n",
        flush=True,
    )
    return len(results), survivors


def main():
    """Try mutants of all files, or of some, in a copy of the folder."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--count", type=int, default=30, help="mutants of each file (default 30)")
    options.add_argument(
        "--seconds", type=float, default=120, help="until the tests count as hung (default 120)"
    )
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", default="")
    settings = options.parse_args()
    before = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    # Of a file that is gone nothing is reported.
    report = {module: row for module, row in before.items() if (ROOT / module).exists()}
    with tempfile.TemporaryDirectory(prefix="ddp_course_mutation_") as folder:
        copy = Path(folder, "copy")
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "work")
        )
        for module, tests in tests_of_modules().items():
            if settings.only in module:
                tried, survivors = mutate(
                    copy, module, tests, settings.count, settings.seed, settings.seconds
                )
                report[module] = {
                    "tried": tried,
                    "killed": tried - len(survivors),
                    "survivors": survivors,
                }
                REPORT.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    tried = sum(row["tried"] for row in report.values())
    killed = sum(row["killed"] for row in report.values())
    print(f"{killed} of {tried} mutants in {REPORT.name} killed, {killed / tried:.1%}")


if __name__ == "__main__":
    main()
