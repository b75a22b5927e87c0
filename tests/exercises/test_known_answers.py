"""Every exercise: its checks pass all right answers, and tell each known wrong one why."""

from itertools import combinations

import lazy_answers
import pytest
from answers import EXERCISES, ROOT, of_kind, tried

from ddp_exercises.attempt import Attempt, Evidence
from ddp_exercises.diagnosis import same, verdict
from ddp_exercises.evidence import gather
from ddp_exercises.plain import pack
from ddp_exercises.tasks import cells_with, find, known_answers, of_exercise, solution

DRAWS = 50


def sources(answers):
    """Return the texts of some known answers."""
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
            if answer.kind == "wrong" and evidence.failure:
                missed.append(
                    f"{task.number} {answer.name}: leaves no evidence, so it is told:"
                    f" {evidence.failure}"
                )
    assert not missed, "\n".join(missed)


TASKS = [task for exercise in EXERCISES for task in of_exercise(exercise)]


@pytest.mark.weekly
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.number)
def test_what_a_task_asks_for_is_in_every_draw(task):
    """No wrong answer passes by luck: all are tried on many draws, in one launch."""
    answers = of_kind(task, "wrong")
    attempts = []
    drawn_by_chance = pack(task.inputs(0)) != pack(task.inputs(1))
    draws = DRAWS if drawn_by_chance else 1
    for seed in range(draws):
        inputs = task.inputs(seed)
        for text in (solution(task.number), *sources(answers)):
            attempts.append(Attempt(task, inputs, cells_with(task.number, text)))
    evidence = iter(gather(attempts))
    passed = []
    for seed in range(draws):
        right = next(evidence)
        for answer in answers:
            if not verdict(task, next(evidence), right, lambda: [Evidence({})]).message:
                passed.append(f"{answer.name}, seed {seed}")
    assert not passed, f"{task.number}: {passed}"


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


def test_the_table_of_lazy_answers_has_every_task():
    assert {task for task, _ in lazy_answers.lazy_answers()} == {task.number for task in TASKS}
    assert all(answer.kind != "right" for _, answer in lazy_answers.lazy_answers())
    is_new = lazy_answers.PAGE.read_text(encoding="utf-8") == lazy_answers.page()
    assert is_new, "python authoring/lazy_answers.py writes it anew"


@pytest.mark.parametrize("exercise", EXERCISES)
def test_answers_stand_by_task_in_the_order_of_tasks(exercise):
    tasks = [answer.task for answer in known_answers(exercise)]
    assert list(dict.fromkeys(tasks)) == [task.number for task in of_exercise(exercise)]
    # As a decimal number 6.10 would stand beside 6.1.
    assert tasks == sorted(tasks, key=lambda task: int(task.split(".")[1]))


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
        assert task.names
        assert len(task.parts) >= 2
        assert find(task.number) is task
