"""The notebook builder: the same bytes each time, outputs kept, markers heard, damage refused."""

import os
from pathlib import Path

import build
import elsewhere
import nbformat
import pytest

ROOT = Path(__file__).parents[2]
LESSON = """# %% [markdown]
# # A lesson
# %% first
x = 1
# %% second
print(x + 1)
"""
EXERCISE = """# %% [markdown]
# # Exercise 3
# %% imports
import math
# %% [markdown]
# ## 3.1 The area
# %% answer-3-1
def area(radius):
    \"\"\"Return the area.\"\"\"
    ### BEGIN SOLUTION
    return math.pi * radius**2
    ### END SOLUTION
# %% check-3-1 points=2
assert area(1) > 3
### BEGIN HIDDEN TESTS
assert area(2) > 12
### END HIDDEN TESTS
"""


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A published course of one lesson and one exercise.

    `write(name, text)` makes a source, and `run(*args)` builds.
    """
    place = tmp_path / "published.txt"
    place.write_text("https://github.com/somebody/their-course\n")
    monkeypatch.setattr(elsewhere, "PUBLISHED", place)

    class Course:
        root = tmp_path

        def write(self, name, text):
            folder = tmp_path / "authoring" / "lessons"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

        def run(self, *arguments):
            return build.main([*arguments, "--root", str(tmp_path)])

        def notebook(self, name):
            return nbformat.read(tmp_path / name, as_version=4)

    made = Course()
    made.write("03_circle.py", LESSON)
    made.write("03_circle_exercise.py", EXERCISE)
    return made


def test_a_folded_cell_keeps_its_code_behind_a_click(course):
    course.write("03_circle.py", LESSON.replace("# %% second", "# %% second folded=true"))
    assert course.run() == 0
    cells = {cell.id: cell for cell in course.notebook("notebooks/03_circle.ipynb").cells}
    assert cells["second"].metadata == {"jupyter": {"source_hidden": True}, "cellView": "form"}
    assert cells["second"].source == "print(x + 1)"
    assert not cells["first"].metadata


def test_builds_all_three(course):
    assert course.run() == 0
    cells = {cell.id: cell for cell in course.notebook("exercises/03_circle.ipynb").cells}
    assert cells["answer-3-1"].source.splitlines()[1:] == [
        '    """Return the area."""',
        '    raise NotImplementedError("Exercise 3.1: The area")',
    ]
    assert cells["check-3-1"].source == "assert area(1) > 3"
    assert cells["check-3-1"].metadata.ddp_course == {"role": "check", "task": "3.1", "points": 2}
    assert cells["check-3-1"].metadata.nbgrader.grade
    assert cells["check-3-1"].metadata.nbgrader.points == 2
    solved = {cell.id: cell.source for cell in course.notebook("solutions/03_circle.ipynb").cells}
    assert solved["answer-3-1"].endswith("    return math.pi * radius**2")
    assert solved["check-3-1"] == "assert area(1) > 3"
    lesson = [cell.id for cell in course.notebook("notebooks/03_circle.ipynb").cells]
    assert lesson == ["a-lesson", "open-elsewhere", "install-elsewhere", "first", "second"]


def test_a_rebuild_is_the_same_to_the_byte(course):
    course.run()
    paths = sorted(course.root.glob("*/*.ipynb"))
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in paths]
    assert len(paths) == 3
    assert course.run() == 0
    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in paths] == before


def test_outputs_are_made_and_kept(course, capsys):
    assert course.run("--execute") == 0
    assert "notebooks/03_circle.ipynb: ran in" in capsys.readouterr().out
    assert course.notebook("notebooks/03_circle.ipynb").cells[4].outputs[0].text == "2\n"
    first = (course.root / "notebooks" / "03_circle.ipynb").read_bytes()
    course.write("03_circle.py", LESSON.replace("x = 1", "x = 7"))
    assert course.run("--check") == 1
    course.run()
    assert course.run("--check") == 0
    cells = course.notebook("notebooks/03_circle.ipynb").cells
    assert cells[4].outputs, "only cells that did not change keep theirs"
    assert cells[3].execution_count is None, "only cells that did not change keep theirs"
    course.write("03_circle.py", LESSON)
    assert course.run("--execute") == 0
    assert (course.root / "notebooks" / "03_circle.ipynb").read_bytes() == first


def test_check_finds_what_differs(course, capsys):
    course.run()
    assert course.run("--check") == 0
    path = course.root / "notebooks" / "03_circle.ipynb"
    path.write_text(path.read_text().replace("x = 1", "x = 2"))
    assert course.run("--check") == 1
    assert "notebooks/03_circle.ipynb differs" in capsys.readouterr().err
    course.run()
    (course.root / "exercises" / "99_stray.ipynb").write_text(path.read_text())
    assert course.run("--check") == 1
    assert "99_stray.ipynb has no source" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("    ### END SOLUTION\n", "", "never closed"),
        ("    ### BEGIN SOLUTION\n", "", "without its BEGIN"),
        (
            "    ### BEGIN SOLUTION\n",
            "    ### BEGIN SOLUTION\n    ### BEGIN SOLUTION\n",
            "inside the SOLUTION region",
        ),
        (
            "### BEGIN HIDDEN TESTS",
            "### BEGIN SOLUTION\n### BEGIN HIDDEN TESTS",
            "inside the SOLUTION region",
        ),
        ("### END HIDDEN TESTS", "### END SOLUTION", "without its BEGIN"),
        ("### BEGIN SOLUTION", "## begin solution", "not quite a marker"),
        (" points=2", "", "states its points"),
        ("# %% check-3-1 points=2", "# %% check-3-2 points=2", "do not match"),
        ("### END HIDDEN TESTS", "### END HIDDEN TESTS\x0c", "line 17: a control character"),
    ],
)
def test_damaged_sources_are_refused(course, capsys, old, new, words):
    assert old in EXERCISE
    course.write("03_circle_exercise.py", EXERCISE.replace(old, new))
    assert course.run() == 2
    assert words in capsys.readouterr().err
    assert not list(course.root.glob("*/*.ipynb")), "nothing is written"


def test_outputs_name_no_machine(course):
    here = f"{course.root}/notebooks"
    text = "import os\nprint(os.getcwd())\nprint(os.__file__)"
    course.write("03_circle.py", f"# %% where\n{text}\n")
    course.run("--execute")
    output = course.notebook("notebooks/03_circle.ipynb").cells[2].outputs[0].text
    assert here not in output
    assert os.path.dirname(os.__file__) not in output
    assert "notebooks" in output


def test_a_failing_cell_is_reported(course, capsys):
    course.write("03_circle.py", "# %% broken\n1 / 0\n")
    assert course.run("--execute", "--only", "03_circle.py") == 1
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_the_course_is_in_step_with_its_sources():
    assert build.main(["--check"]) == 0
