"""What a DistributedDataParallel must do, as cases that run on every rank.

Each case takes the class under test. Torch's class and ours are judged by the very same assertions.
The oracle is the exact mean of the gradients that the ranks would compute alone, within the bound
on rounding.
"""

import copy
import inspect
from dataclasses import dataclass

import torch
import torch.distributed as dist
from oracles import UNIT_ROUNDOFF
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

CASES = {}
TORCH_FAILS = {
    "models_of_different_shape_are_refused": "torch raises on one rank only, and the others wait"
}
# Arguments of the torch that is here: 2.10 lacks two of 2.13's.
KNOWN_TO_TORCH = inspect.signature(DistributedDataParallel).parameters


def case(function):
    """Register a case under its name."""
    CASES[function.__name__] = function
    return function


class Net(nn.Module):
    """Two layers and a ReLU; sizes differ so that buckets and chunks are uneven."""

    def __init__(self, width=7):
        super().__init__()
        self.first = nn.Linear(5, width)
        self.second = nn.Linear(width, 3)

    def forward(self, x):
        return self.second(self.first(x).relu())


class Branches(nn.Module):
    """Two branches, of which `which` takes part: "a", "b", "both" or "neither".

    `last` always takes part, `never` never does.
    """

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5)
        self.b = nn.Linear(5, 5)
        self.never = nn.Linear(5, 5)
        self.last = nn.Linear(5, 5)

    def forward(self, x, which):
        if which in ("a", "both"):
            x = self.a(x)
        if which in ("b", "both"):
            x = self.b(x)
        return self.last(x)


@dataclass(slots=True)
class Structure:
    """An output that is neither a tensor nor a list of tensors."""

    tensors: dict


def seeded(make, seed=0):
    """Make a module from a fixed seed: the same on every rank."""
    torch.manual_seed(seed)
    return make()


def data(rank, step=0, samples=4):
    """Return this rank's inputs of a step: different on every rank and in every step."""
    return torch.randn(samples, 5, generator=torch.Generator().manual_seed(100 * rank + step + 1))


def me():
    """Return the number of this rank."""
    return dist.get_rank()


def ranks():
    """Return the numbers of all ranks."""
    return range(dist.get_world_size())


def gathered(value):
    """Return `value` of every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def alone(module, loss, rank):
    """Return {name: gradient} that `loss(module, rank)` would give on `rank` without any DDP.

    None stays None.
    """
    twin = copy.deepcopy(module)
    twin.zero_grad()
    loss(twin, rank).backward()
    return {name: p.grad for name, p in twin.named_parameters()}


def assert_mean(module, loss, slack=1.0):
    """Assert that the gradients of `module` are the mean of what the ranks compute alone.

    They must be the same bits on every rank.
    """
    shares = [alone(module, loss, rank) for rank in ranks()]
    for name, parameter in module.named_parameters():
        parts = [share[name] for share in shares]
        if all(part is None for part in parts):
            assert parameter.grad is None, f"{name} got a gradient although no rank used it"
            continue
        assert parameter.grad is not None, f"{name} got no gradient"
        for rank, part in enumerate(parts):
            if part is None:  # A rank that did not use the parameter counts with zeros.
                parts[rank] = torch.zeros_like(parameter)
        stacked = torch.stack(parts).double()
        magnitude = stacked.abs().mean(0)
        bound = 2 * len(parts) * UNIT_ROUNDOFF[parameter.dtype] * magnitude * slack
        error = (parameter.grad.double() - stacked.mean(0)).abs()
        assert (error <= bound).all(), (
            f"{name} is off by {error.max():.3g}, allowed {bound.max():.3g}"
        )
    assert_replicas_agree([p.grad for p in module.parameters() if p.grad is not None])


def assert_replicas_agree(tensors):
    """Assert that all ranks hold the same bits."""
    vectors = [tensor.detach().to_dense().reshape(-1).double() for tensor in tensors]
    flat = torch.cat([torch.zeros(0), *vectors])  # `tensors` may be empty.
    for rank, other in enumerate(gathered(flat)):
        assert torch.equal(other, flat), f"rank {rank} has other values"


def assert_raises(function, kinds, *words):
    """Assert that `function` raises one of `kinds` with all `words` in the message."""
    try:
        function()
    except kinds as error:
        for word in words:
            assert word in str(error), f"{word!r} is not in: {error}"
    else:
        raise AssertionError(f"nothing raised; expected {kinds} about {words}")


def message_of(function, kind):
    """Return the message of the error of this kind that a function raises; "" without an error."""
    try:
        function()
    except kind as error:
        return str(error)
    return ""


def squared(module, rank, step=0):
    """Return a loss that differs from rank to rank and step to step."""
    return module(data(rank, step)).square().sum()


def train_and_check(DDP, make=Net, steps=4, set_to_none=True, loss=squared, **settings):
    """Train a few steps in which every gradient is checked, before the weights change.

    An optimizer changes them.
    """
    model = seeded(make, seed=me())
    parallel = DDP(model, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    assert_replicas_agree(list(model.parameters()))
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss(parallel, me(), step).backward()
        assert_mean(model, lambda module, rank, step=step: loss(module, rank, step))
        optimizer.step()
    return parallel


# 1. Construction


@case
def gradients_are_the_mean(DDP):
    train_and_check(DDP)


@case
def models_of_different_shape_are_refused(DDP):
    assert_raises(lambda: DDP(Net(width=8 if me() == 1 else 7)), RuntimeError)


def is_torch(DDP):
    return DDP.__module__.startswith("torch.")


class Words(nn.Module):
    """An embedding with sparse gradients, and a layer that can do without it."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 4, sparse=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.words(x) if x is not None else torch.ones(2, 4))


def first_words(rank, step):
    """Return the indices of words.

    They are others, and another number of them, on each rank and in each step.
    """
    return torch.arange(rank, rank + 3 + step)


def check_sparse(parallel, step, words=first_words):
    """Run one pass; assert that the words' gradient is sparse and the mean.

    It is the mean of what the ranks compute alone, and zeros where unused.
    """
    model = parallel.module
    model.zero_grad()
    loss = lambda module, rank: module(words(rank, step)).square().sum()  # noqa: E731
    loss(parallel, me()).backward()
    assert model.words.weight.grad.is_sparse
    shares = [alone(model, loss, rank)["words.weight"] for rank in ranks()]
    dense = []
    for share in shares:
        dense.append(torch.zeros(20, 4) if share is None else share.to_dense())
    exact = torch.stack(dense).double()
    error = (model.words.weight.grad.to_dense().double() - exact.mean(0)).abs()
    assert (error <= 2 * len(shares) * 2**-24 * exact.abs().mean(0)).all()


@case
def sparse_gradients(DDP):
    parallel = DDP(seeded(Words))
    for step in range(3):
        check_sparse(parallel, step)


# 2. Buckets


@case
def tiny_buckets_and_channels_last(DDP):
    def make():
        convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return nn.Sequential(
            nn.Unflatten(1, (3, 4, 4)), convolution, nn.Flatten(), nn.Linear(16, 2)
        )

    def loss(module, rank, step):
        generator = torch.Generator().manual_seed(50 * rank + step)
        return module(torch.randn(2, 48, generator=generator)).square().sum()

    parallel = train_and_check(DDP, make, loss=loss, bucket_cap_mb=0.0001)
    assert parallel.module[1].weight.grad.stride() == parallel.module[1].weight.stride()


@case
def buckets_leave_in_order_and_keep_to_the_cap(DDP):
    def make():
        return nn.Sequential(*[nn.Linear(5, 5) for _ in range(6)])

    seen = []

    def hook(state, bucket):
        seen.append((bucket.index(), bucket.buffer().numel(), bucket.is_last()))
        return default_hooks.allreduce_hook(None, bucket)

    parallel = DDP(seeded(make), bucket_cap_mb=100 / 2**20)  # a weight has 100 bytes, a bias 20
    parallel.register_comm_hook(None, hook)
    for step in range(3):
        parallel.zero_grad()
        squared(parallel, me(), step).backward()
        assert [index for index, _, _ in seen] == list(range(len(seen))), (
            "buckets left out of order"
        )
        assert [last for _, _, last in seen] == [False] * (len(seen) - 1) + [True]
        buckets = 1 if step == 0 else 6
        assert len(seen) == buckets, "the cap was not kept after the first pass"
        assert sum(size for _, size, _ in seen) == 6 * 30
        seen.clear()


@case
def bucket_layout_follows_rank_0(DDP):
    """Ranks use their layers in different orders; all must rebuild by rank 0's."""

    class Ordered(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])

        def forward(self, x):
            layers = list(self.layers)
            if me() != 0:
                layers.reverse()
            for layer in layers:
                x = layer(x)
            return x

    model = seeded(Ordered)
    parallel = DDP(model, bucket_cap_mb=120 / 2**20)
    layouts = []

    def hook(state, bucket):
        names = {parameter: name for name, parameter in model.named_parameters()}
        layouts.append([names[parameter] for parameter in bucket.parameters()])
        return default_hooks.allreduce_hook(None, bucket)

    parallel.register_comm_hook(None, hook)
    for step in range(3):
        parallel.zero_grad()
        parallel(data(me(), step)).square().sum().backward()
    assert all(other == layouts for other in gathered(layouts))
    last = [
        name.split(".")[1] for bucket in layouts[-4:] for name in bucket if name.endswith("weight")
    ]
    assert last == ["3", "2", "1", "0"], last


@case
def communication_starts_under_the_backward_pass(DDP):
    """The last layer's bucket leaves before the first layer's gradient is computed.

    The order of events shows it.
    """
    model = seeded(lambda: nn.Sequential(*[nn.Linear(5, 5) for _ in range(4)]))
    parallel = DDP(model, bucket_cap_mb=120 / 2**20)
    events = []

    def hook(state, bucket):
        events.append(f"bucket {bucket.index()}")
        return default_hooks.allreduce_hook(None, bucket)

    parallel.register_comm_hook(None, hook)
    model[0].weight.register_hook(lambda grad: events.append("first layer"))
    for _ in range(2):
        events.clear()
        squared(parallel, me()).backward()
    assert (
        events.index("bucket 0")
        < events.index("bucket 2")
        < events.index("first layer")
        < events.index("bucket 3")
    )


@case
def outputs_in_a_dataclass(DDP):
    """The walk over the graph starts from all tensors that `forward` returns, wherever they are."""

    class Structured(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Linear(5, 2)
            self.unused = nn.Linear(5, 2)

        def forward(self, x):
            return Structure({"left": [self.used(x)]})

    loss = lambda module, rank, step: module(data(rank, step)).tensors["left"][0].square().sum()  # noqa: E731
    train_and_check(DDP, Structured, loss=loss, find_unused_parameters=True)


# 3. Unused parameters


def branching(rank, step):
    """Return which branch a rank takes in a step.

    It is another one on each rank, and another one in each step.
    """
    return ("a", "b", "both", "neither")[(rank + step) % 4]


def branch_loss(module, rank, step=0, choose=branching):
    return module(data(rank, step), choose(rank, step)).square().sum()


@case
def globally_unused_gradients_stay_untouched(DDP):
    for as_view in (False, True):
        model = seeded(Branches)
        parallel = DDP(model, find_unused_parameters=True, gradient_as_bucket_view=as_view)
        model.never.weight.grad = torch.full((5, 5), float(me()))
        for step in range(2):
            branch_loss(parallel, me(), step).backward()
            assert model.never.bias.grad is None
            if not as_view:
                assert (model.never.weight.grad == me()).all(), (
                    "a gradient that nobody computed was averaged"
                )


@case
def unused_without_the_flag_is_a_helpful_error(DDP):
    parallel = DDP(seeded(Branches))
    branch_loss(parallel, me()).backward()
    error = "Expected to have finished reduction in the prior iteration"
    words = (
        (error, "find_unused_parameters=True")
        if is_torch(DDP)
        else (error, "never.weight", "never.bias", f"rank {me()}")
    )
    assert_raises(lambda: branch_loss(parallel, me()), RuntimeError, *words)


# 4. Buffers


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.linear(x))


@case
def replaced_buffers_are_found(DDP):
    model = seeded(Normed)
    parallel = DDP(model)
    model.norm.running_mean = torch.full((4,), float(me() + 5))
    parallel.eval()
    parallel(data(me()))
    assert (model.norm.running_mean == 5).all()


# 5. Communication hooks


def hooked_gradients(DDP, state, hook, steps=1, make=Net):
    model = seeded(make)
    parallel = DDP(model)
    parallel.register_comm_hook(state, hook)
    for step in range(steps):
        parallel.zero_grad()
        squared(parallel, me(), step).backward()
    return model


@case
def a_hook_that_raises_ends_backward(DDP):
    def broken(state, bucket):
        raise ZeroDivisionError("in the hook")

    assert_raises(
        lambda: hooked_gradients(DDP, None, broken),
        (ZeroDivisionError, RuntimeError),
        "in the hook",
    )


# 6. With the rest of torch


class Checkpointed(nn.Module):
    def __init__(self, reentrant, times):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.middle = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)
        self.reentrant = reentrant
        self.times = times

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.last(x)


@case
def activation_checkpointing(DDP):
    for reentrant in (False, True):
        for settings in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
            train_and_check(
                DDP, lambda reentrant=reentrant: Checkpointed(reentrant, 1), steps=3, **settings
            )
    train_and_check(DDP, lambda: Checkpointed(False, 2), steps=3)
    train_and_check(DDP, lambda: Checkpointed(False, 2), steps=3, find_unused_parameters=True)


@case
def checkpointing_a_layer_twice_needs_a_static_graph(DDP):
    def loss(module, rank, step):
        return squared(module, rank, step)

    model = seeded(lambda: Checkpointed(True, 2))
    parallel = DDP(model)
    assert_raises(
        lambda: loss(parallel, me(), 0).backward(), RuntimeError, "mark a variable ready only once"
    )
    train_and_check(DDP, lambda: Checkpointed(True, 2), steps=4, static_graph=True)


@case
def backward_in_two_halves(DDP):
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.Linear(5, 2)
            self.right = nn.Linear(5, 2)

        def forward(self, x):
            return self.left(x), self.right(x)

    model = seeded(TwoHeads)
    parallel = DDP(model)
    for step in range(3):
        model.zero_grad()
        left, right = parallel(data(me(), step))
        left.square().sum().backward()
        right.square().sum().backward()
        assert_mean(
            model, lambda m, rank, step=step: sum(out.square().sum() for out in m(data(rank, step)))
        )


@case
def state_dict_and_attributes(DDP):
    model = seeded(Net)
    model.note = "mine"
    parallel = DDP(model)
    assert list(parallel.state_dict()) == ["module." + name for name in model.state_dict()]
    assert parallel.module is model
    assert not hasattr(parallel, "note")
    parallel.load_state_dict(parallel.state_dict())
    assert parallel.device_ids is None
    assert parallel.device.type == "cpu"
    assert parallel.require_backward_grad_sync
    parallel.eval()
    assert not model.training
    assert sum(1 for _ in parallel.parameters()) == 4


@case
def a_module_can_be_wrapped_again(DDP):
    model = seeded(Net)
    for _ in range(2):
        parallel = DDP(model)
        model.zero_grad()
        squared(parallel, me()).backward()
        assert_mean(model, squared)
        del parallel
