"""The promises about the package as a whole: imports point one way, and functions are short enough to be read."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(ROOT.glob("ddp_course/**/*.py"))


def lint_imports(folder):
    """What import-linter says of the package in `folder`, by the contracts in its pyproject.toml."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A copy of the package's modules and of the contracts."""
    folder = tmp_path_factory.mktemp("house")
    shutil.copytree(ROOT / "ddp_course", folder / "ddp_course", ignore=shutil.ignore_patterns("__pycache__", "*.ini"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_imports_point_one_way():
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "module, line, shown",
    [
        ("running/wire.py", "from ..measuring import theory", "ddp_course.running.wire -> ddp_course.measuring.theory"),
        ("stage4_ring.py", "from .stage5_bucketed import BucketedDDP", "ddp_course.stage4_ring -> ddp_course.stage5"),
        ("measuring/timing.py", "def late():\n    from ..commands import doctor", "-> ddp_course.commands.doctor"),
        ("grading/report.py", "from ..showing import source", "ddp_course.grading.report -> ddp_course.showing.source"),
        ("running/launching/rank.py", "from ..links import throttle", "-> ddp_course.running.links.throttle"),
        ("leftovers.py", "", "leftovers"),
        ("running/leftovers.py", "", "leftovers"),
    ],
)
def test_an_import_back_and_a_module_without_a_place_are_refused(house, module, line, shown):
    path = house / "ddp_course" / module
    before = path.read_text() if path.exists() else None
    path.write_text(f"{before or ''}\n{line}\n")
    try:
        done = lint_imports(house)
    finally:
        path.unlink() if before is None else path.write_text(before)
    assert done.returncode == 1 and shown in done.stdout, done.stdout


def long_functions(source, most=40):
    """Names of the functions that have more than `most` lines."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [node.name for node in functions if node.end_lineno - node.lineno >= most]


def test_no_function_is_longer_than_a_screen():
    assert long_functions("def f():\n" + "    pass\n" * 40) == ["f"]
    assert not [path.relative_to(ROOT).as_posix() for path in MODULES if long_functions(path.read_text())]


def defined(source, kind):
    """Names of the classes or functions (`kind` of node) that `source` defines, at any depth."""
    return [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, kind)]


TWICE = {  # classes that share a name
    "Bucket": "gradients that travel together, in stage 5 and in stage 6",
    "Part": "of a benchmark, and of a task",
    "Switch": "what stands between the ranks, in the throttled wire and in the grader",
}
RUN = {  # who is called `run` beside the commands
    "measuring/comparison.py": "trains with every stage: lessons call it",
    "train.py": "trains with one stage: lessons call it",
    "stage8_pipeline.py": "a rank's instructions for one batch",
    "grading/tasks/exercise01.py": "a training loop as learners get it wrong",
}


def test_a_word_has_one_meaning():
    """No two classes share a name, and what is called `run` is a command, or trains."""
    assert defined("class A:\n    def run(self):\n        class B: ...", ast.ClassDef) == ["A", "B"]
    sources = {path.relative_to(ROOT / "ddp_course").as_posix(): path.read_text() for path in MODULES}
    classes = [name for source in sources.values() for name in set(defined(source, ast.ClassDef))]
    assert {name for name in classes if classes.count(name) > 1} == set(TWICE)
    runs = {module for module, source in sources.items() if "run" in defined(source, ast.FunctionDef)}
    assert {module for module in runs if not module.startswith("commands/")} == set(RUN)


REASONS = {  # of test modules that mirror no module of the package
    "authoring": "authoring/ is beside the package",
    "grading/test_exercises": "all tasks against all wrong answers",
    "grading/test_grade_attacks": "the whole grader under attack",
    "grading/test_grade_reports": "the whole grader and its reports",
    "grading/test_mistakes": "whole notebooks with a mistake each",
    "grading/test_sealed": "answers that look for what would answer",
    "grading/test_verdicts": "verdicts of all tasks",
    "running/launching/test_launch_kernel": "launch from a notebook's kernel",
    "running/launching/test_launch_script": "launch from a script",
    "running/launching/test_launch_spawn": "launch where nothing can be forked",
    "running/links/test_links_end": "how links end, whatever ends them",
    "running/test_faults": "training under faults",
    "running/test_many_machines": "several machines, played by virtual hosts",
    "running/test_nccl_rules": "NCCL's rules, kept by all that communicates",
    "showing/test_widgets_browser": "the widgets in Chromium",
    "stage6_ddp/test_after_errors": "stages 5 and 6 after an error",
    "stage6_ddp/test_programs": "random programs for stages 5 and 6",
    "stage7_sharded/test_odd_cases": "models and settings that stages 7 and 8 take or refuse",
    "stage7_sharded/test_stage7_after_errors": "stages 7, 7o and 8 after an error",
    "stage7_sharded/test_stage7_programs": "random programs for stages 7, 7o and 8",
    "test_contributing": "docs/CONTRIBUTING.md",
    "test_docs": "README.md and docs/",
    "test_hosting": "what runs the course elsewhere: binder, dev containers, workflows",
    "test_house": "the package as a whole",
    "test_notebooks": "the lessons",
    "test_packaging": "pyproject.toml, the lock, the Makefile",
    "torch_suite": "PyTorch's own tests of DDP",
}


def mirrors(test, places):
    """Whether the test module `test` is called like one of the modules and folders `places`, in the same folder."""
    top, name = test.parent == Path(), test.name.removeprefix("test_")
    here = {place for place in places if place.parent == test.parent or (place == test.parent and not top)}
    below = set() if top else {place for place in places if test.parent in place.parents}
    return any(name == place.name or name.endswith(f"_{place.name}") for place in here | below)


def test_every_test_module_mirrors_a_module_or_has_a_reason():
    modules = [path.relative_to(ROOT / "ddp_course") for path in MODULES]
    places = {path.with_suffix("") for path in modules} | {path.parent for path in modules}
    tests = [path.relative_to(ROOT / "tests").with_suffix("") for path in ROOT.glob("tests/**/test_*.py")]
    alone = {test for test in tests if not mirrors(test, places)}
    assert not mirrors(Path("running/test_nothing"), places) and mirrors(Path("running/test_wire"), places)
    assert {test for test in alone if not {test.as_posix(), test.parts[0]} & REASONS.keys()} == set()
    assert not {reason for reason in REASONS if not any(reason in (test.as_posix(), test.parts[0]) for test in alone)}


ELSEWHERE = {  # modules without a test module of their own name, by the test module that holds them
    "commands/bench/test_bench_harness": "commands/bench/{devices,grade,launch,ring,sharded,simulator,training}",
    "commands/test_compare": "measuring/{comparison,recording} running/files",
    "grading/test_exercises": "grading/check_cell grading/tasks/{diagnose,forbidden}",
    "grading/test_grade_attacks": "grading/{grade,nbval_run,sandbox,service,submission,zygote}",
    "grading/test_grade_reports": "commands/grade grading/{plain,report}",
    "grading/test_sealed": "grading/{answering,examiner,frames,harness,probing}",
    "grading/test_verdicts": "commands/check grading/results",
    "measuring/test_claims": "commands/claims",
    "measuring/test_simulate": "commands/simulate",
    "measuring/test_theory": "measuring/timing",
    "running/devices/test_device": "running/devices/{capacity,presets,roofline}",
    "running/launching/test_hosts": "commands/hosts running/launching/engine",
    "running/launching/test_launch": "running/launching/{agent,channel,forked,launched,limits,progress,server,setting}",
    "running/launching/test_launch_spawn": "running/launching/{spare,spares,spawned}",
    "running/launching/test_magic": "running/launching/cell",
    "running/links/test_links": "running/trial",
    "running/test_faults": "measuring/stragglers running/flight_recorder",
    "test_docs": "errors",
    "test_train_script": "train wrapping",
}


def spelt_out(modules):
    """The paths in "a/{b,c} d"."""
    for entry in modules.split():
        folder, _, names = entry.partition("{")
        yield from (Path(folder + name) for name in names.rstrip("}").split(","))


def test_every_module_has_its_test_or_is_held_by_another():
    modules = {path.relative_to(ROOT / "ddp_course").with_suffix("") for path in MODULES if path.stem != "__init__"}
    tests = [path.relative_to(ROOT / "tests").with_suffix("") for path in ROOT.glob("tests/**/test_*.py")]
    own = {module for module in modules if any(mirrors(test, {module, module.parent}) for test in tests)}
    own |= {Path("grading/tasks", path.stem) for path in ROOT.glob("tests/wrong_answers/*.py")}
    held = [module for listed in ELSEWHERE.values() for module in spelt_out(listed)]
    assert Path("running/wire") in own and Path("stage6_ddp/reducer") in own and Path("train") not in own
    assert sorted(modules - own) == sorted(held)
    assert {test for test in ELSEWHERE if Path(test) not in tests} == set()
