"""Canvas, Moodle and Gradescope get their columns; a roster says who is missing.

The columns are those that they document.
"""

import csv
import io
import json
from argparse import Namespace
from dataclasses import replace

import pytest

from ddp_course.lab import cli
from ddp_exercises.commands.grade import not_graded_yet
from ddp_exercises.errors import GradingError
from ddp_exercises.grading.gradebooks import as_canvas, as_moodle, grade_files
from ddp_exercises.grading.people import read_roster
from ddp_exercises.grading.results import Result, TaskResult
from ddp_exercises.grading.submissions import Submission

ANNA = Result("anna", 4, [TaskResult("4.1", 1, 1), TaskResult("4.2", 1.5, 3, "a fault\nand more")])
BEN = Result("ben", 8, [TaskResult("8.1", 1, 1)])
ROSTER = """learner,Student,ID,SIS User ID,SIS Login ID,Section,ID number,Email address
ben,"Ben, B",12,b1,ben@x,A,77,ben@example.org
carl,Carl,13,c1,carl@x,A,78,carl@example.org
"""


@pytest.fixture
def roster(tmp_path):
    (tmp_path / "class.csv").write_text(ROSTER)
    return read_roster(tmp_path / "class.csv")


def rows_of(text):
    return list(csv.reader(io.StringIO(text)))


def test_canvas(roster):
    header, possible, *learners = rows_of(as_canvas([ANNA, BEN], roster))
    assert header == [
        "Student",
        "ID",
        "SIS User ID",
        "SIS Login ID",
        "Section",
        "Exercise 4",
        "Exercise 8",
    ]
    assert possible == ["    Points Possible", "", "", "", "", "4", "1"]
    assert learners == [
        ["Ben, B", "12", "b1", "ben@x", "A", "", "1"],
        ["Carl", "13", "c1", "carl@x", "A", "", ""],
        ["anna", "", "", "anna", "", "2.5", ""],
    ]


def read_by_canvas(text):
    """Return what Canvas makes of a file: assignments, and rows.

    They are {assignment: points possible}, and for each row whom it finds, and the grades. By the
    rules of lib/gradebook_importer.rb in https://github.com/instructure/canvas-lms.
    """
    header, *rows = rows_of(text)
    assert len(header) > 3
    assert "Student" in header[0]
    assert "ID" in header[1]
    own = 3  # So many columns are the learner's; the last of them must be the section.
    if "SIS Login ID" in header[2]:
        own += 1
    elif "SIS User ID" in header[2] and "SIS Login ID" in header[3]:
        own += 2
        if "Integration ID" in header[4]:
            own += 1
        if "Root Account" in header[own - 1]:
            own += 1
    assert "Section" in header[own - 1]
    (possible,) = (row[own:] for row in rows if "Points Possible" in row[0])
    learners = [row for row in rows if "Points Possible" not in row[0]]
    keys = [(1, "ID"), (2, "SIS User ID"), (3, "SIS Login ID"), (0, "Student")]
    assert all(header[place] == name for place, name in keys)
    assert all(len(row) == len(header) for row in rows)
    found = []
    for row in learners:
        found.append(next((header[place], row[place]) for place, _ in keys if row[place]))
    grades = [dict(zip(header[own:], row[own:], strict=True)) for row in learners]
    return dict(zip(header[own:], possible, strict=True)), list(zip(found, grades, strict=True))


def test_canvas_reads_what_is_written_for_it(roster):
    roster["dora"] = {"Student": "Dora", "SIS User ID": "d1"}
    possible, rows = read_by_canvas(as_canvas([ANNA, BEN], roster))
    assert possible == {"Exercise 4": "4", "Exercise 8": "1"}
    assert [found for found, _ in rows] == [
        ("ID", "12"),
        ("ID", "13"),
        ("SIS User ID", "d1"),
        ("SIS Login ID", "anna"),
    ]
    assert rows[0][1] == {"Exercise 4": "", "Exercise 8": "1"}
    assert rows[-1][1] == {"Exercise 4": "2.5", "Exercise 8": ""}


def test_canvas_own_assignments_are_found_by_how_their_titles_begin(tmp_path):
    titles = "Student,ID,Exercise 41 (1),Exercise 4: the ring (777),Exercise 4 again (778)"
    (tmp_path / "class.csv").write_text(f'{titles}\n"Ann, A",12,,5,\n')
    header, possible, anna = rows_of(as_canvas([ANNA], read_roster(tmp_path / "class.csv")))[:3]
    assert header[5:] == ["Exercise 4: the ring (777)"]
    assert possible[5:] == ["4"]
    assert anna[:2] == ["Ann, A", "12"]
    assert anna[5:] == [""]


def test_moodle_gets_a_grading_worksheet_for_each_exercise():
    named = {"Identifier": "Participant 1234567", "Full name": "Ada L"}
    ada = Result("Ada L", 4, [TaskResult("4.1", 1, 1)], about=named)
    args = Namespace(canvas=None, moodle="out/m.csv")
    files = grade_files(args, [ada, ANNA, BEN], {})
    assert list(files) == ["out/m_04.csv", "out/m_08.csv"]
    header, first, anna, ben = rows_of(files["out/m_04.csv"])
    assert header == ["Identifier", "Full name", "Email address", "Grade", "Feedback comments"]
    assert first == ["Participant 1234567", "Ada L", "", "1", ""]
    assert anna[3:] == ["2.5", "4.2: a fault"]
    assert ben[3:] == ["", ""]
    assert rows_of(as_moodle([ANNA], {"anna": {"Email address": "a@x"}}, 4))[1][2] == "a@x"


def test_a_roster_is_a_learner_a_line_or_a_table(roster, tmp_path):
    assert list(roster) == ["ben", "carl"]
    (tmp_path / "names").write_text("anna\n\nben\n")
    assert list(read_roster(tmp_path / "names")) == ["anna", "ben"]
    for name, content in (("empty", b""), ("not_text", b"\xff\xfe")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(GradingError, match="roster"):
            read_roster(tmp_path / name)


def graded_as(monkeypatch, results):
    """Let the grader give these results in turn; no answer runs. Returns what it was asked for."""
    asked = []
    to_come = iter(results)

    def grade_one(submission, *rest):
        asked.append(submission.learner)
        result = next(to_come)
        if isinstance(result, BaseException):
            raise result
        return replace(result, files={submission.file: submission.digest})

    monkeypatch.setattr("ddp_exercises.grading.grader.grade_one", grade_one)
    return asked


def command_for_two_of_three(folder):
    """Return a command that grades anna and ben, who have handed in something; carl has not."""
    for learner in ("anna", "ben"):
        (folder / "class" / learner).mkdir(parents=True)
        (folder / "class" / learner / "08_x.ipynb").write_text("")
    (folder / "names").write_text("anna\nben\ncarl\n")
    command = ["grade", str(folder / "class"), "--jobs", "1", "--seed", "3"]
    command += ["--json", str(folder / "r.json"), "--canvas", str(folder / "canvas.csv")]
    command += ["--roster", str(folder / "names"), "--html", str(folder / "html")]
    return command


def assert_written(folder):
    """Assert that the command has written what anna and ben have reached, and that carl has not."""
    records = json.loads((folder / "r.json").read_text())
    assert [record["learner"] for record in records] == ["anna", "ben"]
    assert rows_of((folder / "canvas.csv").read_text())[2:] == [
        ["anna", "", "", "anna", "", "1"],
        ["ben", "", "", "ben", "", "1"],
        ["carl", "", "", "carl", "", ""],
    ]
    index = (folder / "html" / "index.html").read_text()
    assert "mean of 2, and how many have solved it</td><td>1</td>\n<td>2</td>" in index
    assert 'href="hand_back/anna.html"' in index
    assert "Handed in nothing: carl" in index


def test_the_command_writes_grades_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    command = command_for_two_of_three(tmp_path)
    right = [Result(learner, 8, [TaskResult("8.1", 1, 1)]) for learner in ("anna", "ben")]
    graded_as(monkeypatch, [right[0], KeyboardInterrupt()])
    assert cli.main(command) == 2
    assert "--resume goes on" in capsys.readouterr().err
    asked = graded_as(monkeypatch, [right[1]])
    assert cli.main([*command, "--resume"]) == 0
    assert asked == ["ben"]
    assert "handed in nothing: carl" in capsys.readouterr().out
    assert_written(tmp_path)
    asked = graded_as(monkeypatch, [])
    assert cli.main([*command, "--resume"]) == 0
    assert asked == []
    assert "anna" in capsys.readouterr().out


def test_what_has_changed_is_graded_again_with_all_that_was_compared_with_it():
    works = []
    for learner, name in (("anna", "a"), ("anna", "b"), ("ben", "c"), ("carl", ""), ("dora", "d")):
        parts = ("class", learner, name)
        works.append(Submission(learner, f"class/{learner}", parts=parts, digest=name and "1"))
    earlier = [
        Result("anna", 8, files={"a": "1", "b": "0"}),
        Result("ben", 8, files={"c": "1", "gone": "1"}),
        Result("carl", None),
        Result("dora", 8, files={"d": "1"}, graded=False),
    ]
    again = not_graded_yet(works, earlier)
    assert [(work.learner, work.file) for work in again] == [
        ("anna", "a"),
        ("anna", "b"),
        ("dora", "d"),
    ]


def test_a_grading_goes_on_only_where_its_results_are(tmp_path, capsys):
    (tmp_path / "08_x.ipynb").write_text("")
    assert cli.main(["grade", str(tmp_path), "--resume"]) == 2
    assert "needs --json" in capsys.readouterr().err
