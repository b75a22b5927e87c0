"""Saving what is split: the whole is saved, or every rank its part, and nobody loads another's."""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn import Linear, Sequential, Tanh
from torch.optim import Adam
from torch.utils import _pytree

from ddp_course import checkpoint, launch, stage9_tensor
from ddp_course.stage7_sharded import FullyShardedDataParallel, ShardedOptimizer
from ddp_course.stage8_pipeline import Pipeline


def net(bias=True):
    torch.manual_seed(0)
    return Sequential(Linear(4, 8, bias=bias), Tanh(), Linear(8, 4, bias=bias))


X = torch.linspace(-1, 1, 16).view(4, 4)


def fully_sharded():
    """Return (what is trained, its optimizer)."""
    wrapper = FullyShardedDataParallel(net(bias=False))
    optimizer = Adam(wrapper.parameters(), lr=0.1)
    wrapper(X + dist.get_rank()).square().mean().backward()
    optimizer.step()
    return wrapper, optimizer


def tensor_parallel():
    model = stage9_tensor.parallelize(net())
    optimizer = Adam(model.parameters(), lr=0.1)
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


def moments(optimizer):
    return [state["exp_avg"] for state in optimizer.state.values()]


def by_copies(optimizer, saved):
    for own, other in zip(moments(optimizer), saved, strict=True):
        own.copy_(other)


def of_optimizer(made):
    """Return the state of an optimizer, and what loads it."""
    _, optimizer = made
    return optimizer.state_dict(), optimizer.load_state_dict


def of_moments(made):
    _, optimizer = made
    return moments(optimizer), partial(by_copies, optimizer)


def of_module(made, choose=lambda module: module):
    """Return the state of a module, or of a part of it, and what loads it."""
    module, _ = made
    chosen = choose(getattr(module, "module", module))
    return chosen.state_dict(), chosen.load_state_dict


def first(module):
    return module[0]


# Each returns a state that is a part of the whole, and what loads it.
STATES = {
    "an optimizer of shards": lambda: of_optimizer(fully_sharded()),
    "moments of shards": lambda: of_moments(fully_sharded()),
    "a split model": lambda: of_module(tensor_parallel()),
    "a layer of a split model": lambda: of_module(tensor_parallel(), first),
    "an optimizer of a split model": lambda: of_optimizer(tensor_parallel()),
    "a pipeline's stages": lambda: of_module(pipeline()),
    "a pipeline's stage": lambda: of_module(pipeline(), first),
    "a pipeline's momentum": lambda: of_optimizer(pipeline(momentum=0.9)),
    "a pipeline's moments": lambda: of_optimizer(pipeline(Adam)),
    "a pipeline's moments, one by one": lambda: of_optimizer(pipeline(Adam, foreach=False)),
    "a pipeline's fused moments": lambda: of_optimizer(pipeline(Adam, fused=True)),
}


def refused(function, *arguments):
    """Return the words of the error, or "silent"."""
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "silent"


def load_file(load, path):
    load(torch.load(path))


def add_to_zeros(part):
    return torch.zeros_like(part) + part


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
        told[name, "rank 0's"] = refused(load_file, load, f"{path}.of_rank_0")
        told[name, "its own"] = refused(load_file, load, f"{path}.of_rank_{dist.get_rank()}")
    return told


def load_with_other_ranks(folder):
    """Rank 0 of three loads what rank 0 of two has saved."""
    if dist.get_rank() > 0:
        return {}
    told = {}
    for number, name in enumerate(STATES):
        saved = torch.load(f"{folder}/{number}.of_rank_0")
        part = next(each for each in _pytree.tree_leaves(saved) if hasattr(each, "is_part"))
        told[name] = refused(add_to_zeros, part)
    return told


def test_no_rank_loads_the_part_of_another(tmp_path):
    first, second = launch(save_and_load, str(tmp_path), world_size=2)
    for name in STATES:
        assert "rank 0's part" in first[name, "checkpoint"], name
        assert first[name, "rank 0's"] == first[name, "its own"] == "silent", name
        assert second[name, "its own"] == "silent", name
        assert "rank 0 of 2 saved, and here is rank 1 of 2" in second[name, "rank 0's"], name
    told = launch(load_with_other_ranks, str(tmp_path), world_size=3)[0]
    for name, words in told.items():
        assert "rank 0 of 2 saved, and here is rank 0 of 3" in words, (name, words)


def whole_states(folder):
    """Save the whole states, and load them again."""
    wrapper, optimizer = fully_sharded()
    parts, _ = pipeline()
    zero_1 = ShardedOptimizer(net().parameters(), Adam, lr=0.1)
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
    assert launch(whole_states, str(tmp_path), world_size=2) == [[2, 2, 4, 2, 4]] * 2


def some_parts():
    return list(fully_sharded()[0].parameters())


def test_a_part_in_a_process_without_ranks_is_an_ordinary_tensor():
    for parts in launch(some_parts, world_size=2):
        assert not any(hasattr(part, "is_part") for part in parts)


def save_as_one_rank(folder):
    _, optimizer = fully_sharded()
    checkpoint.save(folder, {"optimizer": optimizer.state_dict()})
    optimizer.load_state_dict(checkpoint.load(folder)["optimizer"])
    return True


def test_one_rank_has_the_whole(tmp_path):
    assert launch(save_as_one_rank, str(tmp_path), world_size=1) == [True]
