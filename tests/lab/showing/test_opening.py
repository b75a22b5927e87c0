"""The questions that lessons open with: each has reasons, and the first answer counts.

What was wrong comes back in a later lesson.
"""

import json
from collections import Counter
from pathlib import Path

import nbformat
import pytest

from ddp_course.lab import questions, show
from ddp_course.lab.learners_copy import PROGRESS, RECORD
from ddp_course.lab.showing.widgets import MIME
from ddp_exercises.grading import overview

ROOT = Path(__file__).resolve().parents[3]
KNOWN = questions.read_questions()


@pytest.fixture
def copy(tmp_path, monkeypatch):
    (tmp_path / RECORD).write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def kept(copy):
    return json.loads((copy / PROGRESS).read_text())["questions"]


def test_each_lesson_asks_what_earlier_ones_decided():
    opened = Counter(question["opens"] for question in KNOWN.values())
    assert opened == {1: 1, 2: 2, 3: 2} | dict.fromkeys(range(4, 16), 3)
    for lesson in range(1, 16):
        about = {each["lesson"] for each in KNOWN.values() if each["opens"] == lesson}
        wanted = {lesson - back for back in (1, 3, 6) if lesson >= back}
        assert wanted <= about
        assert max(about) == lesson - 1
        [path] = (ROOT / "notebooks").glob(f"{lesson:02}_*.ipynb")
        cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
        names = [cell.id for cell in cells if cell.id != "install-elsewhere"]
        assert names[:2] == ["imports", "opening-questions"]
        [asked] = [cell for cell in cells if cell.id == "opening-questions"]
        [output] = asked.outputs
        stored = [each["ask"] for each in output.data[MIME]["questions"]]
        assert stored == [each["ask"] for each in KNOWN.values() if each["opens"] == lesson]


def test_each_answer_has_a_reason_and_one_is_right():
    for name, question in KNOWN.items():
        assert question["right"] in question["answers"], name
        assert len(question["answers"]) >= 3, name
        assert all(reason.endswith(".") for reason in question["answers"].values()), name
        assert not set("<>&") & set(json.dumps(question)), f"{name} would be read as HTML"
    places = Counter(list(each["answers"]).index(each["right"]) for each in KNOWN.values())
    assert max(places.values()) < len(KNOWN) / 2, "the right answer stands in one place too often"


def test_an_answer_is_judged_with_its_reason_and_the_first_one_counts(copy):
    name = "server's time"
    opening = show.questions(4)
    opening.buttons[name].value = "7 p/b"
    reason = opening.children[list(opening.children).index(opening.buttons[name]) + 1].value
    answers = KNOWN[name]["answers"]
    assert reason == f"No. {answers['7 p/b']}<br>It is: 14 p/b. {answers['14 p/b']}"
    assert opening.buttons[name].disabled
    again = show.questions(4)
    again.buttons[name].value = "14 p/b"
    assert again.children[-1].value == f"Right. {answers['14 p/b']}"
    assert kept(copy) == {f"04 {name}": False}


def test_what_was_wrong_comes_back_until_it_is_right(copy):
    name = "time of the update"
    show.questions(2).buttons[name].value = "it doubles"
    assert "in 0 of 1 questions" in overview.sentence(copy)
    assert overview.asked_again(copy, []) == [f"wrong so far: {questions.title(KNOWN[name])}"]
    assert list(show.questions(2).buttons).count(name) == 1
    assert list(show.questions(5).buttons)[3:] == [name]
    show.questions(5).buttons[name].value = "it stays the same"
    assert len(show.questions(6).buttons) == 3
    assert list(show.questions(5).buttons)[3:] == [name], "a lesson that is run again asks the same"
    assert overview.asked_again(copy, []) == []


def test_at_most_two_come_back_at_once_and_unknown_ones_are_left_out(copy):
    wrong = [f"{question['opens']:02} {name}" for name, question in KNOWN.items()]
    progress = {"questions": dict.fromkeys(["01 of an older course", *wrong], False)}
    (copy / PROGRESS).write_text(json.dumps(progress))
    assert len(show.questions(10).buttons) == 5
    assert len(overview.asked_again(copy, [])) == len(KNOWN)


def test_without_a_copy_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    show.questions(2).buttons["time of the update"].value = "it doubles"
    assert len(show.questions(3).buttons) == 2
    assert list(tmp_path.iterdir()) == []
