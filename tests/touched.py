"""Which tests a change touches: `python tests/touched.py REVISION` prints their files and folders.

A module is tested by the file or folder of tests with its name: `ddp_course/wire.py` by
tests/test_wire.py, and where there is none by the nearest folder: `manyranks/launching/rank.py` by
tests/manyranks/launching. The table has what a name alone does not say.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROMISES = "tests/test_house.py tests/test_ladder.py"
ALSO = {  # the first prefix that fits counts, beside the tests that the name says
    "ddp_course/stage6_ddp": "tests/stage6_ddp tests/torch_suite",
    "ddp_course/stage": "tests/test_ladder.py tests/test_notebooks.py",
    "manyranks/launching": "tests/manyranks/launching tests/test_faults.py",
    "ddp_exercises": "tests/exercises",
    "ddp_predictions": "tests/predictions",
    "manyranks/clocks": "tests/lab/measuring/test_comparison.py",
    "manyranks/links": "tests/test_stages_over_links.py",
    "manyranks/devices": "tests/test_stages_on_devices.py",
    "manyranks/auditing": "tests/test_script.py",
    "manyranks/joining": "tests/test_train_script.py",
    "manyranks/this_torch": "tests/test_stages_without_private_parts.py",
    "ddp_course/base/torch_private": "tests/test_stages_without_private_parts.py",
    "ddp_course/lab/measuring": "tests/lab/measuring tests/lab/commands",
    "ddp_course/base/errors": "tests/test_docs.py tests/test_checkpoint.py",
    "manyranks/errors": "tests/manyranks/launching tests/test_faults.py",
    "ddp_course/collectives": (
        "tests/stage6_ddp/test_stage6_ddp.py tests/stage6_ddp/test_programs.py"
        " tests/test_every_order_of_stages.py tests/lab/measuring/test_theory.py"
        " tests/test_contributing.py"
    ),
    "ddp_course/base/missing": (
        "tests/test_stage3_paramserver.py tests/test_stage9_right_or_refused.py"
    ),
    "ddp_course/base/replicas": "tests/stage7_sharded tests/test_stage9_right_or_refused.py",
    "ddp_course/before_bucketing": "tests/test_stage5_bucketed.py",
    "ddp_course/same_model": "tests/test_stage5_bucketed.py tests/stage6_ddp tests/stage7_sharded",
    "ddp_course/mesh": "tests/test_stage9_tensor.py tests/test_stage8_pipeline.py",
    "ddp_course/variants": "tests/lab/commands/test_compare.py",
    "ddp_course/train": "tests/test_train_script.py",
    "ddp_course/script": "tests/test_train_script.py",
    "ddp_course/base/options": "tests/lab/commands/test_numbers.py",
    "ddp_course/lab": "tests/lab/commands tests/exercises",
    "exercises": "tests/exercises tests/test_clinic.py",
    "authoring/lessons": "tests/test_notebooks.py",
    "notebooks": "tests/test_notebooks.py",
    "docs": "tests/test_docs.py tests/authoring",
    "setup.py": "tests/test_packaging.py",
    "pyproject.toml": "tests/test_packaging.py",
}
PACKAGES = ("manyranks", "ddp_course", "ddp_exercises", "ddp_predictions")


def named_like(path: str) -> str | None:
    """Return the test file or folder with the name of a module, or of the nearest folder around."""
    parts = list(Path(path).with_suffix("").parts)
    if parts[0] == "ddp_course":
        parts = parts[1:]
    while parts:
        folder = Path("tests", *parts)
        file = Path("tests", *parts[:-1], f"test_{parts[-1]}.py")
        for place in (file, folder):
            if (ROOT / place).exists():
                return place.as_posix()
        parts = parts[:-1]
    return None


def touched(paths: list[str]) -> list[str]:
    """Return the tests for these changed paths, each once, in order."""
    chosen: dict[str, None] = {}
    for path in paths:
        if path.startswith("tests/"):
            if Path(path).name.startswith("test_") and (ROOT / path).exists():
                chosen[path] = None
            continue
        tests = []
        named = named_like(path) if path.endswith(".py") else None
        if named:
            tests.append(named)
        prefix = next((prefix for prefix in ALSO if path.startswith(prefix)), None)
        if prefix:
            tests += ALSO[prefix].split()
        elif path.startswith("ddp_course/") and not tests:
            tests += PROMISES.split()
        chosen |= dict.fromkeys(tests)
    return list(chosen)


if __name__ == "__main__":
    changed = []
    for command in (["diff", "--name-only", sys.argv[1]], ["ls-files", "-o", "--exclude-standard"]):
        done = subprocess.run(["git", *command], capture_output=True, text=True, check=True)
        changed += done.stdout.split()
    print("\n".join(touched(changed)))
