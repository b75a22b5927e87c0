"""What an emulated device is told, what it refuses, and what it says of itself."""

import pytest

from manyranks import Device, launch
from manyranks.devices.device import for_ranks
from manyranks.errors import EmulationError


@pytest.mark.parametrize(
    "options, words",
    [
        ({"rate": "fast"}, "cannot read the rate"),
        ({"rate": "0GFLOP/s"}, "more than zero"),
        ({"rate": "1e400GFLOP/s"}, "out of range"),
        ({"rate": "2GB/s"}, "2GFLOP/s"),
        ({"rate": "2GFLOP/s", "memory": "lots"}, "5GB/s"),
    ],
)
def test_impossible_devices_are_refused(options, words):
    with pytest.raises(EmulationError, match=words):
        Device(**options)


def test_a_roofline_has_two_sides():
    device = Device("2GFLOP/s", memory="1GB/s")
    assert device.seconds(4e9, 1e9) == (2.0, "flops") and device.seconds(1e9, 3e9) == (
        3.0,
        "memory",
    )
    assert Device("2GFLOP/s").seconds(0, 1e9) == (0.0, "flops")


def test_known_accelerators():
    device = Device("A100")
    assert (device.rate, device.memory) == (pytest.approx(312e12), pytest.approx(2.039e12))
    assert str(device).startswith("A100 (312 TFLOP/s")
    with pytest.raises(EmulationError, match=r"unknown device.*A100"):
        Device("B52")


def test_a_name_may_be_an_alias_and_a_given_memory_counts():
    device = Device("H100-80GB", memory="1TB/s")
    assert (device.rate, device.memory, device.capacity) == (989e12, 1e12, 80e9)
    assert Device("2GFLOP/s").capacity is None


def test_one_device_for_all_ranks_or_one_for_each():
    fast = Device("20MFLOP/s")
    slow = Device("10MFLOP/s")
    assert for_ranks(fast, 2) == [fast, fast] and for_ranks([fast, slow], 2) == [fast, slow]
    with pytest.raises(EmulationError, match="2 devices for 3 ranks"):
        launch(print, world_size=3, device=[fast, slow])
    with pytest.raises(EmulationError, match="'cpu' is no Device"):
        launch(print, world_size=2, device=[fast, "cpu"])
