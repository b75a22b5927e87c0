"""How bucket_cap_mb="auto" measures a link, and what it makes of it: on paper, where the answer is known."""

import time

import pytest
import torch
import torch.distributed as dist

from ddp_course import launch
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


def test_a_link_without_a_price_a_byte_has_none_below_zero(monkeypatch):
    monkeypatch.setattr(automatic, "timed", lambda start, buffer, group: 1.0 if buffer.nbytes < MIB else 0.5)
    assert automatic.calibrate(None, torch.device("cpu")) == (1.0, 0.0)
    monkeypatch.setattr(automatic, "timed", lambda start, buffer, group: buffer.nbytes * 1e-9 - 1e-6)
    alpha, beta = automatic.calibrate(None, torch.device("cpu"))
    assert alpha == 0.0 and beta == pytest.approx(1e-9)


def measured_bucket():
    """What a way to communicate is given when it is timed."""
    given = []
    automatic.timed(lambda bucket: (given.append(bucket), lambda: None)[1], torch.ones(3))
    [bucket] = given
    return bucket.index(), bucket.buffer().tolist(), bucket.parameters(), bucket.is_last()


def test_what_is_timed_is_one_bucket_and_the_last():
    """A hook that keeps something for each bucket, or ends with the last one, finds what it expects."""
    assert launch(measured_bucket, world_size=1) == [(0, [1, 1, 1], [], True)]


def moments_of_a_measurement():
    """When this rank came to measure, and when its all-reduce began; one comes later than the others."""
    time.sleep(0.3 * dist.get_rank())
    moments = [time.monotonic()]

    def start(bucket):
        moments.append(time.monotonic())
        return lambda: dist.all_reduce(bucket.buffer())

    assert 0 < automatic.timed(start, torch.zeros(1)) <= time.monotonic() - moments[0]
    return moments


def test_ranks_begin_to_measure_together():
    came, began = zip(*launch(moments_of_a_measurement, world_size=2), strict=True)
    assert min(began) >= max(came), "a rank that waits for another would take that for the link"


def sizes_of(moments, alpha, beta):
    """The limit that is chosen for eight parameters of 1 MiB."""
    parameters = [torch.empty(MIB // 4) for _ in moments]
    [limit] = automatic.best_limits(parameters, (), list(range(len(moments))), moments, alpha, beta)
    return limit / MIB


def test_the_limit_follows_from_link_and_moments():
    together, apart = [0.0] * 8, [0.1 * number for number in range(8)]
    assert sizes_of(together, 1.0, 0.0) == 8, "all at once, and every message costs: one bucket"
    assert sizes_of(apart, 0.0, 0.1 / MIB) <= 1, "a message is free, and each gradient fits into the gap: one by one"
    assert sizes_of(apart, 0.05, 0.05 / MIB) <= 1, "one every 0.1 s, and one takes as long"
    assert sizes_of([0.0] * 4 + [1.0] * 4, 0.2, 0.05 / MIB) == 4, "two bursts: two buckets"
    assert [limit * 8 // MIB for limit in automatic.CANDIDATES] == [2**exponent for exponent in range(11)]


def test_a_pass_on_paper():
    parameters = [torch.empty(MIB // 4) for _ in range(4)]
    ready = dict(enumerate([0.0, 1.0, 1.1, 4.0]))
    end = automatic.end_of_communication([[0, 1], [2], [3]], parameters, ready, 0.5, 0.25 / MIB)
    assert end == pytest.approx(4.0 + 0.5 + 0.25), "the last one leaves when it is ready"
    end = automatic.end_of_communication([[0, 1], [2, 3]], parameters, {**ready, 3: 1.2}, 0.5, 0.25 / MIB)
    assert end == pytest.approx(1.0 + (0.5 + 0.5) + (0.5 + 0.5)), "the second one waits for the first"
