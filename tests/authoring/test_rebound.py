"""A cell that is run again must not find another cell's values under its names."""

import pytest
import rebound

FIRST = "# %% first\nsize = 1\n\n# %% second\nprint(size)\n\n# %% third\n"


def faults(tmp_path, third, cells=FIRST):
    lesson = tmp_path / "00_topic.py"
    lesson.write_text(cells + third + "\n")
    return rebound.faults(lesson)


@pytest.mark.parametrize(
    "third",
    [
        "size = 16",
        "size += 1",
        "import torch as size",
        "def size(): ...",
        "for size in (1, 2):\n    print(size)",
        "other, size = 1, 2",
    ],
)
def test_a_name_that_a_cell_has_read_is_not_bound_again(tmp_path, third):
    assert faults(tmp_path, third) == ["00_topic.py: third binds size, which second reads"]


@pytest.mark.parametrize(
    "third",
    ["print(size)", "[size for size in (1, 2)]", "def f(size):\n    size = 2", "%%ranks\nsize = 2"],
)
def test_other_uses_are_no_fault(tmp_path, third):
    assert faults(tmp_path, third) == []


def test_a_function_reads_its_names_whenever_it_is_called(tmp_path):
    cells = "# %% first\nsize = 1\ndef f():\n    return size\n\n# %% second\n"
    assert faults(tmp_path, "size = 2", cells) == [
        "00_topic.py: second binds size, which first reads"
    ]


def test_no_lesson_binds_a_name_again(capsys):
    assert rebound.main() == 0, capsys.readouterr().out
