"""A person is told what to look at, and is not told of answers that are as they should be."""

import pytest
from answers import collection, solution, tasks_of
from test_first_sight import CHEATS, allowed

from ddp_course.grading.results import Result, TaskResult
from ddp_course.grading.suspicion import likeness, note_likeness, remarks

INNOCENT = {"modules that are there"}
RENAMED = (("chunks", "pieces"), ("step", "turn"), ("group", "team"))


@pytest.mark.parametrize("name", CHEATS)
def test_each_way_out_gets_a_remark(name):
    found = remarks(CHEATS[name], allowed("8.3"))
    assert found and all(one.startswith("line ") for one in found), name


@pytest.mark.parametrize("exercise", (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 14))
def test_no_right_answer_gets_a_remark(exercise):
    right = [(task, solution(task)) for task in tasks_of(exercise)]
    right += [(answer.task, answer.source) for answer in collection(exercise) if answer.right]
    odd = {source: found for task, source in right if (found := remarks(source, allowed(task)))}
    assert not odd


def test_what_cannot_be_read_gets_no_remark():
    assert remarks("def f(:") == [] and remarks("(" * 982 + ")" * 982) == []


def test_an_answer_under_other_names_is_alike_and_another_is_not():
    mine = solution("4.2")
    copied = mine
    for old, new in RENAMED:
        copied = copied.replace(old, new)
    assert copied != mine
    found = likeness({"anna": mine, "ben": f"{copied}\n# all my own work", "carl": solution("4.4")})
    assert [pair[:2] for pair in found] == [("anna", "ben")] and found[0][2] > 0.99
    assert likeness({"anna": solution("4.1"), "ben": solution("4.1")}) == [], "too short to be told apart"


def test_likeness_is_noted_with_both_and_only_where_there_are_points():
    def result(learner, points):
        return Result(learner, 4, [TaskResult("4.2", points, 3, "" if points else "wrong", answer=solution("4.2"))])

    results = [result("anna", 3), result("ben", 3), result("carl", 0)]
    note_likeness(results)
    said = {one.learner: one.tasks[0].suspicious for one in results}
    assert said == {"anna": ["alike to that of ben (100 %)"], "ben": ["alike to that of anna (100 %)"], "carl": []}
