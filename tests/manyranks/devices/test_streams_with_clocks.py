"""A device with streams: the host runs ahead, and torch's own classes overlap as on a GPU."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers_of_sizes import GPT, Costs, step_of_fully_shard

from manyranks import Device, Link, clocks, launch
from manyranks.clocks import streams
from manyranks.errors import EmulationError

FLOPS = 100e9
WIDTH = 128
HEADS = 4
LAYERS = 4
VOCABULARY = 512
BATCH = 2
SEQ = 64


def sharded_steps(steps, has_values, reshard=True):
    """Return the moments of steps under torch's `fully_shard`, and losses if there are values."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = GPT(WIDTH, HEADS, LAYERS, VOCABULARY)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    seconds = []
    losses = []
    for _ in range(steps):
        dist.barrier()
        start = clocks.now()
        words = torch.randint(0, VOCABULARY, (BATCH, SEQ))
        loss = F.cross_entropy(model(words).flatten(0, 1).float(), words.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(clocks.now() - start)
        if has_values:
            losses.append(loss.item())
    return seconds, losses


def foretold(ranks, link, reshard=True):
    costs = Costs(ranks, WIDTH, VOCABULARY, BATCH, SEQ, FLOPS, link.bandwidth)
    return step_of_fully_shard(costs, LAYERS, reshard)


@pytest.mark.parametrize("bandwidth", ["10Mbit", "1Gbit", "4Gbit", "40Gbit"])
def test_fully_shard_overlaps_as_the_recurrence_says_to_the_picosecond(bandwidth):
    link = Link(bandwidth)
    device = Device("100GFLOP/s", streams=True)
    results = launch(
        sharded_steps, 2, False, world_size=2, device=device, link=link, sizes_only=True
    )
    for seconds, _ in results:
        assert seconds == [pytest.approx(foretold(2, link), abs=1e-12)] * 2


def test_parameters_that_stay_gathered_are_not_gathered_again():
    link = Link("1Gbit")
    device = Device("100GFLOP/s", streams=True)
    results = launch(
        sharded_steps, 1, False, False, world_size=2, device=device, link=link, sizes_only=True
    )
    kept = foretold(2, link, reshard=False)
    assert results == [([pytest.approx(kept, abs=1e-12)], [])] * 2
    assert kept < 0.85 * foretold(2, link)


def test_with_values_the_times_are_the_same_and_the_losses_are_those_without_streams():
    link = Link("4Gbit")
    with_streams, without = (
        launch(
            sharded_steps,
            2,
            True,
            world_size=2,
            device=Device("100GFLOP/s", streams=having),
            link=link,
        )
        for having in (True, False)
    )
    for (seconds, losses), (longer, same) in zip(with_streams, without, strict=True):
        assert seconds == [pytest.approx(foretold(2, link), abs=1e-12)] * 2
        assert losses == same
        assert min(longer) > 1.3 * max(seconds)


def host_and_device():
    """Return the host's moment after each of these lines, in units of one product of 100 x 100."""
    one = 2 * 100**3 / FLOPS
    moments = []

    def note():
        moments.append(round(clocks.now() / one, 6))

    left = torch.ones(100, 100)
    product = left @ left
    note()
    product.sum().item()
    note()
    side = torch.cpu.Stream()
    left @ left
    with torch.cpu.stream(side):
        left @ left
        done = side.record_event()
    torch.cpu.current_stream().wait_event(done)
    left @ left
    note()
    done.synchronize()
    note()
    torch.cpu.synchronize()
    note()
    parameter = nn.Parameter(torch.ones(()))
    parameter.grad = torch.ones(())
    left @ left
    torch.optim.AdamW([parameter], foreach=False).step()  # The optimizer reads its count of steps.
    note()
    left.tolist()
    note()
    return moments


def test_the_host_waits_where_it_asks_for_something_and_nowhere_else():
    device = Device("100GFLOP/s", streams=True)
    [moments] = launch(host_and_device, world_size=1, device=device)
    assert moments == [0, 1, 1, 2, 3, 3, 4]


def messages_on_streams():
    """Rank 0 computes and sends; rank 1 receives, computes, and a late rank holds up both."""
    left = torch.ones(100, 100)
    if dist.get_rank() == 0:
        message = left @ left
        dist.isend(message, 1).wait()
    else:
        message = torch.zeros(100, 100)
        dist.irecv(message, 0).wait()
        message @ left
    early = clocks.now()
    value = message.sum().item()
    torch.cpu.synchronize()
    return early, clocks.now(), value


def test_a_message_leaves_when_it_has_been_computed():
    device = Device("100GFLOP/s", streams=True)
    sent, received = launch(messages_on_streams, world_size=2, device=device, link=Link("1Gbit"))
    product = 2 * 100**3 / FLOPS
    transfer = 8 * 40_000 / 1e9
    assert sent == (0.0, pytest.approx(product + transfer, abs=1e-12), 1e6)
    assert received == (0.0, pytest.approx(2 * product + transfer, abs=1e-12), 1e6)


def test_streams_need_virtual_time():
    with pytest.raises(EmulationError, match="in a launch"):
        with Device("1GFLOP/s", streams=True).emulate():
            pass
    assert not streams.are_on()
