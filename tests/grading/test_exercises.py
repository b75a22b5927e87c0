"""Every exercise: its checks find all wrong answers and pass all right ones, and what is committed is in order."""

import json
from pathlib import Path

import nbformat
import pytest
from answers import collection, solution, tasks_of, verdicts

from ddp_course.errors import Failure, RankError
from ddp_course.grading import check
from ddp_course.grading.check_cell import CORRECT
from ddp_course.grading.examine import draw, explain
from ddp_course.grading.probing import function_named
from ddp_course.grading.tasks import find, of_exercise

ROOT = Path(__file__).parents[2]
EXERCISES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 14)
SELDOM_WRONG = [answer for number in EXERCISES for answer in collection(number) if answer.kind == "hidden"]
IMPATIENT = 1.0  # seconds that a rank waits for a message of a wrong answer


@pytest.mark.parametrize("number", EXERCISES)
def test_right_answers_pass(number):
    right = [(task, solution(task)) for task in tasks_of(number)]
    right += [(answer.task, answer.source) for answer in collection(number) if answer.right]
    for (task, source), verdict in zip(right, verdicts(right, seed=number), strict=True):
        assert verdict is None, f"{task}: {verdict}\n{source}"


@pytest.mark.parametrize("number", EXERCISES)
def test_wrong_answers_fail_with_a_word_why(number):
    wrong = [answer for answer in collection(number) if answer.kind == "wrong"]
    found = verdicts([(answer.task, answer.source) for answer in wrong], seed=11, patience=IMPATIENT)
    missed = [
        f"{answer.task} {answer.name}: {verdict!r} without {answer.words!r}"
        for answer, verdict in zip(wrong, found, strict=True)
        if verdict is None or answer.words not in verdict
    ]
    assert not missed, "\n".join(missed)


@pytest.mark.parametrize("number", EXERCISES)
def test_each_task_has_enough_answers(number):
    assert [task.number for task in of_exercise(number)] == tasks_of(number)
    assert 2 <= len(tasks_of(number)) <= 7
    for task in tasks_of(number):
        of_task = [answer for answer in collection(number) if answer.task == task]
        assert sum(answer.kind == "wrong" for answer in of_task) >= 6, task
        assert sum(answer.right for answer in of_task) >= 2, task
        assert len({answer.source for answer in of_task} | {solution(task)}) == len(of_task) + 1, task


def test_solutions_pass_hidden_tests():
    answers = [(task, solution(task)) for number in EXERCISES for task in tasks_of(number)]
    answers += [(answer.task, answer.source) for answer in SELDOM_WRONG]
    found = verdicts(answers, seed=3, hidden=True)
    assert found[: -len(SELDOM_WRONG)] == [None] * (len(answers) - len(SELDOM_WRONG))
    for answer, verdict in zip(SELDOM_WRONG, found[-len(SELDOM_WRONG) :], strict=True):
        assert verdict and answer.words in verdict, f"{answer.task} {answer.name}: {verdict!r}"


def test_hidden_tests_find_what_the_learners_checks_do_not():
    assert len({find(answer.task).exercise for answer in SELDOM_WRONG}) >= 5
    found = verdicts([(answer.task, answer.source) for answer in SELDOM_WRONG], seed=3)
    assert found == [None] * len(SELDOM_WRONG)


def test_inputs_differ_by_seed_and_by_rank():
    values = draw("4.2", 1)["values"]
    again, other = draw("4.2", 1)["values"], draw("4.2", 2)["values"]
    assert all(a.equal(b) for one, two in zip(values, again, strict=True) for a, b in zip(one, two, strict=True))
    assert not values[0][0].equal(other[0][0])
    assert not values[0][0].equal(values[1][0])
    assert not values[0][0].eq(values[0][0][0]).all()


def test_every_forbidden_function_can_be_taken_away():
    for number in EXERCISES:
        for task in of_exercise(number):
            for name in task.forbidden:
                assert not function_named(name).__code__.co_freevars, name


@pytest.mark.parametrize("reason", ["Timed out waiting 5000ms for recv", "Connection closed by peer [127.0.0.1]:9"])
def test_ranks_that_wait_are_told_so_whichever_gives_up_first(reason):
    error = RankError([Failure(1, "RuntimeError", f"[pair.cc:553] {reason}")], world_size=4)
    assert "wait for each other for ever" in explain(error, find("4.2"))


def test_every_task_says_what_it_judges():
    for number in EXERCISES:
        tasks = of_exercise(number)
        judged = [judge.__doc__ for task in tasks for _, judge in task.parts.values()]
        said = [part.__doc__ for task in tasks for part in (task.draw, task.probe)] + judged
        assert all(said), f"exercise {number}: a draw, probe or judge without a docstring"
        assert len(set(judged)) == len(judged), f"exercise {number}: two judges say the same"


def test_check_prints_one_line_or_says_what_is_wrong(capsys):
    def chunk_to_send(rank, step, world_size):
        return (rank - step) % world_size

    check("4.1", chunk_to_send)
    assert capsys.readouterr().out == f"Exercise 4.1: {CORRECT}\n"
    so_far = r"\(right so far: down to chunk 0; inputs of seed=7\)"
    with pytest.raises(Exception, match=rf"Exercise 4\.1: rank .* modulo the world size {so_far}"):
        check("4.1", lambda rank, step, world_size: rank - step, seed=7)
    with pytest.raises(ValueError, match="is how this check is called"):
        check("4.1")
    with pytest.raises(ValueError, match=r"no task 4\.9"):
        find("4.9")


@pytest.mark.parametrize("folder", ["exercises", "solutions"])
@pytest.mark.parametrize("number", EXERCISES)
def test_committed_notebooks(number, folder):
    (path,) = (ROOT / folder).glob(f"{number:02d}_*.ipynb")
    notebook = nbformat.read(path, as_version=4)
    assert (ROOT / "notebooks" / path.name).exists() or not list((ROOT / "notebooks").glob(f"{number:02d}_*")), (
        path.name
    )
    for cell in notebook.cells:
        role = cell.metadata.get("ddp_course", {}).get("role")
        text = cell.source
        assert "BEGIN SOLUTION" not in text and "HIDDEN TESTS" not in text
        if role == "answer":
            assert ("NotImplementedError" in text) == (folder == "exercises")
            assert '"""' in text, "signature and docstring stay"
        if cell.cell_type == "code" and folder == "exercises":
            assert not cell.outputs and cell.execution_count is None
        if role == "check" and folder == "solutions":
            assert [output.text for output in cell.outputs] == [
                f"Exercise {cell.metadata.ddp_course.task}: {CORRECT}\n"
            ]
    if folder == "exercises":
        assert "raise NotImplementedError" in json.dumps(notebook)
