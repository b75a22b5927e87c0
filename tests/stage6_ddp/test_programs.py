"""A short run of the random programs of `tests/soak/programs.py`.

The long one is that file's own.
"""

import pytest
from soak import programs

from ddp_course.stage6_ddp import DistributedDataParallel


def test_torchs_class_and_ours_play_random_programs_alike():
    assert programs.run(programs.differences, 0, 8, world_size=3, batch=8) == {}


def test_stage_5_and_the_collectives_in_random_programs():
    assert programs.run(programs.other_differences, 0, 8, world_size=2, batch=8) == {}


@pytest.mark.weekly
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("play", [programs.differences, programs.other_differences])
def test_a_thousand_random_programs(play, world_size):
    assert programs.run(play, 0, 1000, world_size) == {}


class ForgetsTheLastBucket(DistributedDataParallel):
    """Hands the last bucket's gradients out without an average."""

    def make_reducer(self):
        super().make_reducer()
        start = self.reducer.start
        self.reducer.start = lambda bucket: (
            (lambda: bucket.buffer()) if bucket.is_last() else start(bucket)
        )


def faulty(first, count, reached):
    programs.CLASSES["ours"] = ForgetsTheLastBucket
    return programs.differences(first, count, reached)


def test_a_fault_is_found():
    assert programs.run(faulty, 0, 4, 2, batch=4)
