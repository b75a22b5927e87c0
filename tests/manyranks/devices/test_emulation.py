"""The emulation at work: bookings against closed forms, equal results, and hooks in time.

There may be several devices in one process.
"""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from manyranks import Device, Link, clocks, launch
from manyranks.devices import emulation, full_speed
from manyranks.errors import EmulationError


def small_net():
    """Return a convolution and a linear layer, for pictures of 8 x 8."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(16 * 8 * 8, 10))


def batches(steps=1, rank=0, world_size=1):
    """Yield a rank's share of batches of 24."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        inputs = torch.randn(24, 1, 8, 8, generator=generator)
        targets = torch.randint(10, (24,), generator=generator)
        yield inputs[rank::world_size], targets[rank::world_size]


def train(model, batches):
    """Train in place; return the loss of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model):
    """Return all parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


# What operations cost


def test_a_step_costs_its_flops_over_the_rate():
    counter = FlopCounterMode(display=False)
    with counter:
        train(small_net(), batches())
    with Device("2GFLOP/s").emulate(sleep=False) as emulated:
        train(small_net(), batches())
    assert emulated.flops == counter.get_total_flops() > 1e6
    assert emulated.busy_s == pytest.approx(emulated.flops / 2e9, rel=1e-12)


def test_attention_on_the_processor_costs_what_attention_costs():
    query, key, value = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    with Device("2GFLOP/s").emulate(sleep=False) as emulated:
        outputs = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        )
        forward = emulated.flops
        outputs.sum().backward()
    product = 2 * 2 * 3 * 16 * 16 * 8
    # The backward pass computes the scores anew.
    assert forward == 2 * product
    assert emulated.flops - forward == 5 * product


def test_memory_bounds_what_has_few_flops():
    left = torch.randn(64, 32)
    right = torch.randn(32, 16)
    with Device("1GFLOP/s", memory="100MB/s").emulate(record=True, sleep=False) as emulated:
        product = left @ right
        product.add_(1.0)
        product.view(16, 64)
        torch.empty(1000, 1000)
    multiply, add = emulated.operations
    nbytes = 4 * (64 * 32 + 32 * 16 + 64 * 16)
    assert multiply[:5] == ("mm", 0, 2 * 64 * 32 * 16, nbytes, "memory")
    assert (add.name, add.bound) == ("add_", "memory")
    assert multiply.seconds == pytest.approx(nbytes / 1e8)
    assert add.seconds == pytest.approx(2 * 4 * 64 * 16 / 1e8)
    assert add.start == multiply.end
    with Device("1GFLOP/s").emulate(sleep=False) as emulated:
        product.add_(1.0)
    assert emulated.busy_s == 0.0, "a device without memory takes no time for it"


# Time


def test_the_thread_sleeps_until_the_device_is_done():
    early = []
    model = small_net()
    start = time.perf_counter()
    with Device("10MFLOP/s").emulate(record=True) as emulated:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _: early.append(time.perf_counter() < emulated.operations[-1].end)
            )
        train(model, batches())
    assert time.perf_counter() - start >= emulated.busy_s > 0.2
    assert emulated.operations[-1].end - emulated.operations[0].start >= emulated.busy_s * 0.999
    assert early == [False] * 4, (
        "a gradient's hook fires when the device has finished it, and no earlier"
    )


def test_threads_that_only_communicate_are_not_slowed():
    with Device("1MFLOP/s").emulate() as emulated:
        thread = threading.Thread(target=lambda: torch.randn(100, 100) @ torch.randn(100, 100))
        thread.start()
        thread.join()
    assert emulated.busy_s == 0.0


def test_full_speed_ends_the_time_and_not_the_results():
    def some_at_full_speed(batches):
        yield next(batches)
        yield next(batches)
        full_speed()
        yield from batches

    with Device("2GFLOP/s").emulate(sleep=False) as two:
        train(small_net(), batches(steps=2))
    model = small_net()
    plain = small_net()
    with Device("2GFLOP/s").emulate(sleep=False) as emulated:
        train(model, some_at_full_speed(batches(steps=6)))
    train(plain, batches(steps=6))
    assert emulated.busy_s == pytest.approx(two.busy_s)
    assert torch.equal(weights(model), weights(plain))
    full_speed()  # Without an emulation there is nothing to end.


def test_nothing_is_left_behind_even_after_an_exception():
    before = torch.nn.Module.__call__, torch.autograd._engine_run_backward
    with pytest.raises(ZeroDivisionError), Device("2GFLOP/s").emulate():
        assert torch.nn.Module.__call__ is not before[0]
        raise ZeroDivisionError
    assert (torch.nn.Module.__call__, torch.autograd._engine_run_backward) == before
    with Device("2GFLOP/s").emulate(sleep=False) as emulated:
        with pytest.raises(EmulationError, match="already"), Device("1GFLOP/s").emulate():
            pass
        train(small_net(), batches())
    assert emulated.busy_s > 0


# Several devices in one process


def copies():
    """Return the moments around copies of a megabyte to another device, and back."""
    moments = [clocks.now()]
    for name in ("cpu:1", "cpu:0"):
        torch.zeros(250_000).to(name)
        moments.append(clocks.now())
    return moments


def test_copies_take_the_time_of_the_bus():
    device = Device("2GFLOP/s").over(Link("80Mbit"))
    [moments] = launch(copies, world_size=1, device=device)
    assert moments == pytest.approx([0.0, 0.1, 0.1], abs=1e-12)


def span_of(names):
    """Return the seconds of two threads that each compute on one of these devices.

    The seconds that the devices have worked are returned, too.
    """
    ((inputs, _),) = batches()
    threads = [
        threading.Thread(target=small_net().to(name), args=(inputs.to(name),)) for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return clocks.now(), emulation.Emulation.current.busy_s


def test_threads_of_two_devices_work_at_the_same_time_and_those_of_one_take_turns():
    device = Device("100MFLOP/s")
    ((taken, busy),) = launch(span_of, ["cpu:0", "cpu:1"], world_size=1, device=device)
    assert taken == pytest.approx(busy / 2, rel=1e-9)
    ((taken, busy),) = launch(span_of, ["cpu", "cpu"], world_size=1, device=device)
    assert taken == pytest.approx(busy, rel=1e-9)


# Launches


def train_on_rank():
    model = torch.nn.parallel.DistributedDataParallel(small_net())
    shares = batches(2, dist.get_rank(), dist.get_world_size())
    losses = train(model, shares)
    current = emulation.Emulation.current
    return losses, weights(model), current and current.flops


def test_torchs_own_class_computes_the_same_bits_on_emulated_devices():
    plain = launch(train_on_rank, world_size=2, device="cpu")
    device = Device("50MFLOP/s", memory="100MB/s")
    emulated = launch(train_on_rank, world_size=2, device=device)
    for (losses, trained, nothing), (same_losses, same_weights, flops) in zip(
        plain, emulated, strict=True
    ):
        assert losses == same_losses
        assert torch.equal(trained, same_weights)
        assert nothing is None
        assert flops > 1e4


def busy_on_rank():
    current = emulation.Emulation.current
    train_on_rank()
    return current.device.rate, current.busy_s * current.device.rate, current.flops


def test_every_rank_has_a_device_of_its_own():
    ranks = launch(busy_on_rank, world_size=2, device=[Device("40MFLOP/s"), Device("20MFLOP/s")])
    assert [rate for rate, _, _ in ranks] == [40e6, 20e6]
    assert all(done == pytest.approx(flops) for _, done, flops in ranks)
