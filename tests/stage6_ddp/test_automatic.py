"""How bucket_cap_mb="auto" measures a link, and what it makes of it: on paper, where the answer is
known.
"""

import pytest
import torch

from ddp_course.stage6_ddp import automatic
from ddp_course.stage6_ddp.buckets import MIB

ALPHA, BETA = 2e-3, 1e-9  # a message takes 2 ms and a byte 1 ns


def test_a_line_through_two_sizes(monkeypatch):
    """Of several repetitions the shortest counts: the others were disturbed."""
    asked, disturbed = [], iter([3.0, 0.0, 5.0, 7.0] * 2)

    def timed(start, buffer, group):
        asked.append(buffer.nbytes)
        return ALPHA + BETA * buffer.nbytes + next(disturbed)

    monkeypatch.setattr(automatic, "timed", timed)
    alpha, beta = automatic.calibrate(None, torch.device("cpu"))
    assert alpha == pytest.approx(ALPHA) and beta == pytest.approx(BETA)
    assert asked == [4096] * 4 + [4 * MIB] * 4, "three repetitions and one to warm up"


def sizes_of(moments, alpha, beta):
    """The limit that is chosen for eight parameters of 1 MiB."""
    parameters = [torch.empty(MIB // 4) for _ in moments]
    [limit] = automatic.best_limits(parameters, (), list(range(len(moments))), moments, alpha, beta)
    return limit / MIB


def test_the_limit_follows_from_link_and_moments():
    together, apart = [0.0] * 8, [0.1 * number for number in range(8)]
    assert sizes_of(together, 1.0, 0.0) == 8, "all at once, and every message costs: one bucket"
    assert sizes_of(apart, 0.0, 0.1 / MIB) <= 1, (
        "a message is free, and each gradient fits into the gap: one by one"
    )
    assert sizes_of(apart, 0.05, 0.05 / MIB) <= 1, "one every 0.1 s, and one takes as long"
    assert sizes_of([0.0] * 4 + [1.0] * 4, 0.2, 0.05 / MIB) == 4, "two bursts: two buckets"
    shortly_after = [0.01 * number for number in range(8)]
    assert sizes_of(shortly_after, 0.02, 0.1 / MIB) == 4, (
        "bytes take time: the first half leaves before the second"
    )
    assert [limit * 8 // MIB for limit in automatic.CANDIDATES] == [
        2**exponent for exponent in range(11)
    ]
