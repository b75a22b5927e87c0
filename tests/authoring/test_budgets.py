"""Every room has a budget of lines, and one line more than that is noticed."""

import budgets


def test_a_room_beyond_its_budget_fails(monkeypatch, capsys):
    monkeypatch.setattr(
        budgets, "BUDGETS", {"ddp_course/stage1_single.py": budgets.lines("ddp_course/stage1_single.py")}
    )
    assert budgets.main() == 0
    monkeypatch.setattr(budgets, "BUDGETS", {room: lines - 1 for room, lines in budgets.BUDGETS.items()})
    assert budgets.main() == 1
    assert "TOO MANY" in capsys.readouterr().out


def test_folders_and_patterns_are_counted_whole():
    stages = [f"ddp_course/{name}.py" for name in ("stage3_paramserver", "stage4_ring")]
    assert budgets.lines("ddp_course/stage[34]_*.py") == sum(map(budgets.lines, stages)) > 100
    assert budgets.lines("ddp_course/commands") > budgets.lines("ddp_course/commands/compare.py") > 0
    assert all(budgets.lines(room) for room in budgets.BUDGETS)
