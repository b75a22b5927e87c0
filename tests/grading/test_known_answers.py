"""Every exercise: its checks pass all right answers, and tell each known wrong one what is wrong with it."""

from itertools import combinations

import pytest
from answers import of_kind, tried

from ddp_course.grading.checks import exercises, find, of_exercise
from ddp_course.grading.diagnosis import same

EXERCISES = exercises()


@pytest.mark.parametrize("exercise", EXERCISES)
def test_right_answers_pass(exercise):
    for task in of_exercise(exercise):
        for hidden in (False, True):
            answers = of_kind(task, "right")
            names, sources = ["solution", *(one.name for one in answers)], [one.source for one in answers]
            for name, (_, said) in zip(names, tried(task, sources, exercise, hidden), strict=True):
                assert said.right, f"{task.number} {name}: {said.message}"


@pytest.mark.parametrize("exercise", EXERCISES)
def test_wrong_answers_are_told_what_is_wrong(exercise):
    missed = []
    for task in of_exercise(exercise):
        answers = of_kind(task, "wrong", "told")
        for answer, (evidence, said) in zip(answers, tried(task, [one.source for one in answers], 11)[1:], strict=True):
            if said.right or answer.message not in said.message:
                missed.append(f"{task.number} {answer.name}: {said.message!r} without {answer.message!r}")
            if answer.kind == "wrong" and evidence.values is None:
                missed.append(f"{task.number} {answer.name}: leaves no evidence, so it is told: {evidence.failure}")
    assert not missed, "\n".join(missed)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_what_is_hidden_shows_on_hidden_inputs_only(exercise):
    for task in of_exercise(exercise):
        answers = of_kind(task, "hidden")
        for hidden in (False, True):
            for answer, (_, said) in zip(
                answers, tried(task, [one.source for one in answers], 3, hidden)[1:], strict=True
            ):
                assert said.right is not hidden, f"{task.number} {answer.name}: {said.message}"
                assert not hidden or answer.message in said.message, f"{task.number} {answer.name}: {said.message}"


@pytest.mark.parametrize("exercise", EXERCISES)
def test_equal_evidence_has_one_message(exercise):
    for task in of_exercise(exercise):
        answers = of_kind(task, "wrong")
        found = [evidence for evidence, _ in tried(task, [one.source for one in answers], 11)[1:]]
        for (one, left), (other, right) in combinations(zip(answers, found, strict=True), 2):
            if left.values is not None and right.values is not None and same(left.values, right.values):
                assert one.message == other.message, (
                    f"{task.number}: {one.name} and {other.name} have the same evidence"
                )


@pytest.mark.parametrize("exercise", EXERCISES)
def test_each_task_has_enough_answers(exercise):
    for task in of_exercise(exercise):
        assert len(of_kind(task, "wrong", "told")) >= 6, task.number
        assert len(of_kind(task, "right")) >= 2, task.number
        assert task.names and len(task.parts) >= 2 and find(task.number) is task
