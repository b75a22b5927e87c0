"""Saving what is split: the whole is saved, or every rank its part, and nobody loads another's."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn import Linear, Sequential, Tanh

from ddp_course import checkpoint, launch, stage9_tensor
from ddp_course.stage7_sharded import FullyShardedDataParallel, ShardedOptimizer
from ddp_course.stage8_pipeline import Pipeline


def net(bias=True):
    torch.manual_seed(0)
    return Sequential(Linear(4, 8, bias=bias), Tanh(), Linear(8, 4, bias=bias))


X = torch.linspace(-1, 1, 16).view(4, 4)


def fully_sharded():
    """(what is trained, its optimizer)"""
    wrapper = FullyShardedDataParallel(net(bias=False))
    optimizer = torch.optim.Adam(wrapper.parameters(), lr=0.1)
    wrapper(X + dist.get_rank()).square().mean().backward()
    optimizer.step()
    return wrapper, optimizer


def tensor_parallel():
    model = stage9_tensor.parallelize(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(X).square().mean().backward()
    optimizer.step()
    return model, optimizer


def pipeline(kind=torch.optim.SGD, **settings):
    model = net()
    own = Sequential(*[model[:2], model[2:]][dist.get_rank()])
    parts = Pipeline(own, 2, loss=torch.nn.functional.mse_loss)
    optimizer = kind(parts.module.parameters(), lr=0.1, **settings)
    parts.step(X, X)
    optimizer.step()
    return parts, optimizer


# Each yields a state that is a part of the whole, and what loads it.
STATES = {
    "an optimizer of shards": lambda: (
        lambda made: (made[1].state_dict(), made[1].load_state_dict)
    )(fully_sharded()),
    "a momentum of shards": lambda: (
        lambda made: (
            [state["exp_avg"] for state in made[1].state.values()],
            lambda saved: [
                one.copy_(other)
                for one, other in zip(
                    [state["exp_avg"] for state in made[1].state.values()], saved, strict=True
                )
            ],
        )
    )(fully_sharded()),
    "a split model": lambda: (lambda made: (made[0].state_dict(), made[0].load_state_dict))(
        tensor_parallel()
    ),
    "a layer of a split model": lambda: (
        lambda made: (made[0][0].state_dict(), made[0][0].load_state_dict)
    )(tensor_parallel()),
    "an optimizer of a split model": lambda: (
        lambda made: (made[1].state_dict(), made[1].load_state_dict)
    )(tensor_parallel()),
    "a pipeline's stages": lambda: (
        lambda made: (made[0].module.state_dict(), made[0].module.load_state_dict)
    )(pipeline()),
    "a pipeline's stage": lambda: (
        lambda made: (made[0].module[0].state_dict(), made[0].module[0].load_state_dict)
    )(pipeline()),
    "a pipeline's momentum": lambda: (lambda made: (made[1].state_dict(), made[1].load_state_dict))(
        pipeline(momentum=0.9)
    ),
    "a pipeline's moments, one by one": lambda: (
        lambda made: (made[1].state_dict(), made[1].load_state_dict)
    )(pipeline(torch.optim.Adam, foreach=False)),
    "a pipeline's fused moments": lambda: (
        lambda made: (made[1].state_dict(), made[1].load_state_dict)
    )(pipeline(torch.optim.AdamW, fused=True)),
    "a pipeline's moments": lambda: (lambda made: (made[1].state_dict(), made[1].load_state_dict))(
        pipeline(torch.optim.Adam)
    ),
}


def refused(function, *arguments):
    """The words of the error, or "silent"."""
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "silent"


def save_and_load(folder):
    told = {}
    for number, (name, make) in enumerate(STATES.items()):
        state, load = make()
        path = f"{folder}/{number}"
        told[name, "checkpoint"] = refused(checkpoint.save, path, {"step": 1, "all": [state]})
        if dist.get_rank() == 0:
            torch.save(state, f"{path}.of_rank_0")
        torch.save(state, f"{path}.of_rank_{dist.get_rank()}")
        dist.barrier()
        told[name, "rank 0's"] = refused(lambda: load(torch.load(f"{path}.of_rank_0")))
        told[name, "its own"] = refused(
            lambda: load(torch.load(f"{path}.of_rank_{dist.get_rank()}"))
        )
    return told


def load_with_other_ranks(folder):
    """Rank 0 of three loads what rank 0 of two has saved."""
    if dist.get_rank() > 0:
        return {}
    told = {}
    for number, name in enumerate(STATES):
        saved = torch.load(f"{folder}/{number}.of_rank_0")
        tensors = [
            each for each in torch.utils._pytree.tree_leaves(saved) if hasattr(each, "is_part")
        ]
        told[name] = refused(lambda: torch.zeros_like(tensors[0]) + tensors[0])
    return told


def test_no_rank_loads_the_part_of_another(tmp_path):
    first, second = launch(save_and_load, str(tmp_path), world_size=2, timeout=60)
    for (name, what), words in itertools.chain(first.items(), second.items()):
        print(name, what, words[:200])
    for name in STATES:
        assert "rank 0's part" in first[name, "checkpoint"], name
        assert first[name, "rank 0's"] == first[name, "its own"] == "silent", name
        assert second[name, "its own"] == "silent", name
        assert "rank 0 of 2 saved, and here is rank 1 of 2" in second[name, "rank 0's"], name
    told = launch(load_with_other_ranks, str(tmp_path), world_size=3, timeout=60)[0]
    for name, words in told.items():
        assert "rank 0 of 2 saved, and here is rank 0 of 3" in words, (name, words)


def whole_states(folder):
    """The whole states can be saved, and loaded again."""
    wrapper, optimizer = fully_sharded()
    parts, _ = pipeline()
    zero_1 = ShardedOptimizer(net().parameters(), torch.optim.Adam, lr=0.1)
    model, _ = tensor_parallel()
    stage9_tensor.restore(model)
    whole = {
        "sharded": wrapper.state_dict(),
        "optimizer": wrapper.optimizer_state_dict(optimizer),
        "pipeline": parts.state_dict(),
        "zero 1": zero_1.state_dict(),
        "split": model.state_dict(),
    }
    checkpoint.save(folder, whole)
    dist.barrier()
    saved = checkpoint.load(folder)
    wrapper.load_optimizer_state_dict(optimizer, saved["optimizer"])
    with torch.no_grad():
        before = [parameter.clone() for parameter in parts.module.parameters()]
        for parameter in parts.module.parameters():
            parameter.zero_()
    parts.load_state_dict(saved["pipeline"])
    now = parts.module.parameters()
    assert all(torch.equal(one, other) for one, other in zip(before, now, strict=True))
    return [len(each) for each in saved.values()]


def test_the_whole_is_saved(tmp_path):
    assert launch(whole_states, str(tmp_path), world_size=2, timeout=60) == [[2, 2, 4, 2, 4]] * 2


def test_a_part_in_another_process_is_an_ordinary_tensor():
    def some_parts():
        return list(fully_sharded()[0].parameters())

    for parts in launch(some_parts, world_size=2):
        assert [type(part) for part in parts] == [torch.nn.Parameter, torch.nn.Parameter] or all(
            type(part) is torch.Tensor for part in parts
        )


@pytest.mark.parametrize("world_size", [1])
def test_one_rank_has_the_whole(tmp_path, world_size):
    def run():
        _, optimizer = fully_sharded()
        checkpoint.save(tmp_path, {"optimizer": optimizer.state_dict()})
        optimizer.load_state_dict(checkpoint.load(tmp_path)["optimizer"])
        return True

    assert launch(run, world_size=world_size, timeout=60) == [True]
