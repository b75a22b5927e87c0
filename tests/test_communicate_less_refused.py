"""Settings of lossy hooks and of local SGD that cannot be."""

import pytest
from torch.nn import Linear

from ddp_course import launch
from ddp_course.communicate_less import LowRank, TopK, train_asynchronously, train_local

FROZEN = Linear(2, 2).requires_grad_(False)
REFUSED = {
    "share is -1": lambda: TopK(-1),
    "share is 2": lambda: TopK(2),
    "share is 0": lambda: TopK(0),
    "share is nan": lambda: TopK(float("nan")),
    "rank is 0": lambda: LowRank(0),
    "rank is -1": lambda: LowRank(-1),
    "rank is 1.5": lambda: LowRank(1.5),
    "every is 0": lambda: train_local(Linear(2, 2), [], 0.1, every=0),
    "every is -1": lambda: train_local(Linear(2, 2), [], 0.1, every=-1),
    "every is 2.5": lambda: train_local(Linear(2, 2), [], 0.1, every=2.5),
    "no trainable parameters": lambda: train_local(FROZEN, [], 0.1, every=1),
    "the model has no trainable": lambda: train_asynchronously(FROZEN, [], 0.1),
}


def messages():
    told = {}
    for words, call in REFUSED.items():
        with pytest.raises(ValueError) as raised:
            call()
        told[words] = str(raised.value)
    return told


def test_settings_that_cannot_be_are_refused():
    for told in launch(messages, world_size=2):
        assert {words: message for words, message in told.items() if words not in message} == {}
