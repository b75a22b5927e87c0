"""The script that the course hands out is free of the usual mistakes, and trains under torchrun."""

import inspect

import pytest

from ddp_course import script
from ddp_course.lab import show
from manyranks import audit

SOURCE = inspect.getsource(script)


def test_the_script_has_none_of_the_usual_mistakes():
    assert audit(SOURCE) == []


def test_a_planted_mistake_is_found():
    planted = SOURCE.replace("cross_entropy(parallel(", "cross_entropy(model(")
    assert planted != SOURCE
    [message] = audit(planted)
    assert "weights differ" in message


@pytest.mark.parametrize("words", ["", "ours"])
def test_torchrun_trains_with_it(words, tmp_path, capfd):
    assert show.command(
        f"torchrun --standalone --nproc-per-node=2 -m ddp_course.script {tmp_path} {words}"
    ) == [0]
    assert "epoch 2: loss" in capfd.readouterr().out
    assert (tmp_path / "checkpoint.pt").exists()
