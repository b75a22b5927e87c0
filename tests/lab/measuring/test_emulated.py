"""Comparisons on emulated devices: their defaults, without a launch."""

import pytest

from ddp_course import Device, Link
from ddp_course.job import make_job
from ddp_course.lab.measuring import emulated
from manyranks.errors import EmulationError

FLOPS = 783_834_624  # of a step of the digits on 192 samples, forward and backward
BYTES = 4 * 88_092


def job_of(world_size=4, cap_mb=0.1):
    return make_job("digits", world_size, 1, bucket_cap_mb=cap_mb)


def test_the_work_of_a_step():
    work = job_of().work(Device("2GFLOP/s"))
    assert work.flops == FLOPS
    assert work.compute_s == pytest.approx(FLOPS / 2e9)
    assert work.update_s == 0.0
    assert sum(layer.gradient_bytes for layer in work.layers) == BYTES
    share = job_of().work(Device("2GFLOP/s"), 4)
    assert share.compute_s == pytest.approx(work.compute_s / 4)


def test_the_default_is_a_third_of_a_second_and_links_in_proportion():
    device = emulated.default_device(job_of())
    assert FLOPS / device.rate == pytest.approx(emulated.STEP_SECONDS, rel=0.05)
    share = 8 * BYTES / emulated.default_bandwidth(job_of(), device) / emulated.STEP_SECONDS
    assert share == pytest.approx(emulated.SHARE, rel=0.1)


def test_beside_a_slow_link_the_device_is_slow_too():
    link = Link("5Mbit")
    device = emulated.default_device(job_of(), link)
    share = 8 * BYTES / link.bandwidth / (FLOPS / device.rate)
    assert share == pytest.approx(emulated.SHARE, rel=0.05)


@pytest.mark.parametrize("problem", ["digits", "synthetic"])
def test_device_and_link_are_the_same_for_any_number_of_ranks(problem):
    devices = set()
    links = set()
    for world_size in (2, 4, 16):
        job = make_job(problem, world_size, 1, global_batch=192)
        device = emulated.default_device(job)
        devices.add(device.rate)
        links.add(emulated.default_bandwidth(job, device))
    assert len(devices) == len(links) == 1


@pytest.mark.parametrize(
    "device, gpus, answer",
    [("auto", 1, True), ("auto", 0, False), ("cpu", 1, False), ("cuda:1", 2, True)],
)
def test_ranks_are_on_gpus_where_there_are_some_unless_the_processor_was_asked_for(
    device, gpus, answer, monkeypatch
):
    monkeypatch.setattr(emulated, "usable_gpus", lambda: gpus)
    assert emulated.on_gpus(device) == answer


def test_what_is_chosen():
    job = job_of()

    def chosen(device="auto", speed="auto", link="auto"):
        return emulated.device_and_link(job, device, speed, link, "virtual")

    device, link = chosen()
    assert isinstance(device, Device)
    assert isinstance(link, Link)
    assert chosen(speed="none")[0] == "auto"
    assert chosen(speed="none")[1].bandwidth == 200e6
    assert chosen(speed="5GFLOP/s")[0].rate == 5e9
    mine = Device("3GFLOP/s")
    assert chosen(device=mine, link=None) == (mine, None)
    assert chosen(link="none")[1] is None
    assert chosen(link="50Mbit")[1].bandwidth == 50e6
    assert chosen(link="5Mbit")[0].rate < device.rate


def test_spawned_ranks_have_devices_and_links_too(monkeypatch):
    monkeypatch.setenv("MANYRANKS_START", "spawn")
    device, link = emulated.device_and_link(job_of(), "auto", "auto", "auto", "virtual")
    assert isinstance(device, Device)
    assert link.mode == "virtual"


def test_gpus_are_not_slowed(monkeypatch):
    monkeypatch.setattr(emulated, "on_gpus", lambda device: device != "cpu")
    job = job_of()
    assert emulated.device_and_link(job, "auto", "auto", "auto", "virtual") == ("auto", None)
    with pytest.raises(EmulationError, match="GPUs have a speed of their own"):
        emulated.device_and_link(job, "cuda", "2GFLOP/s", "auto", "virtual")
    assert isinstance(
        emulated.device_and_link(job, "cpu", "2GFLOP/s", "auto", "virtual")[0], Device
    )
