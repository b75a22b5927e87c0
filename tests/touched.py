"""Which tests a change touches: `python tests/touched.py REVISION` prints their files and folders.

The table says what each path of the project is tested by, beside a test that changed itself.
"""

import subprocess
import sys
from pathlib import Path

TABLE = {  # the first prefix that fits counts
    "ddp_course/stage6_ddp": "tests/stage6_ddp tests/torch_suite",
    "ddp_course/stage7_sharded": "tests/stage7_sharded",
    "ddp_course/stage8_pipeline": "tests/test_stage8_pipeline.py tests/test_notebooks.py",
    "ddp_course/stage": "tests/stage6_ddp tests/test_notebooks.py",
    "ddp_course/running/launching": "tests/running/launching tests/running/test_faults.py",
    "ddp_course/running": "tests/running",
    "ddp_course/grading": "tests/grading",
    "exercises": "tests/grading tests/test_clinic.py",
    "ddp_course/measuring": "tests/measuring tests/commands",
    "ddp_course/showing": "tests/showing tests/authoring",
    "ddp_course/train": "tests/test_train_script.py",
    "authoring/lessons": "tests/test_notebooks.py",
    "notebooks": "tests/test_notebooks.py",
    "authoring": "tests/authoring",
    "docs": "tests/authoring",
    "benchmarks": "tests/benchmarks",
    "setup.py": "tests/test_packaging.py",
    "pyproject.toml": "tests/test_packaging.py",
}


def touched(paths: list[str]) -> list[str]:
    """The tests for these changed paths, each once, in order."""
    chosen: dict[str, None] = {}
    for path in paths:
        if (
            path.startswith("tests/")
            and Path(path).name.startswith("test_")
            and Path(path).exists()
        ):
            chosen[path] = None
        elif prefix := next((prefix for prefix in TABLE if path.startswith(prefix)), None):
            chosen |= dict.fromkeys(TABLE[prefix].split())
    return list(chosen)


if __name__ == "__main__":
    changed = subprocess.run(
        ["git", "diff", "--name-only", sys.argv[1]], capture_output=True, text=True, check=True
    )
    print("\n".join(touched(changed.stdout.split())))
