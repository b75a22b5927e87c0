"""Comparisons on emulated devices: their defaults and ideals, without a launch."""

import pytest

from ddp_course import Device, Link, ladder, simulate, theory
from ddp_course.commands.bench import devices as bench_devices
from ddp_course.errors import DeviceError
from ddp_course.measuring import comparison, emulated
from ddp_course.running.devices import capacity

FLOPS = 783_834_624  # of a step of the digits on 192 samples, forward and backward
BYTES = 4 * 88_092


def job_of(world_size=4, cap_mb=0.1):
    return comparison._job("digits", world_size, 1, dtype="float32", bucket_cap_mb=cap_mb)


@pytest.fixture(autouse=True)
def steady_processor(monkeypatch):
    """A machine of two cores, whose speed is known."""
    monkeypatch.setattr(capacity, "of_core", lambda: (100e9, 50e9))
    monkeypatch.setattr(emulated, "usable_cores", lambda: 2)


def test_the_work_of_a_step():
    work, flops = emulated.work_of(job_of(), Device("2GFLOP/s"))
    assert flops == FLOPS and work.seconds == pytest.approx(FLOPS / 2e9)
    ready = list(work.ready_s.values())
    assert ready[0] == max(ready) <= work.backward_s and work.update_s == 0.0
    share, _ = emulated.work_of(job_of(), Device("2GFLOP/s"), 4)
    assert share.seconds == pytest.approx(work.seconds / 4)


def test_the_default_is_a_third_of_a_second_and_links_in_proportion():
    device = emulated.default_device(job_of(), BYTES)
    assert FLOPS / device.rate == pytest.approx(emulated.STEP_SECONDS, rel=0.05)
    share = 8 * BYTES / emulated.default_bandwidth(job_of(), device, BYTES) / emulated.STEP_SECONDS
    assert share == pytest.approx(emulated.SHARE, rel=0.1)


@pytest.mark.parametrize("world_size", [2, 4])
def test_by_the_ideals_each_rung_is_a_tenth_faster_than_the_last(world_size):
    job = job_of(world_size, 0.25)
    device = emulated.default_device(job, BYTES)
    link = Link(f"{emulated.default_bandwidth(job, device, BYTES)}bit", mode="wire")
    stages = [ladder.find(key) for key in ("1", "2", "3", "4", "5", "6", "torch")]
    found = emulated.ideals(stages, job, device, link, BYTES)
    assert found["1"] > 1.1 * found["3"] > 1.1**2 * found["4"] > 1.1**3 * found["5"]
    assert found["2"] == found["3"] and found["6"] == found["torch"] == found["5"]


def test_a_slow_machine_and_a_large_model_make_slower_devices(monkeypatch):
    usual = emulated.default_device(job_of(), BYTES).rate
    assert emulated.default_device(job_of(), 50 * BYTES).rate < 0.5 * usual
    monkeypatch.setattr(capacity, "of_core", lambda: (10e9, 50e9))
    assert emulated.default_device(job_of(), BYTES).rate < 0.5 * usual


@pytest.mark.parametrize("cap_mb", [0.02, 0.1, 0.25, 25.0])
@pytest.mark.parametrize("mbit", [20, 100, 1000])
def test_the_ideal_of_buckets_is_what_the_simulator_says(cap_mb, mbit):
    job, costs = job_of(4, cap_mb), theory.Costs.of_link(mbit * 1e6)
    work, _ = emulated.work_of(job, Device("2GFLOP/s"), 4)
    ideal = emulated.ideal(ladder.find("5"), work, job, costs, BYTES)
    profile = bench_devices.profile_of(work)
    step = simulate.simulate(profile, 4, simulate.Network(costs), bucket_cap_mb=cap_mb)
    assert ideal == pytest.approx(step.step_s, rel=1e-9)
    assert work.forward_s + max(work.backward_s, 1.5 * BYTES * costs.beta) <= ideal
    assert ideal <= work.seconds + 1.5 * BYTES * costs.beta + 1e-12


def test_what_is_chosen():
    job, sizes = job_of(), {"gradient_bytes": BYTES}

    def chosen(device="auto", speed="auto", link="auto"):
        return emulated.chosen(job, sizes, device, speed, link, "0ms", "wire")

    device, link = chosen()
    assert isinstance(device, Device) and isinstance(link, Link)
    assert chosen(speed="none")[0] == "auto" and chosen(speed="none")[1].bandwidth == 200e6
    assert chosen(speed="5GFLOP/s")[0].rate == 5e9
    mine = Device("3GFLOP/s")
    assert chosen(device=mine, link=None) == (mine, None) and chosen(link="none")[1] is None
    assert chosen(link="50Mbit")[1].bandwidth == 50e6 and chosen(link="5Mbit")[0].rate < device.rate


def test_gpus_are_not_slowed(monkeypatch):
    monkeypatch.setattr(emulated, "on_gpus", lambda device: device != "cpu")
    job, sizes = job_of(), {"gradient_bytes": BYTES}
    assert emulated.chosen(job, sizes, "auto", "auto", "auto", "0ms", "wire") == ("auto", None)
    with pytest.raises(DeviceError, match="GPUs have a speed of their own"):
        emulated.chosen(job, sizes, "cuda", "2GFLOP/s", "auto", "0ms", "wire")
    assert isinstance(emulated.chosen(job, sizes, "cpu", "2GFLOP/s", "auto", "0ms", "wire")[0], Device)
