"""What an emulated device is told, what it refuses, and what it says of itself."""

import pytest
import torch

from manyranks import Device, launch
from manyranks.devices.device import Reach, for_ranks
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
    assert device.cost(4e9, 1e9) == (2.0, "flops")
    assert device.cost(1e9, 3e9) == (3.0, "memory")
    assert Device("2GFLOP/s").cost(0, 1e9) == (0.0, "flops")


def test_what_kernels_reach_of_a_device():
    reach = Reach.read("products=0.5, attention=0.25,memory=0.1,launch=30us")
    assert reach == pytest.approx((0.5, 0.25, 0.1, 30e-6))
    device = Device("2GFLOP/s", "1GB/s", reach=reach)
    assert device.cost(4e9, 0) == (pytest.approx(4 + 30e-6), "flops")
    assert device.cost(4e9, 0, attends=True) == (pytest.approx(8 + 30e-6), "flops")
    assert device.cost(0, 1e9) == (pytest.approx(10 + 30e-6), "memory")
    for wrong in ("speed=1", "products=1.2", "attention=0", "memory=x", "launch=soon", ""):
        with pytest.raises(EmulationError, match=r"products=|memory=|5ms|products"):
            Reach.read(wrong)


def test_attention_is_known_by_its_operation():
    with Device("1GFLOP/s", reach=Reach(0.5, 0.25)).emulate(record=True, sleep=False) as emulation:
        query = torch.ones(1, 1, 8, 8)
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        query[0, 0] @ query[0, 0]
    takes = {each.name: each for each in emulation.operations if each.flops}
    [attention] = [each for name, each in takes.items() if "attention" in name]
    assert attention.seconds == pytest.approx(attention.flops / 0.25e9)
    assert takes["mm"].seconds == pytest.approx(takes["mm"].flops / 0.5e9)


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
    assert for_ranks(fast, 2) == [fast, fast]
    assert for_ranks([fast, slow], 2) == [fast, slow]
    with pytest.raises(EmulationError, match="2 devices for 3 ranks"):
        launch(print, world_size=3, device=[fast, slow])
    with pytest.raises(EmulationError, match="'cpu' is no Device"):
        launch(print, world_size=2, device=[fast, "cpu"])
