"""The script that the course hands out is free of the usual mistakes; each of them, planted, is found."""

import inspect

import pytest

from ddp_course import script
from ddp_course.measuring.audit import audit

SOURCE = inspect.getsource(script)
MISTAKES = {
    "no DistributedSampler": ("sampler=sampler)", "shuffle=True)"),
    "set_epoch is not called": ("        sampler.set_epoch(epoch)\n", ""),
    "weights differ": ("cross_entropy(parallel(", "cross_entropy(model("),
    "all write": ("if dist.get_rank() == 0:", "if True:"),
    'begin with "module."': ("model.state_dict()", "parallel.state_dict()"),
}


def test_the_script_has_none_of_them():
    assert audit(SOURCE) == []


@pytest.mark.parametrize("words", MISTAKES)
def test_a_planted_mistake_is_found_and_no_other(words):
    right, wrong = MISTAKES[words]
    assert SOURCE.count(right) == 1
    found = audit(SOURCE.replace(right, wrong))
    assert len(found) == 1 and words in found[0], found


@pytest.mark.parametrize("words", ["", "ours"])
def test_torchrun_trains_with_it(words, tmp_path, capfd):
    from ddp_course import show

    assert show.command(f"torchrun --standalone --nproc-per-node=2 -m ddp_course.script {tmp_path} {words}") == [0]
    assert "epoch 2: loss" in capfd.readouterr().out and (tmp_path / "checkpoint.pt").exists()
