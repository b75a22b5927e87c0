"""A cell that is run again, or in another order, finds no other cell's values under its names."""

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
def test_a_name_that_a_cell_reads_is_bound_by_one_cell(tmp_path, third):
    assert faults(tmp_path, third) == ["00_topic.py: first and third bind size, which second reads"]


@pytest.mark.parametrize(
    "third",
    ["print(size)", "[size for size in (1, 2)]", "def f(size):\n    size = 2", "%%ranks\nsize = 2"],
)
def test_other_uses_are_no_fault(tmp_path, third):
    assert faults(tmp_path, third) == []


def test_a_function_reads_its_names_whenever_it_is_called(tmp_path):
    cells = "# %% first\nsize = 1\ndef f():\n    return size\n\n# %% second\n"
    assert faults(tmp_path, "size = 2", cells) == [
        "00_topic.py: first and second bind size, which first reads"
    ]


def test_a_cell_that_binds_a_name_for_itself_gives_it_to_nobody_else(tmp_path):
    cells = "# %% first\nsize = 1\nprint(size)\n\n# %% second\nsize = 2\n\n# %% third\n"
    assert faults(tmp_path, "print(size)", cells) == [
        "00_topic.py: first and second bind size, which third reads"
    ]
    assert faults(tmp_path, "size = 3\nprint(size)", cells) == []


def test_no_lesson_binds_a_name_again(capsys):
    assert rebound.main() == 0, capsys.readouterr().out
