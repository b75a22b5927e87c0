"""A change selects the tests that would notice it."""

from pathlib import Path

import pytest
from touched import PACKAGES, touched

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "path, test",
    [
        ("ddp_course/stage4_ring.py", "tests/test_stage4_ring.py"),
        ("ddp_course/stage8_pipeline/split.py", "tests/test_stage8_pipeline.py"),
        ("ddp_course/stage9_tensor.py", "tests/test_stage9_tensor.py"),
        ("ddp_course/wire.py", "tests/test_wire.py"),
        ("manyranks/launching/rank.py", "tests/manyranks/launching"),
        ("ddp_course/collectives/tree.py", "tests/collectives"),
        ("ddp_course/base/errors.py", "tests/test_docs.py"),
        ("manyranks/errors.py", "tests/manyranks/launching"),
        ("manyranks/clocks/table.py", "tests/lab/measuring/test_comparison.py"),
        ("ddp_course/mesh.py", "tests/test_stage9_tensor.py"),
        ("ddp_course/lab/measuring/results.py", "tests/lab/measuring"),
        ("tests/test_problems.py", "tests/test_problems.py"),
        ("docs/MAP.md", "tests/test_docs.py"),
    ],
)
def test_a_change_selects_its_own_tests(path, test):
    assert test in touched([path])


def test_every_module_selects_tests_that_exist():
    for package in PACKAGES:
        for module in (ROOT / package).rglob("*.py"):
            tests = touched([module.relative_to(ROOT).as_posix()])
            assert tests, module
            assert all((ROOT / test).exists() for test in tests), tests
