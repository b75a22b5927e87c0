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
