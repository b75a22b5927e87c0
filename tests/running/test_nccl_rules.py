"""Every stage and every collective under NCCL's rules, on CPU tensors that pose as a GPU's (support/fake_nccl.py)."""

from concurrent.futures import ThreadPoolExecutor

import fake_nccl
import pytest
import torch
import torch.distributed as dist
from oracles import rank_tensor

from ddp_course import collectives, ladder, launch, problems, stage4_ring, stage6_ddp, wire

STAGES = [key for key, stage in ladder.STAGES.items() if not stage.one_process and key != "torch"]


def train_under_the_rules(keys):
    """For each stage how far its weights end from one device's, or the error."""
    problem, K = problems.make("digits", dtype=torch.float64), dist.get_world_size()
    single, found = problem.model(0), {}
    ladder.find("1").trainer({})(single, problem.batches(24, 3, 0, 0, 1), 0.1)
    for key in keys:
        stage, model = ladder.find(key), problem.model(0)
        share = (dist.get_rank(), K) if stage.splits_batch else (0, 1)
        with fake_nccl.imposed():
            stage.trainer({"bucket_cap_mb": 0.1})(model, problem.batches(24, 3, 0, *share), 0.1)
        pairs = zip(model.parameters(), single.parameters(), strict=True)
        found[key] = max((one - other).abs().max().item() for one, other in pairs)
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_all_stages_train_as_one_device(world_size):
    for found in launch(train_under_the_rules, STAGES, world_size=world_size, device="cpu", timeout=120):
        assert found.keys() == set(STAGES) and max(found.values()) < 1e-12, found


def sums_under_the_rules():
    """How far each collective's sum is from the sum."""
    exact = sum(rank_tensor(rank, 4099, torch.float64) for rank in range(dist.get_world_size()))
    names = [name for name in vars(collectives) if name.endswith("_all_reduce")]
    ways = {name: getattr(collectives, name) for name in names}
    ways |= {"ring": stage4_ring.ring_all_reduce, "whole": stage4_ring.whole_gradient_ring}
    found = {}
    for name, all_reduce in ways.items():
        group, mine = dist.new_group(), rank_tensor(dist.get_rank(), 4099, torch.float64)
        with fake_nccl.imposed():
            all_reduce(mine, group=group)
        found[name] = (mine - exact).abs().max().item()
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_all_collectives_sum(world_size):
    for found in launch(sums_under_the_rules, world_size=world_size, device="cpu", timeout=120):
        assert len(found) >= 6 and max(found.values()) < 1e-12, found


def train_beside_the_models_own_collectives(find_unused, batchnorm):
    """Stage 6 with a bitmap of unused parameters, or SyncBatchNorm, beside its communication; all gradients."""
    torch.manual_seed(0)
    norm = stage6_ddp.SyncBatchNorm(8) if batchnorm else torch.nn.Identity()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), norm, torch.nn.Linear(8, 8), norm, torch.nn.Linear(8, 4))
    with fake_nccl.imposed():
        ours = stage6_ddp.DistributedDataParallel(
            model, bucket_cap_mb=1e-4, find_unused_parameters=find_unused, all_reduce=stage4_ring.ring_all_reduce
        )
        for step in range(3):
            torch.manual_seed(10 * step + dist.get_rank())
            ours(torch.randn(6, 8)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("find_unused, batchnorm", [(True, False), (False, True), (True, True)])
def test_a_communication_thread_beside_the_models_own_collectives(find_unused, batchnorm):
    ranks = launch(train_beside_the_models_own_collectives, find_unused, batchnorm, world_size=2, device="cpu")
    assert all(torch.equal(one, other) for one, other in zip(*ranks, strict=True))


def broken(rule):
    """Break one of the rules; return what happens."""
    rank, peer, ones = dist.get_rank(), 1 - dist.get_rank(), torch.ones(3)
    with fake_nccl.imposed(patience=1.5):
        try:
            if rule == "a message between two blocks until both come" and rank == 0:
                dist.isend(ones, peer)
            if rule == "the first batch needs all ranks" and rank == 0:
                dist.batch_isend_irecv([dist.P2POp(dist.isend, ones, peer)])
            if rule == "one after the other":
                wire.warm_up(ones)
                receives = dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(3), peer)])
                dist.batch_isend_irecv([dist.P2POp(dist.isend, ones, peer)])
                receives[0].wait()
            if rule == "one thread":
                wire.warm_up(ones)
                dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(3), peer)])
                with ThreadPoolExecutor(1) as other:
                    other.submit(dist.barrier).result()
        except Exception as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize(
    "rule, told",
    [
        ("a message between two blocks until both come", "not all of ranks [0, 1] came"),
        ("the first batch needs all ranks", "not all of ranks [0, 1] came"),
        ("one after the other", "nothing came in 1.5 s"),
        ("one thread", "two threads use one NCCL communicator"),
    ],
)
def test_the_rules_bite(rule, told):
    assert told in launch(broken, rule, world_size=2, device="cpu")[0]
