"""Claims: verdicts follow from outcomes, and the table is what the lessons have printed."""

import json

import pytest

from ddp_course.lab import claims
from ddp_course.lab.cli import main


@pytest.mark.parametrize(
    "outcomes, verdict",
    [
        ({"a": True, "b": True}, "holds"),
        ({"a": False, "b": False}, "false"),
        ({"a": True, "b": False}, "holds only if a"),
        ({"a": True, "b": False, "c": True}, "holds only if a or c"),
        ({"K = 2": True, "K = 16": True, "K = 64": False}, "holds up to K = 16"),
        ({"K = 2": True, "K = 16": False, "K = 64": True}, "holds only if K = 2 or K = 64"),
        ({"K = 2": True, "K = 4": False}, "holds only if K = 2"),
    ],
)
def test_a_verdict_follows_from_the_outcomes(outcomes, verdict):
    assert claims.verdict(outcomes) == verdict


def test_the_table_is_what_lessons_print(tmp_path, capsys, monkeypatch):
    claims.decide(99, "Four is even.", "derived", {"always": True}, "By halves.")
    cell = {
        "outputs": [{"output_type": "stream", "name": "stdout", "text": [capsys.readouterr().out]}]
    }
    (tmp_path / "07_topic.ipynb").write_text(json.dumps({"cells": [{}, cell]}), encoding="utf-8")
    monkeypatch.setattr(claims, "course_folder", lambda name: tmp_path)
    assert claims.decided() == [(99, "Four is even.", "derived", "holds", "By halves.", "07_topic")]
    assert main(["claims"]) == 0
    assert "holds (derived)" in capsys.readouterr().out
