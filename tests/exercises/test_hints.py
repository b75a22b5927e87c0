"""Each task has three hints, and they are shown one by one."""

import pytest
from answers import EXERCISES, ROOT

from ddp_exercises import hint
from ddp_exercises.hints import LEVELS, all_hints
from ddp_exercises.tasks import of_exercise, solution


def test_every_task_has_three_hints_that_are_not_the_answer():
    tasks = [task.number for exercise in EXERCISES for task in of_exercise(exercise)]
    assert list(all_hints()) == tasks
    for task, hints in all_hints().items():
        assert len(set(hints)) == LEVELS, task
        assert all(20 < len(one) < 200 for one in hints), task
        lines = {line.strip() for line in solution(task).splitlines() if len(line.strip()) > 25}
        assert not [line for line in lines for one in hints if line in one], task


def test_exercises_give_no_hint_before_one_is_asked_for():
    for path in (ROOT / "exercises").glob("[0-9]*.ipynb"):
        text = path.read_text()
        assert "<details>" not in text, path.name
        assert "import check, hint" in text, path.name
        assert 'hint(\\"' in text, path.name


def test_hints_are_shown_one_by_one(capsys):
    for level in (1, 2, 3):
        hint("4.2", level)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("Hint 1 of 3 for 4.2: ")
    assert first.endswith('hint("4.2", 2) says more.')
    assert second != first
    assert "says more" not in third
    with pytest.raises(ValueError, match=r"no task 4\.99"):
        hint("4.99")
    with pytest.raises(ValueError, match="hints 1 to 3"):
        hint("4.2", 4)
