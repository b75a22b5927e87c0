"""What a sharded model must take, or refuse with one clear line."""

import copy
import gc
import re
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from oracles import tiny_batches, tiny_model, weights
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ddp_course import launch
from ddp_course.running import wire
from ddp_course.stage4_ring import reduce_scatter
from ddp_course.stage7_sharded import FullyShardedDataParallel, ShardedOptimizer
from ddp_course.stage7_sharded.flat import sum_chunks


def place():
    return dist.get_rank(), dist.get_world_size()


def two_wrappers(shared):
    """B(A(x)): the weights of both, sharded apart, after a few steps."""
    first, second = list(tiny_model())[:2], list(tiny_model())[2:]
    parts = [torch.nn.Sequential(*first), torch.nn.Sequential(*second)]
    wrapped = [FullyShardedDataParallel(part) for part in parts]
    outer = torch.nn.Sequential(*wrapped)  # its parameters are those of both wrappers
    optimizer = torch.optim.AdamW(outer.parameters(), lr=0.01)
    for inputs, targets in tiny_batches(*place()):
        optimizer.zero_grad()
        cross_entropy(outer(inputs), targets).backward()
        optimizer.step()
    return torch.cat([weights(one.restore()) for one in wrapped])


def alone(kind=torch.optim.AdamW, **settings):
    """Stage 1 with another optimizer."""
    model = tiny_model()
    optimizer = kind(model.parameters(), **settings)
    for inputs, targets in tiny_batches():
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_wrappers_in_one_backward_pass(world_size):
    for result in launch(two_wrappers, True, world_size=world_size):
        assert (result - alone(lr=0.01)).abs().max() < 1e-12


def fewer_elements_than_ranks():
    """nn.Linear(1, 1) on four ranks: most shards are empty, and the optimizer takes them."""
    results = []
    for sharded in (False, True):
        model = torch.nn.Linear(1, 1).double()
        torch.nn.init.constant_(model.weight, 0.5)
        torch.nn.init.constant_(model.bias, -0.5)
        parallel = FullyShardedDataParallel(model) if sharded else model
        kind = torch.optim.AdamW if sharded else lambda p, lr: ShardedOptimizer(p, torch.optim.AdamW, lr=lr)
        optimizer = kind(parallel.parameters(), lr=0.1)
        parallel(torch.full((2, 1), 1.0 + dist.get_rank()).double()).sum().backward()
        (parallel if sharded else optimizer).clip_grad_norm_(1.0)
        optimizer.step()
        state = parallel.optimizer_state_dict(optimizer) if sharded else optimizer.state_dict()
        results.append((weights(parallel.restore() if sharded else model), state["state"][0]["exp_avg"]))
    return results


def test_a_rank_without_a_shard_trains_along():
    ranks = launch(fewer_elements_than_ranks, world_size=4)
    for (zero1, average), (sharded, other) in ranks:
        assert torch.allclose(zero1, sharded) and torch.allclose(average, other)
        assert torch.equal(zero1, ranks[0][0][0]) and abs(zero1[0].item() - 0.3995) < 1e-5  # decay and one step


def bytes_left(parallel):
    """Bytes of whole parameters that are still there."""
    return sum(flat.full.untyped_storage().nbytes() for flat in parallel.flats)


def traffic(reshard):
    parallel = FullyShardedDataParallel(tiny_model(), reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    sent = 0
    for inputs, targets in tiny_batches(*place()):
        optimizer.zero_grad()
        with wire.counting() as counted:
            cross_entropy(parallel(inputs), targets).backward()
        optimizer.step()
        sent += counted.bytes_sent
    return sent, bytes_left(parallel), weights(parallel.restore())


@pytest.mark.parametrize("reshard, times", [(True, 3), (False, 2)])
def test_zero_3_sends_half_as_much_again_as_zero_2(reshard, times):
    ranks = launch(traffic, reshard, world_size=3)
    payload = weights(tiny_model()).numel() * 8
    assert sum(sent for sent, *_ in ranks) == 4 * times * 2 * payload  # 4 steps, times (K-1) p over all ranks
    for _, left, result in ranks:
        assert left == 0 and (result - alone(torch.optim.SGD, lr=0.1)).abs().max() < 1e-14


def checkpointed(reentrant):
    """Every block is computed again in backward."""

    class Recomputed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(tiny_model())

        def forward(self, inputs):
            for layer in self.layers:
                inputs = checkpoint(layer, inputs, use_reentrant=reentrant)
            return inputs

    model = Recomputed()
    parallel = FullyShardedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for inputs, targets in tiny_batches(*place()):
        optimizer.zero_grad()
        cross_entropy(parallel(inputs.requires_grad_()), targets).backward()
        optimizer.step()
    return weights(parallel.restore())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    for result in launch(checkpointed, reentrant, world_size=2):
        assert (result - alone(torch.optim.SGD, lr=0.1)).abs().max() < 1e-14


def message_of(call):
    """What a call says that must not work."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it worked"


def refusals():
    """Every refusal of a fully sharded model, and whether its weights are still what they were."""
    parallel = FullyShardedDataParallel(tiny_model())
    state = parallel.state_dict()
    missing = {name: value for name, value in state.items() if name != "0.bias"}
    inputs = next(tiny_batches())[0].requires_grad_()
    said = {
        "other shape": message_of(lambda: parallel.load_state_dict({**state, "0.weight": torch.ones(13, 37)})),
        "unknown name": message_of(lambda: parallel.load_state_dict({**state, "stranger": torch.ones(1)})),
        "missing name": message_of(lambda: parallel.load_state_dict(missing)),
        "converted": message_of(lambda: parallel.float()),
        "copied": message_of(lambda: copy.deepcopy(parallel)),
        "wrapped twice": message_of(lambda: FullyShardedDataParallel(parallel)),
        "penalty": message_of(lambda: torch.autograd.grad(parallel(inputs).sum(), inputs, create_graph=True)),
        "stranger's optimizer": message_of(
            lambda: parallel.optimizer_state_dict(torch.optim.SGD(tiny_model().parameters()))
        ),
    }
    same = all(torch.equal(value, state[name]) for name, value in parallel.state_dict().items())
    next(parallel.parameters()).requires_grad_(False)
    said["frozen later"] = message_of(lambda: parallel(inputs))
    next(parallel.parameters()).requires_grad_(True)
    parallel.restore()
    said["restored"] = message_of(lambda: parallel(inputs))
    said["saved when restored"] = message_of(parallel.state_dict)
    said["loaded when restored"] = message_of(lambda: parallel.load_state_dict(state))
    return said, same


REFUSALS = {
    "other shape": r"RuntimeError: .*another model: 0.weight has shape \(13, 37\) there, and \(37, 13\) in",
    "unknown name": r"RuntimeError: .*another model: stranger has shape \(1,\) there, and None in",
    "missing name": r"RuntimeError: .*another model: 0.bias has shape None there, and \(37,\) in",
    "converted": "RuntimeError: a sharded model cannot be moved or converted",
    "copied": "TypeError: a sharded model cannot be copied or pickled",
    "wrapped twice": "ValueError: a part of the model is fully sharded already",
    "penalty": "RuntimeError: create_graph=True would need the whole parameters",
    "stranger's optimizer": "ValueError: the optimizer has other parameters",
    "frozen later": "RuntimeError: requires_grad of 0.weight was changed after wrapping",
    "restored": r"RuntimeError: restore\(\) has made the module an ordinary one",
    "saved when restored": r"RuntimeError: restore\(\) has made the module an ordinary one",
    "loaded when restored": r"RuntimeError: restore\(\) has made the module an ordinary one",
}


def test_refusals_are_clear_and_change_nothing():
    for said, same in launch(refusals, world_size=2):
        assert same and said.keys() == REFUSALS.keys()
        for name, pattern in REFUSALS.items():
            assert re.match(pattern, said[name]), said[name]


def groups_added(sharded):
    """A second group that joins in mid-training, and state of float32 for parameters of float64."""
    model = tiny_model()
    last = list(model[4].parameters())
    optimizer = torch.optim.Adam if not sharded else lambda p, lr: ShardedOptimizer(p, torch.optim.Adam, lr=lr)
    optimizer = optimizer([p for layer in model[:4] for p in layer.parameters()], lr=0.01)
    share = place() if sharded else (0, 1)
    for number, (inputs, targets) in enumerate(tiny_batches(*share)):
        optimizer.zero_grad()
        model.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        if number == 1:
            optimizer.add_param_group({"params": last, "lr": 0.05})
            state = optimizer.state_dict()
            for entry in state["state"].values():
                entry["exp_avg"] = entry["exp_avg"].float()
            optimizer.load_state_dict(state)
        optimizer.step()
    return weights(model), optimizer.state_dict()


def test_a_group_joins_later_and_state_is_converted_as_torch_does():
    [(expected, state)] = launch(groups_added, False, world_size=1)
    for result, ours in launch(groups_added, True, world_size=3):
        assert (result - expected).abs().max() < 1e-12
        assert [len(g["params"]) for g in ours["param_groups"]] == [4, 2] and ours["param_groups"][1]["lr"] == 0.05
        assert {entry["exp_avg"].dtype for entry in ours["state"].values()} == {torch.float64}
        assert ours["state"].keys() == state["state"].keys()


def wrong_states():
    optimizer = ShardedOptimizer(tiny_model().parameters(), torch.optim.Adam)
    other = torch.optim.Adam(torch.nn.Linear(3, 3).parameters())
    small = tiny_model()
    alike = torch.optim.Adam(torch.nn.ParameterList([torch.ones(2) for _ in small.parameters()]).parameters())
    for parameter in alike.param_groups[0]["params"]:
        parameter.grad = torch.ones(2)
    alike.step()
    return [message_of(partial(optimizer.load_state_dict, one.state_dict())) for one in (other, alike)]


def test_state_of_another_model_is_refused():
    for groups, sizes in launch(wrong_states, world_size=2):
        assert groups.startswith("ValueError: the state dict has parameter groups of [2] parameters, but")
        assert sizes.startswith('ValueError: "exp_avg" of parameter 0 has 2 elements in the state dict, but')


KINDS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}


def beside_torch(name):
    """torch's ZeroRedundancyOptimizer under its DDP, torch's fully_shard, and ours: weights after accumulated steps."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    warnings.simplefilter("ignore")
    kind, settings = KINDS[name]
    models = {way: tiny_model() for way in ("zero", "7o", "fully_shard", "7")}
    for model in models.values():
        model[2].weight.requires_grad_(False)
    mesh, forward = init_device_mesh("cpu", (dist.get_world_size(),)), dict(models)
    forward["zero"] = DistributedDataParallel(models["zero"])
    for layer in [models["fully_shard"][0], models["fully_shard"][4], models["fully_shard"]]:
        fully_shard(layer, mesh=mesh)
    forward["7"] = FullyShardedDataParallel(models["7"])
    trainable = {way: [p for p in forward[way].parameters() if p.requires_grad] for way in models}
    optimizers = {
        "zero": ZeroRedundancyOptimizer(trainable["zero"], kind, **settings),
        "7o": ShardedOptimizer(trainable["7o"], kind, **settings),
        "fully_shard": kind(trainable["fully_shard"], **settings),
        "7": kind(trainable["7"], **settings),
    }
    for way, optimizer in optimizers.items():
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        for inputs, targets in tiny_batches(*place()):
            optimizer.zero_grad()
            for x, y in zip(inputs.tensor_split(2), targets.tensor_split(2), strict=True):
                cross_entropy(forward[way](x), y).backward()
            if way in ("7", "7o"):
                (optimizer if way == "7o" else forward[way]).clip_grad_norm_(0.2)
            else:
                torch.nn.utils.clip_grad_norm_(forward[way].parameters(), 0.2)
            optimizer.step()
            schedule.step()
    whole = torch.cat([p.full_tensor().detach().reshape(-1) for p in models["fully_shard"].parameters()])
    forward["7"].restore()
    return {way: whole if way == "fully_shard" else weights(model) for way, model in models.items()}


@pytest.mark.parametrize("name", KINDS)
def test_beside_torchs_own_with_accumulation_clipping_and_schedules(name):
    for ways in launch(beside_torch, name, world_size=2):
        for way, result in ways.items():
            assert (result - ways["zero"]).abs().max() < 1e-8, way
        assert (ways["7"] - weights(tiny_model())).abs().max() > 1e-3, "nothing was trained"


def saved_weights(parallel):
    """What `state_dict` returns, as one vector."""
    return torch.cat([value.flatten() for value in parallel.state_dict().values()])


class Branches(torch.nn.Module):
    """One block of two layers, of which one is used on some ranks only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = torch.nn.Linear(3, 3).double(), torch.nn.Linear(3, 3).double()

    def forward(self, inputs, both):
        return self.always(inputs) + (self.sometimes(inputs) if both else 0)


def used_on_the_last_rank(sharded):
    model = Branches()
    parallel = FullyShardedDataParallel(model, blocks=[]) if sharded else model
    optimizer, after_each = torch.optim.SGD(parallel.parameters(), lr=1.0), []
    for sign in (-1, 1):
        (sign * parallel(torch.ones(2, 3).double(), dist.get_rank() == dist.get_world_size() - 1).sum()).backward()
        if not sharded:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        after_each.append(saved_weights(parallel))
    return after_each


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gradient_that_one_rank_alone_has_is_averaged_whatever_its_sign(world_size):
    expected = launch(used_on_the_last_rank, False, world_size=world_size)
    assert not torch.equal(expected[0][0], weights(Branches()))
    for ours, right in zip(launch(used_on_the_last_rank, True, world_size=world_size), expected, strict=True):
        for one, other in zip(ours, right, strict=True):
            assert (one - other).abs().max() < 1e-14


def summed_in_two_ways():
    rank, world_size = place()
    torch.manual_seed(rank)
    ring = torch.randn(40)
    ours = ring.clone().tensor_split(world_size)
    sum_chunks(ours)
    reduce_scatter(ring.tensor_split(world_size))
    mine = (rank + 1) % world_size
    return torch.equal(ours[mine], ring.tensor_split(world_size)[mine])


def test_chunks_are_added_in_the_order_of_the_ring():
    """With three ranks there is one order only, and with four the bits tell."""
    assert launch(summed_in_two_ways, world_size=4) == [True] * 4


def buffers_loaded():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    parallel = FullyShardedDataParallel(model)
    state = {name: torch.full_like(value, 7) for name, value in parallel.state_dict().items()}
    parallel.load_state_dict(state)
    return {value.flatten()[0].item() for value in parallel.restore().state_dict().values()}


def test_buffers_are_loaded_too():
    assert launch(buffers_loaded, world_size=2) == [{7}] * 2


def an_optimizer_comes_and_goes():
    """What a model is after its ShardedOptimizer was made, and of what kind its gradients are after that is gone."""
    model = torch.nn.Linear(3, 3)
    torch.nn.init.constant_(model.weight, dist.get_rank())
    torch.nn.init.constant_(model.bias, dist.get_rank())
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    started_from, kinds = weights(model).unique().tolist(), []
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        kinds.append(type(model.weight.grad).__name__)
        optimizer = None
        gc.collect()
    return started_from, kinds, optimizer


def test_a_sharded_optimizer_starts_from_rank_0_and_leaves_no_guard_behind():
    assert launch(an_optimizer_comes_and_goes, world_size=2) == [([0.0], ["OwnGradient", "Tensor"], None)] * 2
