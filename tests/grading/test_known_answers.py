"""Every exercise: its checks pass all right answers, and tell each known wrong one what is wrong
with it.
"""

from itertools import combinations

import pytest
from answers import EXERCISES, ROOT, of_kind, tried

from ddp_course.checking.checks import find, known_answers, of_exercise
from ddp_course.checking.diagnosis import same


def sources(answers):
    """The texts of some known answers."""
    return [answer.source for answer in answers]


@pytest.mark.parametrize("exercise", EXERCISES)
def test_right_answers_pass(exercise):
    for task in of_exercise(exercise):
        answers = of_kind(task, "right")
        names = ["solution", *(answer.name for answer in answers)]
        for name, (_, said) in zip(names, tried(task, sources(answers), exercise), strict=True):
            assert not said.message, f"{task.number} {name}: {said.message}"


@pytest.mark.parametrize("exercise", EXERCISES)
def test_wrong_answers_are_told_what_is_wrong(exercise):
    missed = []
    for task in of_exercise(exercise):
        answers = of_kind(task, "wrong", "told")
        for answer, (evidence, said) in zip(
            answers, tried(task, sources(answers), 11)[1:], strict=True
        ):
            if not said.message or answer.message not in said.message:
                missed.append(
                    f"{task.number} {answer.name}: {said.message!r} without {answer.message!r}"
                )
            if answer.kind == "wrong" and evidence.values is None:
                missed.append(
                    f"{task.number} {answer.name}: leaves no evidence, so it is told:"
                    f" {evidence.failure}"
                )
    assert not missed, "\n".join(missed)


@pytest.mark.parametrize("number", ["7.3", "8.4", "9.1"])
def test_what_a_task_asks_for_is_in_every_draw(number):
    task = find(number)
    answers = of_kind(task, "wrong", "told")
    for seed in range(50):
        results = tried(task, sources(answers), seed)[1:]
        for answer, (_, said) in zip(answers, results, strict=True):
            assert said.message, f"{number} {answer.name}, seed {seed}"


@pytest.mark.parametrize("exercise", EXERCISES)
def test_equal_evidence_has_one_message(exercise):
    for task in of_exercise(exercise):
        answers = of_kind(task, "wrong")
        left_behind = [evidence.values for evidence, _ in tried(task, sources(answers), 11)[1:]]
        for (first, left), (second, right) in combinations(
            zip(answers, left_behind, strict=True), 2
        ):
            if left is not None and right is not None and same(left, right):
                names = f"{first.name} and {second.name}"
                assert first.message == second.message, (
                    f"{task.number}: {names} have the same evidence"
                )


@pytest.mark.parametrize("exercise", EXERCISES)
def test_each_task_has_enough_answers(exercise):
    text = (ROOT / "exercises" / "answers" / f"{exercise:02d}.py").read_text()
    assert text.count("\n# %% ") == len(known_answers(exercise)), "a header cannot be read"
    for answer in known_answers(exercise):
        assert bool(answer.message) is (answer.kind != "right"), (
            f"{answer.task} {answer.name}: a message is for a fault"
        )
    for task in of_exercise(exercise):
        assert len(of_kind(task, "wrong", "told")) >= 6, task.number
        assert len(of_kind(task, "right")) >= 2, task.number
        assert task.names and len(task.parts) >= 2 and find(task.number) is task
