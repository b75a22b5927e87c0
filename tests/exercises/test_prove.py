"""What a teacher sees beyond points: questions, misconceptions, and published solutions.

The questions are about a learner's own code.
"""

import json

import pytest
from answers import of_kind, verdict_on

from ddp_course.lab.learners_copy import PROGRESS
from ddp_exercises.attempt import Evidence
from ddp_exercises.commands import check
from ddp_exercises.grading import overview, prove, report
from ddp_exercises.grading.grader import Judge
from ddp_exercises.grading.prove import NUMBERS, RIGHT, Question, mutations, question_about
from ddp_exercises.grading.remarks import published
from ddp_exercises.grading.results import Result, TaskResult
from ddp_exercises.tasks import find, known_wrong, solution

MINE = "def chunk_to_send(me, turn, n):\n    return (me - turn + n) % n\n"


def right(task, answer):
    """Return the result of a right answer."""
    return Result("anna", find(task).exercise, [TaskResult(task, 1, 1, answer=answer)])


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("x = rank + 1", {"x = rank - 1", "x = rank + 2"}),
        ("x = é / size", {"x = é"}),
        ("tensor /= size", {"pass"}),
        ("x += incoming", {"x -= incoming"}),
        ("x = 4 * n / speed[n] + y", {"x = 4 * n + y", "x = 4 * n / speed[n] - y"}),
        ("# x + 1", set()),
        ('"""x + 1"""', set()),
        ("if step < most: x", {"if step <= most: x"}),
        ("x = range(len(chunks))", {"x = range(len(chunks) - 1)"}),
        ("x = True", set()),
    ],
)
def test_changes_are_those_that_an_author_should_foresee(line, changed):
    assert {text.splitlines()[0] for text, _ in mutations(f"{line}\n")} == changed


def test_a_question_is_about_the_learner_s_own_code_and_its_answer_is_what_the_check_says():
    question = question_about(right("4.1", MINE), Judge(3), 100.0)
    assert "(me - turn + n) % n" in question.text
    assert "me" in question.text.split("becomes")[1]
    assert question == question_about(right("4.1", MINE), Judge(3), 100.0)
    (new,) = [text for text, words in mutations(MINE) if words in question.text]
    said = verdict_on("4.1", new, seed=3).message
    assert f"  {question.right}) {said}" in question.text
    assert said
    assert "correct" in question.text
    assert "  d) " in question.text


@pytest.mark.parametrize(
    ("message", "other", "alike"),
    [
        (
            "the result is too large: 3.3; 2.9 was expected",
            "the result is too large: 4e-06; 2",
            True,
        ),
        ("cables of 2e+09, 2e+09 bit/s: too small", "cables of 7.5e+09 bit/s: too small", True),
        ("the result is too small: 3.3", "the result is too large: 3.3", False),
        ("numbers of chunk 2 come into rank 0's", "numbers of chunk 1 come into rank 2's", True),
        ("3 of 9 are wrong (right: with 2 ranks)", "9 of 9 are wrong ", True),
        (
            "take it modulo K (yours: [1, 2]; [0] was expected)",
            "take it modulo K (yours: -1)",
            True,
        ),
    ],
)
def test_choices_that_differ_only_in_numbers_are_one(message, other, alike):
    """Which rank's fault is told first may change, and inputs are not all told."""
    keys = {NUMBERS.sub("", text).split("; ")[0] for text in (message, other)}
    assert (len(keys) == 1) == alike


def test_four_choices_are_told_whole_and_what_python_says_is_not_asked(monkeypatch):
    long = "case: a sentence that is long, " + "and goes on, " * 20 + "to its end."
    what_becomes_of_x = {RIGHT: "y", "your code raised TypeError": "8[x]", long: "v"}
    said = {}
    for message, x in what_becomes_of_x.items():
        said[message] = prove.Outcome(message, prove.Change("", f"x becomes {x}."))
    known = ["first 3", "first 4", long]
    monkeypatch.setattr(prove, "what_is_said", lambda *_: said)
    monkeypatch.setattr(prove, "said_of_known", lambda *_: known)
    for seed in range(9):
        text, letter = prove.question_about(right("4.1", MINE), Judge(seed), 100.0)
        asked, *choices = text.split("\n")
        assert "x becomes v." in asked
        assert f"  {letter}) {long}" in choices
        said_too = [choice[5:] for choice in choices if choice[5:] != long]
        assert sorted(said_too) == [RIGHT, "first 3", "your code raised TypeError"]


def test_the_right_letter_is_the_same_when_a_fault_is_told_in_other_words(monkeypatch):
    monkeypatch.setattr(prove, "said_of_known", lambda *_: ["a fault", "some fault", "z fault"])
    letters = {}
    for words in (["no chunk"], ["no chunk at all", "a late chunk", "an early chunk"]):
        change = prove.Change("", "x becomes y.")
        said = {each: prove.Outcome(each, change) for each in words}
        monkeypatch.setattr(prove, "what_is_said", lambda *_, said=said: said)
        for seed in range(40):
            _, letter = prove.question_about(right("4.1", MINE), Judge(seed), 100.0)
            letters.setdefault(seed, set()).add(letter)
    assert all(len(letters_of_a_seed) == 1 for letters_of_a_seed in letters.values())
    assert len(set.union(*letters.values())) > 1


def test_nothing_is_asked_about_answers_that_are_wrong_or_need_other_cells():
    wrong = right("4.1", MINE)
    wrong.tasks[0].message = "wrong"
    assert question_about(wrong, Judge(3), 100.0) is None
    needs = MINE.replace("- turn", "- helper(turn)")
    assert question_about(right("4.1", needs), Judge(3), 100.0) is None


def test_a_letter_is_told_whether_it_is_right(monkeypatch, capsys):
    monkeypatch.setattr(check, "question_about", lambda *_, **__: Question("4.1: which?", "b"))
    for letter, words in {"": "--prove LETTER", "B": "B: right", "a": "a: no, it is b"}.items():
        check.prove(right("4.1", MINE), letter)
        assert words in capsys.readouterr().out


def test_the_question_is_on_the_learner_s_page_and_what_is_right_on_the_teacher_s():
    result = right("4.1", MINE)
    result.question = Question("4.1: which?", "b")._asdict()
    pages = report.pages([result])
    assert "4.1: which?" in pages["hand_back/anna.html"]
    assert "choice is" not in pages["hand_back/anna.html"]
    assert "asked to prove 4.1: the right choice is b" in pages["index.html"]


def test_what_is_the_published_solution_is_told_verbatim_or_renamed():
    text = solution("4.2")
    assert published("4.2", "# my own\n" + text) == "verbatim"
    assert published("4.2", text.replace("incoming", "inbox").replace("step", "i")) == "renamed"
    assert published("4.2", text.replace("- 1)", "- 2)")) == ""


def test_a_known_wrong_answer_is_a_misconception_in_the_teacher_s_table():
    (known,) = [each for each in of_kind(find("3.3"), "wrong") if each.name == "no division"]
    verdict = verdict_on("3.3", known.source)
    assert verdict.misconception == "no division"
    assert verdict_on("3.3", solution("3.3")).misconception == ""
    results = [Result("anna", 3, [TaskResult("3.3", 0, 2, "x", misconception="no division")])]
    results.append(Result("ben", 3, [TaskResult("3.3", 2, 2)]))
    assert report.misconceptions(results) == {("3.3", "no division"): ["anna"]}
    page = report.pages(results)["index.html"]
    assert page.count('class="has wrong"') == 1
    assert "no division" in page
    assert page.count("<span>anna</span>") == 1
    assert "<span>ben</span>" not in page
    assert "no division" not in report.pages(results)["hand_back/anna.html"]


def test_where_you_are_says_what_asks_a_misconception_again(tmp_path):
    progress = {"misconceptions": {"3.3": "no division", "4.1": "nobody else knows this"}}
    (tmp_path / PROGRESS).write_text(json.dumps(progress))
    results = [Result("you", 5, [TaskResult("5.3", 0, 1), TaskResult("5.1", 0, 1)])]
    assert overview.asked_again(tmp_path, results) == [
        'you fell for "no division" in 3.3; 5.3 asks it again'
    ]
    results[0].tasks[0].points = 1
    assert overview.asked_again(tmp_path, results) == []


def test_revisiting_draws_what_shows_most_of_an_old_misconception(tmp_path, monkeypatch):
    class Pretended(Judge):
        """A judge for whom each known wrong answer is wrong as often as a seed's last digit."""

        def __init__(self, seed):
            wrong = Evidence({("the mean", case): {} for case in range(seed % 10)})
            self.known = lambda task: [wrong] * (1 + len(known_wrong(task.number)))
            self.right = lambda task: wrong

    monkeypatch.setattr(check, "Judge", Pretended)
    monkeypatch.setattr(check, "wrong_cases", lambda task, evidence, right: evidence.values)
    monkeypatch.setattr(check, "find_copy", lambda: tmp_path)
    monkeypatch.setattr(check.random, "sample", lambda *_: [11, 17, 13])
    (tmp_path / PROGRESS).write_text('{"misconceptions": {"3.3": "no division"}}')
    assert check.revisiting_seed(5) == 17
    (tmp_path / PROGRESS).write_text('{"misconceptions": {"3.3": "of no other task"}}')
    assert check.revisiting_seed(5) == 11


def test_texts_stand_beside_their_rubric():
    texts = [right("10.5", 'def largest_rate():\n    return 0.3, "it <jumps>"')]
    (known,) = report.rubrics([*texts, right("4.1", MINE)])
    assert known[0] == "10.5"
    assert "Full:" in known[1]
    assert known[2][0][0] == "anna"
    figures = ("5.9", "6.10", "7.9", "8.8", "9.7", "10.7", "11.7", "12.4", "13.7", "14.6")
    for number in (*figures, "15.2"):
        assert "Full:" in report.rubrics([right(number, "x")])[0][1]
    page = report.pages(texts)
    assert "it &lt;jumps&gt;" in page["index.html"]
    assert "Full:" in page["index.html"]
    assert "Full:" not in page["hand_back/anna.html"]


def test_groups_that_are_alike_stand_with_each_learner():
    answer = "".join(f"    x{n} = tensor[{n}] * {n} + 1\n" for n in range(9))
    results = [right("4.2", f"def reduce_scatter():\n{answer}") for _ in range(2)]
    results[1].learner = "ben"
    page = report.pages(results)["index.html"]
    assert page.count("4.2: alike: anna, ben") == 2
