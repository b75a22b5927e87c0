"""The emulation at work: bookings against closed forms, equal results, hooks in time, and stage 2's
K devices.
"""

import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from oracles import tiny_batches, tiny_model, weights
from torch.utils.flop_counter import FlopCounterMode

from ddp_course import (
    problems,
    stage1_single,
    stage2_dataparallel,
    stage3_paramserver,
    stage4_ring,
    stage5_bucketed,
    stage6_ddp,
    stage7_sharded,
    stage8_pipeline,
    stage9_tensor,
)
from manyranks import Device, Link, clocks, launch
from manyranks.devices import emulation, full_speed
from manyranks.errors import EmulationError

PARAMETERS = weights(tiny_model()).numel()


def digits_step(samples=12):
    digits = problems.make("digits")
    return partial(stage1_single.train, digits.model(), list(digits.batches(samples, 1)), 0.1)


# What operations cost


def test_a_step_costs_its_flops_over_the_rate():
    counter = FlopCounterMode(display=False)
    with counter:
        digits_step()()
    with Device("2GFLOP/s").emulate(sleep=False) as emulated:
        digits_step()()
    assert emulated.flops == counter.get_total_flops() > 1e7
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
    assert forward == 2 * product and emulated.flops - forward == 5 * product


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
    assert multiply[:5] == ("mm", 0, 2 * 64 * 32 * 16, nbytes, "memory") and (
        add.name,
        add.bound,
    ) == ("add_", "memory")
    assert multiply.seconds == pytest.approx(nbytes / 1e8)
    assert add.seconds == pytest.approx(2 * 4 * 64 * 16 / 1e8) and add.start == multiply.end
    with Device("1GFLOP/s").emulate(sleep=False) as emulated:
        product.add_(1.0)
    assert emulated.busy_s == 0.0, "a device without memory takes no time for it"


# Time


def test_the_thread_sleeps_until_the_device_is_done():
    digits = problems.make("digits")
    early = []
    model = digits.model()
    batches = digits.batches(12, 1)
    start = time.perf_counter()
    with Device("200MFLOP/s").emulate(record=True) as emulated:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _: early.append(time.perf_counter() < emulated.operations[-1].end)
            )
        stage1_single.train(model, batches, 0.1)
    assert time.perf_counter() - start >= emulated.busy_s > 0.2
    assert emulated.operations[-1].end - emulated.operations[0].start >= emulated.busy_s * 0.999
    assert early == [False] * 10, (
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
        stage1_single.train(tiny_model(), tiny_batches(steps=2), 0.1)
    model = tiny_model()
    plain = tiny_model()
    with Device("2GFLOP/s").emulate(sleep=False) as emulated:
        stage1_single.train(model, some_at_full_speed(tiny_batches(steps=6)), 0.1)
    stage1_single.train(plain, tiny_batches(steps=6), 0.1)
    assert emulated.busy_s == pytest.approx(two.busy_s) and torch.equal(
        weights(model), weights(plain)
    )
    full_speed()  # without an emulation there is nothing to end


def test_nothing_is_left_behind_even_after_an_exception():
    before = torch.nn.Module.__call__, torch.autograd._engine_run_backward
    with pytest.raises(ZeroDivisionError), Device("2GFLOP/s").emulate():
        assert torch.nn.Module.__call__ is not before[0]
        raise ZeroDivisionError
    assert (torch.nn.Module.__call__, torch.autograd._engine_run_backward) == before
    with Device("2GFLOP/s").emulate(sleep=False) as emulated:
        with pytest.raises(EmulationError, match="already"), Device("1GFLOP/s").emulate():
            pass
        digits_step()()
    assert emulated.busy_s > 0


# Stage 2: K devices in one process


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_stage_2_drives_as_many_devices_and_its_bus_carries_the_model_out_and_the_gradients_in(
    world_size,
):
    names = [f"cpu:{number}" for number in range(world_size)]
    model = tiny_model()
    plain = tiny_model()
    device = Device("2GFLOP/s")
    with device.emulate(sleep=False) as emulated:
        stage2_dataparallel.train(model, tiny_batches(steps=2), 0.1, names)
    stage2_dataparallel.train(plain, tiny_batches(steps=2), 0.1, names)
    assert torch.equal(weights(model), weights(plain))
    with device.emulate(sleep=False) as single:
        stage1_single.train(tiny_model(), tiny_batches(steps=2), 0.1)
    shares = [emulated.busy[number] for number in range(world_size)]
    assert sum(shares) == pytest.approx(single.busy_s)
    assert shares == pytest.approx([single.busy_s / world_size] * world_size)
    samples = 24 * (world_size - 1) // world_size
    data = samples * 8 * (13 + 9 + 9)  # inputs and the outputs' gradients out, outputs in
    assert emulated.copied == 2 * (2 * (world_size - 1) * 8 * PARAMETERS + data)


def copies():
    """Moments around copies of a megabyte to another device, and back."""
    moments = [clocks.now()]
    for name in ("cpu:1", "cpu:0"):
        torch.zeros(250_000).to(name)
        moments.append(clocks.now())
    return moments, emulation.Emulation.current.copied


def test_copies_take_the_time_of_the_bus():
    device = Device("2GFLOP/s").over(Link("80Mbit"))
    ((moments, copied),) = launch(copies, world_size=1, device=device)
    assert moments == pytest.approx([0.0, 0.1, 0.1], abs=1e-12) and copied == 1_000_000


def span_of(names):
    """Seconds of a step of stage 2 on these devices, and seconds that they have worked."""
    model = problems.make("digits").model()
    stage2_dataparallel.train(model, problems.make("digits").batches(12, 1), 0.1, names)
    return clocks.now(), emulation.Emulation.current.busy_s


def test_threads_of_two_devices_work_at_the_same_time_and_those_of_one_take_turns():
    device = Device("100MFLOP/s")
    ((taken, busy),) = launch(span_of, ["cpu:0", "cpu:1"], world_size=1, device=device)
    assert taken == pytest.approx(busy / 2, rel=1e-3)  # the pool asks for idle workers, 10 us each
    ((taken, busy),) = launch(span_of, ["cpu", "cpu"], world_size=1, device=device)
    assert taken == pytest.approx(busy, rel=1e-3)


# Launches

TRAINERS = {
    "3": stage3_paramserver.train,
    "4": stage4_ring.train,
    "5": partial(stage5_bucketed.train, bucket_cap_mb=0.002),
    "6": partial(stage6_ddp.train, bucket_cap_mb=0.002),
    "7": stage7_sharded.train,
    "8": stage8_pipeline.train,
    "9": stage9_tensor.train,
}


def train_on_rank(stage):
    model = tiny_model()
    rank, world_size = (0, 1) if stage in "89" else (dist.get_rank(), dist.get_world_size())
    batches = tiny_batches(rank, world_size, steps=3)
    if stage == "torch":
        parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)
        losses = stage1_single.train(parallel, batches, 0.1)
    else:
        losses = TRAINERS[stage](model, batches, 0.1)
    current = emulation.Emulation.current
    return losses, weights(model), current and current.flops


@pytest.mark.parametrize("stage", [*TRAINERS, "torch"])
def test_every_stage_computes_the_same_bits_on_emulated_devices(stage):
    plain = launch(train_on_rank, stage, world_size=2, device="cpu")
    emulated = launch(
        train_on_rank, stage, world_size=2, device=Device("50MFLOP/s", memory="100MB/s")
    )
    for (losses, trained, nothing), (same_losses, same_weights, flops) in zip(
        plain, emulated, strict=True
    ):
        assert losses == same_losses and torch.equal(trained, same_weights)
        assert nothing is None and flops > 1e4


def busy_on_rank():
    current = emulation.Emulation.current
    train_on_rank("3")
    return current.device.rate, current.busy_s * current.device.rate, current.flops


def test_every_rank_has_a_device_of_its_own():
    ranks = launch(busy_on_rank, world_size=2, device=[Device("40MFLOP/s"), Device("20MFLOP/s")])
    assert [rate for rate, _, _ in ranks] == [40e6, 20e6]
    assert all(done == pytest.approx(flops) for _, done, flops in ranks)
