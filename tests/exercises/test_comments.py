"""What a teacher adds by hand is applied last in every run, and shown wherever the points are."""

import csv
import json
from dataclasses import replace

import pytest
from chromium import fresh_page, running_browser

from ddp_course.lab import cli
from ddp_exercises.errors import GradingError
from ddp_exercises.grading import report
from ddp_exercises.grading.comments import read_comments, with_comments
from ddp_exercises.grading.results import Result, TaskResult

COMMENTS = """learner,exercise,task,points,comment
anna,8,8.1,1.5,half right
anna,8,,-1,a day late
ben,8,8.2,,well argued
carl,8,,excused,was ill
"""


def graded(learner, first, second):
    """Return a result of exercise 8, with points for two tasks of two points each."""
    tasks = [TaskResult("8.1", first, 2, "" if first == 2 else "wrong")]
    tasks.append(TaskResult("8.2", second, 2, "" if second == 2 else "wrong"))
    return Result(learner, 8, tasks)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """`ddp-course grade` for a class of three, whose notebooks do not run, with comments."""
    marks = {"anna": (0, 2), "ben": (2, 2), "carl": (0, 0)}
    for learner in marks:
        folder = tmp_path / "class" / learner
        folder.mkdir(parents=True)
        (folder / "08_x.ipynb").write_text("")

    def grade_one(submission, *rest):
        files = {submission.file: submission.digest}
        return replace(graded(submission.learner, *marks[submission.learner]), files=files)

    monkeypatch.setattr("ddp_exercises.grading.grader.grade_one", grade_one)
    (tmp_path / "by_hand.csv").write_text(COMMENTS)
    words = ["grade", tmp_path / "class", "--moodle", tmp_path / "moodle.csv"]
    words += ["--json", tmp_path / "r.json", "--csv", tmp_path / "r.csv"]
    words += ["--html", tmp_path / "html", "--comments", tmp_path / "by_hand.csv"]
    return words


@pytest.mark.parametrize("again", [[], ["--resume"]])
def test_a_comment_stays_through_every_run_and_is_shown_wherever_points_are(
    command, again, tmp_path, capsys
):
    for options in ([], again):
        assert cli.main(list(map(str, [*command, *options]))) == 1
        said = capsys.readouterr().out
        assert "2.5 of 4  a day late" in said
        assert "excused  was ill" in said
        assert "8.1    half right; wrong" in said
        assert "8.2    well argued" in said
        points = {of["learner"]: of["points"] for of in json.loads(read(tmp_path / "r.json"))}
        assert points == {"anna": 2.5, "ben": 4, "carl": None}
        rows = list(csv.reader(read(tmp_path / "r.csv").splitlines()))
        assert [row[3:4] + row[8:9] for row in rows[1:4]] == [
            ["1.5", "half right"],
            ["2", ""],
            ["-1", "a day late"],
        ]
        grades = list(csv.reader((tmp_path / "moodle_08.csv").open()))
        assert [row[3] for row in grades[1:]] == ["2.5", "4", ""]
        assert grades[1][4] == "a day late\n8.1: half right; wrong"
        page = read(tmp_path / "html/hand_back/anna.html")
        assert "a day late (-1 points)" in page
        assert "half right" in page
        assert "2.5 of 4" in page
        assert "excused" in read(tmp_path / "html/index.html")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("anna,8,8.1,two,", 'line 2: the points are "two"'),
        ("dora,8,,1,", "there is no such result"),
        ("anna,8,8.9,1,", "task 8.9: there is no such result"),
    ],
)
def test_a_comment_that_cannot_be_applied_is_named(line, words, command, tmp_path, capsys):
    (tmp_path / "by_hand.csv").write_text(f"learner,exercise,task,points,comment\n{line}\n")
    assert cli.main(list(map(str, command))) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("points", "earned"),
    [(["+1", "0.3"], 0.3), (["0.3", "+1"], 1.3), (["-1", "-0.5"], 0.5), (["2"], 2)],
)
@pytest.mark.parametrize("task", ["8.2", ""])
def test_lines_are_applied_in_their_order(points, earned, task, tmp_path):
    lines = [f"anna,08,{task},{change}," for change in points]
    (tmp_path / "c.csv").write_text("\n".join(["learner,exercise,task,points,comment", "", *lines]))
    anna = graded("anna", 0, 2)
    (changed,) = with_comments([anna], read_comments(tmp_path / "c.csv"))
    assert changed.points == earned
    assert anna.points == 2


def test_a_comment_may_have_several_lines(tmp_path):
    path = tmp_path / "comments.csv"
    path.write_text('learner,exercise,task,points,comment\nanna,8,8.1,1,"one line\nand another"\n')
    assert with_comments([graded("anna", 0, 2)], read_comments(path))[0].tasks[0].comment == (
        "one line\nand another"
    )


def test_only_a_whole_exercise_is_excused(tmp_path):
    (tmp_path / "c.csv").write_text("learner,exercise,task,points\nanna,8,8.1,excused\n")
    with pytest.raises(GradingError, match=r"line 2.*for a whole exercise"):
        read_comments(tmp_path / "c.csv")


def read(path):
    return path.read_text(encoding="utf-8")


def test_a_click_on_a_title_sorts_the_class(tmp_path):
    class_ = [graded("anna", 0, 2), graded("ben", 2, 2), graded("carl", 0.5, 0)]
    class_.append(graded("dora", 0, 0))
    for name, page in report.pages(class_).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(page, encoding="utf-8")
    with running_browser() as browser, fresh_page(browser, offline=True) as page:
        page.goto((tmp_path / "index.html").as_uri())
        rows = page.locator("table.class tbody tr td:first-child")
        orders = {}
        for title in ("Points", "8.1", "Learner"):
            for way in ("first", "second"):
                page.locator("th", has_text=title).click()
                orders[title, way] = " ".join(rows.all_inner_texts())
        assert page.locator("tfoot td").all_inner_texts() == [
            "mean of 4, and how many have solved it",
            "1.62",
            "1",
            "2",
        ]
        page.get_by_text("anna").click()
        assert page.locator("h1").inner_text() == "anna"
    assert orders["Points", "first"] == "dora carl anna ben"
    assert orders["Points", "second"] == "ben anna carl dora"
    assert orders["8.1", "first"].endswith("carl ben")
    assert orders["8.1", "second"].startswith("ben carl")
    assert orders["Learner", "first"] == "anna ben carl dora"
    assert orders["Learner", "second"] == "dora carl ben anna"
