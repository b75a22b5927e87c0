"""Communicating less: without loss the result is DDP's, and what is left out is kept.

It is kept or counted.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from ddp_course import (
    DistributedDataParallel,
    communicate_less,
    launch,
    problems,
    stage1_single,
    stage4_ring,
    wire,
)

RATE = 0.05
STEPS = 6
MOMENTUM = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def small_problem():
    return problems.make("synthetic", parameters=3 * 32**2, width=32, dtype=torch.float64)


def flat(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def on_rank(way, steps=STEPS):
    """Return (weights, bytes sent) of one rank after some steps of `way(model, batches)`."""
    problem = small_problem()
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    model = problem.model()
    with wire.counting() as traffic:
        way(model, problem.batches(24, steps, rank=rank, world_size=world_size))
    return flat(model), traffic.bytes_sent


def ring(model, batches):
    stage4_ring.train(model, batches, RATE)


def hooked(hook):
    def way(model, batches):
        parallel = DistributedDataParallel(model)
        parallel.register_comm_hook(None, hook)
        optimizer = SGD(model.parameters(), lr=RATE)
        for inputs, targets in batches:
            optimizer.zero_grad()
            cross_entropy(parallel(inputs), targets).backward()
            optimizer.step()

    return way


def local(every, **outer):
    make = partial(SGD, **outer) if outer else None

    def way(model, batches):
        communicate_less.train_local(model, batches, RATE, every, make)

    return way


def run(way, world_size=4, **options):
    ranks = launch(on_rank, way, world_size=world_size, device="cpu", **options)
    weights = [each for each, _ in ranks]
    return weights, max(sent for _, sent in ranks)


@pytest.fixture(scope="module")
def averaged():
    return run(ring)[0][0]


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(hooked(communicate_less.TopK(1.0)), id="all of the top"),
        pytest.param(hooked(communicate_less.LowRank(32)), id="full rank"),
        pytest.param(local(1), id="local for one step"),
        pytest.param(local(1, lr=1.0), id="an outer step along the mean"),
    ],
)
def test_where_nothing_is_left_out_it_is_ddp(way, averaged):
    weights, _ = run(way)
    assert all((each - averaged).abs().max() < 1e-10 for each in weights)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(hooked(communicate_less.fp16_hook), id="half precision"),
        pytest.param(hooked(communicate_less.TopK(0.1)), id="top"),
        pytest.param(hooked(communicate_less.LowRank(2)), id="low rank"),
        pytest.param(local(3), id="local"),
        pytest.param(local(3, **MOMENTUM), id="DiLoCo"),
    ],
)
def test_replicas_end_equal_near_to_ddp_and_not_as_ddp(way, averaged):
    weights, _ = run(way)
    assert all(torch.equal(weights[0], other) for other in weights)
    moved = (averaged - flat(small_problem().model())).norm()
    off = (weights[0] - averaged).norm()
    assert 0 < off < 0.9 * moved, (off, moved)


def test_replicas_that_have_not_met_yet_differ():
    weights, sent = run(local(STEPS + 1))
    assert not torch.equal(weights[0], weights[1])
    start = flat(small_problem().model())
    assert sent == 3 * start.numel() * 8 + 6 * 8, (
        "nothing but the broadcast of rank 0, and that this is the end"
    )


def test_bytes_are_those_of_the_formulas():
    nbytes = flat(small_problem().model()).numel() * 8
    world_size = 4

    def sent(way):
        return run(way)[1] - run(way, steps=STEPS - 3)[1]  # of three steps, without the beginning

    ring_bytes = 2 * (world_size - 1) / world_size * nbytes
    assert sent(ring) == 3 * ring_bytes
    assert sent(hooked(communicate_less.fp16_hook)) == 3 * ring_bytes / 4  # float64 to float16
    kept = round(0.1 * nbytes / 8)
    assert sent(hooked(communicate_less.TopK(0.1))) == 3 * (world_size - 1) * kept * (8 + 4)
    thin = 3 * 2 * (32 + 32) * 8  # three matrices, two columns each way
    assert sent(hooked(communicate_less.LowRank(2))) == 3 * 2 * (world_size - 1) / world_size * thin
    assert sent(local(3)) == ring_bytes + 6 * 8, (
        "and which step it is for each rank, around the ring"
    )


def test_what_is_left_out_is_sent_later():
    """With feedback all that was ever computed is either sent or still kept.

    Without it, that is lost.
    """
    weights = {}
    for feedback in (True, False):
        hook = communicate_less.TopK(0.02, feedback)
        weights[feedback] = run(hooked(hook), steps=40)[0][0]
    long = run(ring, steps=40)[0][0]
    assert (weights[True] - long).norm() < 0.7 * (weights[False] - long).norm()


def asynchronous(steps):
    problem = small_problem()
    model = small_problem().model()
    batches = problem.batches(
        24, steps, rank=max(0, dist.get_rank() - 1), world_size=max(1, dist.get_world_size() - 1)
    )
    losses, staleness = communicate_less.train_asynchronously(model, batches, RATE)
    return flat(model), losses, staleness


def test_a_server_with_one_worker_trains_as_one_device():
    (server, _, staleness), (worker, losses, _) = launch(
        asynchronous, 8, world_size=2, device="cpu"
    )
    problem = small_problem()
    model = small_problem().model()
    assert losses == pytest.approx(
        stage1_single.train(model, problem.batches(24, 8), RATE), rel=1e-9
    )
    assert torch.equal(server, worker)
    assert (server - flat(model)).abs().max() < 1e-12
    assert staleness == [0] * 8


def test_a_server_with_three_workers_counts_every_update_and_how_stale_it_is():
    ranks = launch(asynchronous, 8, world_size=4, device="cpu")
    staleness = ranks[0][2]
    assert len(staleness) == 24
    assert min(staleness) >= 0
    assert max(staleness) > 0
    assert all(len(losses) == 8 for _, losses, _ in ranks[1:])


def test_a_server_that_never_waits_refuses_nccl(monkeypatch):
    monkeypatch.setattr(wire, "on_nccl", lambda tensor, group=None: True)
    with pytest.raises(ValueError, match="keep the model on the CPU"):
        communicate_less.train_asynchronously(small_problem().model(), [], RATE)


class Awkward(torch.nn.Module):
    """A frozen layer, two dtypes, statistics, a scalar, a channels_last kernel in bfloat16."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(4)
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.head = torch.nn.Linear(4, 3).double()
        kernel = torch.nn.Conv2d(8, 16, 3, dtype=torch.bfloat16).to(
            memory_format=torch.channels_last
        )
        self.kernel = kernel

    def forward(self, inputs):
        image = inputs[:, :1, None, None].to(torch.bfloat16).expand(-1, 8, 3, 3)
        return (
            self.head((self.norm(self.frozen(inputs)) * self.scale).double())
            + self.kernel(image).double().mean()
        )


def awkward(way, uneven=0):
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    batches = [
        (torch.randn(6, 4, generator=generator), torch.arange(6) % 3)
        for _ in range(4 + uneven * rank)
    ]
    model = Awkward()
    if way == "local":
        communicate_less.train_local(model, batches, 0.1, 2)
    elif way == "asynchronous":
        communicate_less.train_asynchronously(model, batches, 0.1)
    else:
        hook = communicate_less.TopK(0.1) if way == "TopK" else communicate_less.LowRank(1)
        parallel = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=True)
        parallel.register_comm_hook(None, hook)
        optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for inputs, targets in batches:
            optimizer.zero_grad()
            cross_entropy(parallel(inputs), targets).backward()
            optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "way, uneven", [("local", 0), ("asynchronous", 1), ("TopK", 0), ("LowRank", 0)]
)
def test_awkward_models_train_to_one_result(way, uneven):
    first, second = launch(awkward, way, uneven, world_size=2, device="cpu")
    start = Awkward().state_dict()
    assert torch.equal(first["frozen.weight"], start["frozen.weight"])
    assert not torch.equal(first["head.weight"], start["head.weight"])
    names = [
        name
        for name in first
        if way == "local" or not name.startswith("norm.") or name.endswith(("weight", "bias"))
    ]
    assert all(
        torch.equal(first[name], second[name])
        for name in names
        if name != "norm.num_batches_tracked"
    )


def test_ranks_with_more_batches_than_others_are_told():
    with pytest.raises(Exception, match=r"ranks \[0\] have no more batches"):
        launch(awkward, "local", 2, world_size=2, device="cpu")
    with pytest.raises(Exception, match="use at least two"):
        launch(awkward, "asynchronous", world_size=1, device="cpu")


def kept_after_one_step():
    """Return what is kept after one step, when DDP lays its buckets out anew.

    What was left out of that step must not be lost.
    """
    model = torch.nn.Linear(30, 10, bias=False)
    torch.nn.init.zeros_(model.weight)
    parallel = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(model, torch.nn.Linear(10, 1))
    )
    parallel.register_comm_hook(None, hook := communicate_less.TopK(0.01))
    for _ in range(2):
        parallel(torch.ones(2, 30)).sum().backward()
    return len(hook.left), {type(key).__name__ for key in hook.left}


def test_what_is_left_belongs_to_parameters_not_to_buckets():
    assert launch(kept_after_one_step, world_size=2, device="cpu")[0] == (3, {"Parameter"})
