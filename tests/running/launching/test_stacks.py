"""Who is waited for, when time runs out: from the flight recorder's calls, and from stacks."""

import pytest

from ddp_course.running.flight_recorder import Call, marks
from ddp_course.running.launching.stacks import missing_from_ours, missing_from_torchs

ALL = (0, 1, 2)
PAIR = (0, 1)


def call(sequence, members=ALL, begin=0.0, end=0.0):
    return Call(0, len(members), sequence, begin, end, marks(tuple(members)), b"all")


@pytest.mark.parametrize(
    "calls, missed",
    [
        (  # a rank is a call behind
            {0: [call(1, end=1.0), call(2)], 1: [call(1, end=1.0)], 2: [call(1, end=1.0), call(2)]},
            ("all, call 2", [0, 2], [1]),
        ),
        ({0: [call(1)], 2: [call(1)]}, ("all, call 1", [0, 2], [1])),  # rank 1 never entered any
        ({0: [call(1, PAIR)], 1: []}, ("all, call 1", [0], [1])),  # only members of the group count
        # rank 0 waits for rank 1 in a pair, which waits for rank 2 in the whole group
        ({0: [call(1, PAIR, begin=1)], 1: [call(1, begin=2)], 2: []}, ("all, call 1", [1], [2])),
        ({rank: [call(1)] for rank in ALL}, None),
        ({rank: [call(1, end=1.0)] for rank in ALL}, None),
        ({}, None),
    ],
)
def test_the_rank_that_the_others_wait_for_is_missed(calls, missed):
    assert missing_from_ours(calls) == missed


@pytest.mark.parametrize(
    "entered, missed",
    [
        ({0: "barrier", 1: ""}, ("torch.distributed.barrier", [0], [1])),
        ({0: "barrier", 1: "broadcast", 2: ""}, None),
        ({0: "barrier", 1: "barrier"}, None),
        ({0: "", 1: ""}, None),
        ({0: "recv", 1: ""}, None),
    ],
)
def test_torchs_own_are_named_only_when_that_is_sure(entered, missed):
    assert missing_from_torchs(entered) == missed
