"""Stages on emulated devices: stage 2 drives K of them, and every stage computes the same bits."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from oracles import tiny_batches, tiny_model, weights

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
from manyranks import Device, clocks, launch
from manyranks.devices import emulation

PARAMETERS = weights(tiny_model()).numel()


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
    data = samples * 8 * (13 + 9 + 9)  # Outputs come in; the rest goes out.
    assert emulated.copied == 2 * (2 * (world_size - 1) * 8 * PARAMETERS + data)


def span_of(names):
    """Return the seconds of a step of stage 2 on these devices, and those that they worked."""
    model = problems.make("digits").model()
    stage2_dataparallel.train(model, problems.make("digits").batches(12, 1), 0.1, names)
    return clocks.now(), emulation.Emulation.current.busy_s


def test_threads_of_two_devices_work_at_the_same_time_and_those_of_one_take_turns():
    device = Device("100MFLOP/s")
    ((taken, busy),) = launch(span_of, ["cpu:0", "cpu:1"], world_size=1, device=device)
    assert taken == pytest.approx(busy / 2, rel=1e-3)  # The pool asks for idle workers.
    ((taken, busy),) = launch(span_of, ["cpu", "cpu"], world_size=1, device=device)
    assert taken == pytest.approx(busy, rel=1e-3)


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
    losses = TRAINERS[stage](model, tiny_batches(rank, world_size, steps=3), 0.1)
    current = emulation.Emulation.current
    return losses, weights(model), current and current.flops


@pytest.mark.parametrize("stage", TRAINERS)
def test_every_stage_computes_the_same_bits_on_emulated_devices(stage):
    plain = launch(train_on_rank, stage, world_size=2, device="cpu")
    emulated = launch(
        train_on_rank, stage, world_size=2, device=Device("50MFLOP/s", memory="100MB/s")
    )
    for (losses, trained, nothing), (same_losses, same_weights, flops) in zip(
        plain, emulated, strict=True
    ):
        assert losses == same_losses
        assert torch.equal(trained, same_weights)
        assert nothing is None
        assert flops > 1e4
