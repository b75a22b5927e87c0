"""Stage 9 equals one device on every mesh, and sends what the formula says."""

import pytest
import torch
import torch.distributed as dist
from oracles import weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ddp_course import launch, problems, stage1_single, stage9_tensor, wire
from ddp_course.checkpoint import set_random_state
from manyranks.devices import Device
from manyranks.errors import RankError

MESHES = [(1, 4), (2, 2), (4, 1), (1, 3)]  # These are pairs (data, tensor).


def gpt(heads=4, dropout=0.0):
    torch.manual_seed(0)
    model = problems.ByteGPT(2, 32 * heads, 8, dropout).double()
    nn.init.normal_(model.head.weight)  # By default the blocks would hardly be felt.
    return model


def net():
    """Return two pairs of layers of odd sizes, one without a bias.

    They have the same bytes everywhere, and lead to logits of the same shape.
    """
    torch.manual_seed(0)
    first = [
        nn.Embedding(256, 4),
        nn.Flatten(),
        nn.Linear(32, 13),
        nn.Tanh(),
        nn.Linear(13, 7, bias=False),
        nn.ReLU(),
    ]
    return nn.Sequential(
        *first, nn.Linear(7, 6), nn.GELU(), nn.Linear(6, 2048), nn.Unflatten(1, (256, 8))
    ).double()


def batches(rank=0, ranks=1):
    """Yield three global batches of 12 samples, or this rank's share of them."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        data = torch.randint(256, (12, 9), generator=generator).tensor_split(ranks)[rank]
        yield data[:, :-1], data[:, 1:]


def distance(make, tensor, breaking=None):
    """Return how far weights and losses (the mean over all ranks) are from those of one device."""
    if breaking:
        breaking()
    model = make()
    one = make()
    data = dist.get_world_size() // tensor
    losses = stage9_tensor.train(
        model, batches(dist.get_rank() // tensor, data), 0.1, tensor=tensor
    )
    mean = torch.tensor(losses, dtype=torch.float64) / dist.get_world_size()
    dist.all_reduce(mean)
    expected = torch.tensor(stage1_single.train(one, batches(), 0.1), dtype=torch.float64)
    return max((weights(model) - weights(one)).abs().max(), (mean - expected).abs().max())


@pytest.mark.parametrize("make", [gpt, net])
@pytest.mark.parametrize("data, tensor", MESHES)
def test_every_mesh_trains_what_one_device_trains(make, data, tensor):
    assert max(launch(distance, make, tensor, world_size=data * tensor)) < 1e-12


def wrong_axis():
    right = stage9_tensor.mesh
    stage9_tensor.mesh = lambda **axes: dict(
        zip(axes, reversed(right(**axes).values()), strict=True)
    )


BROKEN = {
    "no sum forward": lambda: setattr(
        stage9_tensor.Leave, "forward", lambda ctx, term, all_reduce: term.clone()
    ),
    "no sum backward": lambda: setattr(
        stage9_tensor.Enter, "backward", lambda ctx, gradient: (gradient, None)
    ),
    "groups of the wrong axis": wrong_axis,
    "no average": lambda: setattr(stage9_tensor, "average_on_ring", lambda *args, **kwargs: None),
}


@pytest.mark.parametrize("breaking", BROKEN)
def test_what_is_broken_trains_something_else(breaking):
    assert min(launch(distance, gpt, 2, BROKEN[breaking], world_size=4)) > 1e-6


def traffic(tensor):
    """Return the bytes that this rank sent in a step, the formula's, and those of its gradients."""
    model = gpt()
    data = dist.get_world_size() // tensor
    groups = stage9_tensor.mesh(data=data, tensor=tensor)
    stage9_tensor.parallelize(model, groups["tensor"])
    inputs, targets = next(batches(dist.get_rank() // tensor, data))
    with wire.counting() as sent:
        cross_entropy(model(inputs), targets).backward()
        stage9_tensor.average_on_ring(stage9_tensor.gradients(model), group=groups["data"])
    activations = inputs.numel() * 128 * 8
    gradients = sum(p.numel() * 8 for p in model.parameters())
    blocks = 2
    sums_of_a_block = 4  # two in each pass
    summed = blocks * sums_of_a_block * activations
    formula = ring_share(tensor) * summed + ring_share(data) * gradients
    return sent.bytes_sent, formula, gradients


def ring_share(ranks):
    """Return what a rank sends in a ring all-reduce, as a share of the buffer."""
    return 2 * (ranks - 1) / ranks


@pytest.mark.parametrize("data, tensor", MESHES[:3])
def test_bytes_are_those_of_the_formula(data, tensor):
    """Two blocks have four all-reduces of activations each, and there is one of gradients.

    These are the gradients of this rank's slices.
    """
    whole = sum(p.numel() * 8 for p in gpt().parameters())
    biases = 2 * (3 + 4) * 128 * 8
    split = 2 * 12 * 128**2 * 8 + biases
    for sent, formula, gradients in launch(traffic, tensor, world_size=data * tensor):
        assert sent == formula
        assert gradients == whole - split + split / tensor


def against_torch(change):
    """Return whether the groups are those of torch's mesh, and how far an MLP is from its TP.

    Outputs and gradients are compared.
    """
    devices = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    groups = stage9_tensor.mesh(data=2, tensor=2)
    our_members = [dist.get_process_group_ranks(groups[axis]) for axis in groups]
    their_members = [dist.get_process_group_ranks(devices.get_group(axis)) for axis in groups]
    ours = gpt().blocks[0].mlp
    theirs = gpt().blocks[0].mlp
    parallelize_module(theirs, devices["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    stage9_tensor.parallelize(ours, groups["tensor"])
    change()
    x = torch.randn(
        3, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank() // 2)
    )
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outputs = [ours(inputs[0]), theirs(inputs[1])]
    for output in outputs:
        output.square().sum().backward()
    pairs = [outputs, [x.grad for x in inputs]]
    pairs += [
        (a.grad, b.grad.to_local())
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    ]
    gaps = [(a.detach().as_subclass(torch.Tensor) - b).abs().max().item() for a, b in pairs]
    return our_members == their_members, max(gaps)


def test_it_agrees_with_torchs_parallelize_module():
    ranks = launch(against_torch, lambda: None, world_size=4)
    assert all(same for same, _ in ranks)
    assert max(difference for _, difference in ranks) < 1e-10
    broken = launch(against_torch, BROKEN["no sum backward"], world_size=4)
    assert min(difference for _, difference in broken) > 1e-3


def step(model, option, clip):
    """Run a pass after one that breaks off on all ranks.

    Return the gradients' norm if they are clipped.
    """
    inputs, targets = next(batches())
    with pytest.raises(IndexError):
        model(inputs + 256)
    x = model.bytes(inputs) + model.positions.weight
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False) if option == "checkpointed" else block(x)
    cross_entropy(model.head(model.norm(x)).transpose(1, 2), targets).backward()
    return clip(model) if option == "clipped" else None


def twice_over(option):
    """Take two legs of a step, split and whole again; return the distance to one device.

    It also returns whether all modules are back.
    """
    ours = gpt()
    one = gpt()
    # The optimizers are made before anything is split.
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, one)]
    modules = list(ours.modules())
    for _ in range(2):
        stage9_tensor.parallelize(ours)
        norms = [step(ours, option, lambda model: stage9_tensor.clip_grad_norm_(model, 0.01))]
        norms += [
            step(one, option, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        ]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        stage9_tensor.restore(ours)
        assert norms[0] is None or abs(norms[0] - norms[1]) < 1e-12
    return (weights(ours) - weights(one)).abs().max(), modules == list(ours.modules())


@pytest.mark.parametrize("option", ["plain", "checkpointed", "clipped"])
def test_twice_over_with_an_error_in_the_middle(option):
    for difference, same_modules in launch(twice_over, option, world_size=2):
        assert difference < 1e-12
        assert same_modules


def dropped(sharing):
    stage9_tensor.checkpoint.set_random_state = set_random_state if sharing else lambda states: None
    model = gpt(dropout=0.3)
    torch.manual_seed(dist.get_rank())
    stage9_tensor.train(model, batches(dist.get_rank() // 2, 2), 0.1, tensor=2)
    return weights(model)


def test_dropout_drops_the_same_on_ranks_that_share_layers():
    ranks = launch(dropped, True, world_size=4)
    apart = launch(dropped, False, world_size=4)
    assert all(torch.equal(rank, ranks[0]) for rank in ranks)
    assert not torch.equal(apart[0], apart[1])


def torchs_clipping():
    model = stage9_tensor.parallelize(gpt())
    inputs, targets = next(batches())
    cross_entropy(model(inputs), targets).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


REFUSED = {
    "call clip_grad_norm_ of .* stage9_tensor instead": torchs_clipping,
    r"2 ranks cannot form a mesh of \{'data': 2, 'tensor': 2\}": lambda: stage9_tensor.mesh(
        data=2, tensor=2
    ),
    "Linear has no two linear layers that could be split": lambda: stage9_tensor.parallelize(
        nn.Linear(3, 3)
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_would_go_wrong_is_refused(words):
    with pytest.raises(RankError, match=words):
        launch(REFUSED[words], world_size=2)


def test_what_cannot_be_split_stays_whole():
    def slices(model):
        stage9_tensor.split_layers(model, 0, 2, None)
        return {name: tuple(p.shape) for name, p in model.named_parameters() if hasattr(p, "cut")}

    assert slices(gpt(heads=1).blocks[0]).keys() == {
        "mlp.0.weight",
        "mlp.0.bias",
        "mlp.2.weight",
    }, "one head"
    odd = slices(gpt(heads=3).blocks[0])
    assert odd["qkv.weight"] == (3 * 64, 96), "two heads of three"
    assert odd["out.weight"] == (96, 64), "two heads of three"
    tied = net()
    tied.append(nn.Linear(32, 13))[-1].weight = tied[2].weight
    assert slices(tied) == {"6.weight": (3, 7), "6.bias": (3,), "8.weight": (2048, 3)}
    hidden = [nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)]
    without_weight = nn.Sequential(nn.Dropout(), nn.ReLU(), *hidden)
    assert slices(without_weight).keys() == {"2.weight", "2.bias", "4.weight"}
    softmax = nn.Softmax(dim=1)
    twice = nn.Sequential(softmax, *hidden[:2], softmax, hidden[2])
    with pytest.raises(ValueError, match="no two linear layers"):
        slices(twice)


def on_an_emulated_device():
    """Train on a device that looks at gradients below the functions that a part allows.

    Return the distance.
    """
    with Device("1GFLOP/s", "1GB/s").emulate(sleep=False):
        return distance(gpt, 2)


def test_a_split_model_trains_on_emulated_devices():
    assert max(launch(on_an_emulated_device, world_size=2)) < 1e-12
