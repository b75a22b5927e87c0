"""What steps should take: the ideals beside closed forms, without a launch."""

import pytest

from ddp_course import Device, Link, ladder
from ddp_course.job import make_job
from ddp_course.lab import theory
from ddp_course.lab.measuring import emulated, ideals

BYTES = 4 * 88_092
DEVICE = Device("2GFLOP/s")


def job_of(world_size=4, cap_mb=0.1, problem="digits"):
    return make_job(problem, world_size, 1, bucket_cap_mb=cap_mb)


@pytest.mark.parametrize("world_size", [2, 4])
def test_by_the_ideals_each_rung_is_a_tenth_faster_than_the_last(world_size):
    job = job_of(world_size, 0.25)
    device = emulated.default_device(job)
    link = Link(f"{emulated.default_bandwidth(job, device)}bit")
    stages = [ladder.find(key) for key in ("1", "2", "3", "4", "5", "6", "torch")]
    ms = ideals.ideals(stages, job, device, link)
    assert ms["1"] > 1.1 * ms["3"] > 1.1**2 * ms["4"] > 1.1**3 * ms["5"]
    assert ms["3"] < ms["2"] < 1.02 * ms["3"], "stage 2 copies inputs and outputs, too"
    assert ms["6"] == ms["torch"] == ms["5"]


@pytest.mark.parametrize("cap_mb", [0.02, 0.1, 0.25, 25.0])
@pytest.mark.parametrize("mbit", [20, 100, 1000])
def test_buckets_leave_when_they_are_full_and_one_after_another(cap_mb, mbit):
    job = job_of(4, cap_mb)
    costs = theory.Costs.of_link(mbit * 1e6)
    work = job.work(DEVICE, 4)
    sizes = [layer.gradient_bytes for layer in work.layers if layer.gradient_bytes]
    assert sizes == [parameter.nbytes for parameter in job.model().parameters()]
    assert sum(sizes) == BYTES
    ideal = ideals.overlapped_seconds(ladder.find("5"), job, DEVICE, costs)
    sending = 1.5 * BYTES * costs.beta
    assert max(work.compute_s, sending) <= ideal <= work.compute_s + sending + 1e-12
    whole = ideals.overlapped_seconds(ladder.find("5"), job_of(4, 1e6), DEVICE, costs)
    assert whole == pytest.approx(work.compute_s + sending)
    assert ideal <= whole + 1e-12


@pytest.mark.parametrize("problem", ["digits", "bytes"])
def test_fully_sharded_takes_its_compute_or_its_traffic_or_something_in_between(problem):
    job = job_of(problem=problem)
    stage = ladder.find("7")
    compute_s = job.work(DEVICE, 4).compute_s
    p = job.gradient_bytes

    def seconds(bits_per_second):
        return ideals.gathered_seconds(stage, job, DEVICE, theory.Costs.of_link(bits_per_second))

    traffic_s = 8 * 3 * 0.75 * p / 1e3
    assert seconds(1e18) == pytest.approx(compute_s)
    assert seconds(1e3) == pytest.approx(traffic_s, rel=0.01)
    assert seconds(1e3) >= traffic_s
    assert compute_s < seconds(8 * 3 * 0.75 * p / compute_s) < 2 * compute_s


def test_prefetch_hides_gathers_but_for_the_first_of_each_pass():
    """There are three equal blocks, whose gathers and sums take as long as a forward pass, 1."""
    events = [(0.0, "forward", 0), (1.0, "forward", 1), (2.0, "forward", 2)]
    events += [
        (3.0, "backward", 2),
        (5.0, "done", 2),
        (5.0, "backward", 1),
        (7.0, "done", 1),
        (7.0, "backward", 0),
    ]
    events += [(9.0, "done", 0), (9.0, "end", 0)]
    seconds = ideals.passes_seconds(events, [2, 2, 2], 2, theory.Costs(0.0, 1.0))
    assert seconds == 1 + 3 + 1 + 6 + 1  # these are gather, forward, gather, backward and sum
    assert ideals.passes_of(events) == ([1, 1, 1], [2, 2, 2])
    assert ideals.passes_seconds(events, [2, 2, 2], 2, theory.Costs(0.0, 0.0)) == 9.0


@pytest.mark.parametrize("problem", ["digits", "bytes"])
def test_a_pipeline_without_latency_takes_its_compute_and_the_bubble(problem):
    """One rank has no bubble; four take a quarter of the work, and others' passes in a row.

    A quarter is the least that they take.
    """
    alone, four = (
        ideals.pipelined_seconds(
            ladder.find("8"), job_of(ranks, problem=problem), DEVICE, theory.Costs(0.0, 0.0)
        )
        for ranks in (1, 4)
    )
    assert alone == pytest.approx(job_of(problem=problem).work(DEVICE).compute_s)
    assert alone / 4 * (1 + 3 / ideals.MICROBATCHES) <= four < alone
