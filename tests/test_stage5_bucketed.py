"""Stage 5 equals one device and torch, and sends while the backward pass still runs."""

import copy
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
from oracles import tiny_batches, tiny_model, trained_alone, weights
from refusals import Refusals
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_course import launch, stage5_bucketed, wire
from ddp_course.lab.measuring import timeline
from ddp_course.stage4_ring import ring_all_reduce
from ddp_course.stage5_bucketed import BucketedDDP, assign_buckets

ALL_REDUCES = {"ring": ring_all_reduce, "gloo": dist.all_reduce}


def train_with(wrap, steps=4):
    model = tiny_model(seed=dist.get_rank())
    parallel = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in tiny_batches(dist.get_rank(), dist.get_world_size(), steps):
        optimizer.zero_grad()
        cross_entropy(parallel(inputs), targets).backward()
        optimizer.step()
    return weights(model)


def trained(cap, name):
    ours = train_with(lambda model: BucketedDDP(model, cap, all_reduce=ALL_REDUCES[name]))
    return ours, train_with(DistributedDataParallel)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("cap, name", [(25.0, "ring"), (0.001, "ring"), (0.001, "gloo")])
def test_training_equals_one_device_and_torch(world_size, cap, name):
    ranks = launch(trained, cap, name, world_size=world_size)
    for ours, theirs in ranks:
        assert torch.equal(ours, ranks[0][0]), "replicas differ"
        assert (ours - trained_alone()).abs().max() < 1e-14
        assert world_size > 2 or torch.equal(ours, theirs), "not torch's bits"


def unsynchronised(fault):
    broken = {
        "no sync": lambda tensor, group=None: None,
        "no division": lambda tensor, group=None: ring_all_reduce(
            tensor.mul_(dist.get_world_size()), group
        ),
    }[fault]
    return train_with(lambda model: BucketedDDP(model, all_reduce=broken))


@pytest.mark.parametrize("fault", ["no sync", "no division"])
def test_the_oracle_rejects(fault):
    for result in launch(unsynchronised, fault, world_size=2):
        assert (result - trained_alone()).abs().max() > 1e-4


def mib(*sizes, dtype=torch.float32):
    return [
        torch.nn.Parameter(torch.empty(int(size * 2**20 / dtype.itemsize), dtype=dtype))
        for size in sizes
    ]


@pytest.mark.parametrize(
    "cap, sizes",
    [
        (25.0, [1, 0.5, 30, 0.4, 0.7, 24, 2]),
        (25.0, [0.3, 0.3]),
        (2.0, [1, 1, 1, 3, 0.5]),
        (0.25, [0.1, 0.1, 0.1]),
    ],
)
def test_buckets_are_torchs(cap, sizes):
    parameters = mib(*sizes) + mib(*sizes, dtype=torch.float64)
    limits = [2**20, int(cap * 2**20)] if cap == 25.0 else [int(cap * 2**20)]
    backwards = parameters[::-1]
    place = {id(parameter): index for index, parameter in enumerate(backwards)}
    theirs, _ = dist._compute_bucket_assignment_by_size(backwards, limits)
    ours = []
    for bucket in assign_buckets(parameters, cap):
        ours.append([place[id(member)] for member in bucket])
    assert sorted(ours) == sorted(theirs)


def test_a_cap_must_be_positive():
    with pytest.raises(ValueError, match="bucket_cap_mb is 0"):
        assign_buckets(mib(1), 0)


def gradients_and_buckets():
    model = tiny_model()
    parallel = BucketedDDP(model, bucket_cap_mb=0.001)
    calls = []
    parallel.all_reduce = lambda flat, group=None: (
        calls.append(flat.data_ptr()) or ring_all_reduce(flat, group)
    )
    for inputs, targets in tiny_batches(dist.get_rank(), dist.get_world_size(), steps=2):
        cross_entropy(parallel(inputs), targets).backward()
    in_bucket = [
        p.grad.untyped_storage().data_ptr()
        == parallel.bucket_of[p].flat.untyped_storage().data_ptr()
        for p in model.parameters()
    ]
    return (
        in_bucket,
        calls == 2 * [bucket.flat.data_ptr() for bucket in parallel.buckets],
        len(parallel.buckets),
    )


def test_gradients_are_views_and_buckets_go_in_index_order():
    for in_bucket, ordered, count in launch(gradients_and_buckets, world_size=2):
        assert all(in_bucket)
        assert ordered
        assert count > 1


def record_overlap():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12)))
    first_ring_is_over = threading.Event()

    def ring(flat, group=None):
        ring_all_reduce(flat, group)
        first_ring_is_over.set()

    parallel = BucketedDDP(model, bucket_cap_mb=1.0, all_reduce=ring)
    # This gradient is the last to be ready.
    next(model.parameters()).register_hook(lambda _: first_ring_is_over.wait(180) and None)
    inputs = torch.randn(256, 512)
    with timeline.recording() as spans, wire.counting() as traffic:
        parallel(inputs).sum().backward()
    return spans, traffic, len(parallel.buckets), sum(p.numel() * 4 for p in model.parameters())


def test_communication_starts_before_backward_ends():
    for spans, traffic, buckets, payload in launch(record_overlap, world_size=2):
        [backward] = [span for span in spans if span.name == "backward"]
        [waiting] = [span for span in spans if span.name == "wait"]
        rings = [span for span in spans if span.name == "communication"]
        assert len(rings) == buckets == 12
        assert {span.lane for span in rings} == {"network"}
        assert backward.start < rings[0].start, "the first ring hides behind backward"
        assert rings[0].end < waiting.start, "the first ring hides behind backward"
        assert rings[-1].end <= backward.end, "backward returned before the last ring was over"
        assert traffic.bytes_sent == payload  # 2 (K-1)/K p at K=2


def unused_parameter():
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "unused": torch.nn.Linear(2, 2)})
    parallel = BucketedDDP(model)
    model["used"](torch.ones(1, 2)).sum().backward()
    return parallel


def test_an_unused_parameter_is_reported_and_does_not_hang():
    from manyranks.errors import RankError

    with pytest.raises(RankError, match="2 parameters got no gradient"):
        launch(unused_parameter, world_size=2)


def failing_collective():
    def fails(flat, group=None):
        raise OSError("the network is down")

    parallel = BucketedDDP(tiny_model(), all_reduce=fails)
    inputs, targets = next(tiny_batches())
    try:
        cross_entropy(parallel(inputs), targets).backward()
    except OSError as error:
        return str(error)


def test_an_error_in_the_communication_thread_leaves_through_backward():
    assert launch(failing_collective, world_size=2) == ["the network is down"] * 2


class Twice(torch.nn.Linear):
    """Computed anew in backward, in two parts, each of which has a gradient for the parameters."""

    def __init__(self):
        super().__init__(2, 2)

    def forward(self, inputs):
        for _ in range(2):
            inputs = checkpoint(super().forward, inputs, use_reentrant=True)
        return inputs


INPUTS = torch.ones(1, 2)
REFUSALS = Refusals()
refused = REFUSALS.refused


@refused("no sparse gradient")
def sparse():
    words = BucketedDDP(torch.nn.Embedding(5, 2, sparse=True))
    words(torch.arange(3)).sum().backward()


@refused("none with a graph")
def graph():
    parallel = BucketedDDP(torch.nn.Linear(2, 1))
    parallel(INPUTS).pow(2).sum().backward(create_graph=True)


@refused("a gradient was computed twice in one backward pass")
def twice():
    parallel = BucketedDDP(torch.nn.Sequential(Twice(), torch.nn.Linear(2, 1)))
    parallel(torch.ones(1, 2).requires_grad_()).sum().backward()


@refused("none that a hook dropped")
def dropped():
    layer = torch.nn.Linear(2, 1)
    layer.weight.register_post_accumulate_grad_hook(drop_gradient)
    BucketedDDP(layer)(INPUTS).sum().backward()


def drop_gradient(parameter):
    parameter.grad = None


@refused("two wrappers average the same parameter")
def nested():
    inner = BucketedDDP(torch.nn.Linear(2, 2))
    outer = BucketedDDP(torch.nn.Sequential(inner, torch.nn.Linear(2, 1)))
    outer(INPUTS).sum().backward()


@refused("two wrappers average the same parameter")
def shared():
    layer = torch.nn.Linear(2, 2)
    one = BucketedDDP(torch.nn.Sequential(torch.nn.Linear(2, 2), layer))
    other = BucketedDDP(torch.nn.Sequential(torch.nn.Linear(2, 2), layer))
    (one(INPUTS).sum() + other(INPUTS).sum()).backward()


@refused("no trainable parameters")
def nothing_to_train():
    BucketedDDP(torch.nn.Linear(2, 2).requires_grad_(False))


@refused("parameter 0 (weight) has shape (1, 2)")
def another_shape():
    BucketedDDP(torch.nn.Linear(2, 1 + dist.get_rank()))


@refused("frozen or unfrozen after wrapping: bias")
def unfrozen():
    layer = torch.nn.Linear(2, 1)
    layer.bias.requires_grad_(False)
    parallel = BucketedDDP(layer)
    layer.bias.requires_grad_(True)
    parallel(INPUTS)


@refused("copy its `module` and wrap that")
def copied():
    copy.deepcopy(BucketedDDP(torch.nn.Linear(2, 1)))


@refused("copy its `module` and wrap that")
def pickled():
    pickle.dumps(BucketedDDP(torch.nn.Linear(2, 1)))


def test_what_it_cannot_do_is_refused_in_clear_words():
    for messages in launch(REFUSALS.messages, world_size=2):
        REFUSALS.assert_told(messages)
        assert messages["nothing_to_train"].startswith("ValueError: ")
        assert messages["another_shape"].startswith("MismatchError: ")
        for name in ("copied", "pickled"):
            assert messages[name].startswith("TypeError: ")


def trained_after_a_refusal():
    """Return the gradient of a wrapper that has just refused a graph of gradients."""
    layer = torch.nn.Linear(2, 1)
    parallel = BucketedDDP(layer)
    with pytest.raises(RuntimeError, match="none with a graph"):
        parallel(INPUTS).pow(2).sum().backward(create_graph=True)
    layer.zero_grad()
    parallel(INPUTS).sum().backward()
    return layer.weight.grad.tolist()


def test_a_wrapper_works_after_a_refusal():
    for gradient in launch(trained_after_a_refusal, world_size=2):
        assert gradient == [[1.0, 1.0]]


def wrapped_again():
    model = tiny_model()
    for _ in range(2):
        # The first wrapper is gone, and must not listen any more.
        parallel = BucketedDDP(model, bucket_cap_mb=0.001)
        model.zero_grad()
        inputs, targets = next(tiny_batches(dist.get_rank(), dist.get_world_size()))
        with wire.counting() as traffic:
            cross_entropy(parallel(inputs), targets).backward()
    return traffic.bytes_sent, sum(p.numel() * 8 for p in model.parameters())


def test_a_model_can_be_wrapped_again():
    for sent, payload in launch(wrapped_again, world_size=2):
        assert sent == payload  # once, 2 (K-1)/K p at K=2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda():
    from ddp_course import rank_device

    def run():
        model = tiny_model(seed=dist.get_rank()).to(rank_device())
        batches = (
            (x.to(rank_device()), y.to(rank_device())) for x, y in tiny_batches(dist.get_rank(), 2)
        )
        stage5_bucketed.train(model, batches, 0.1)
        return weights(model).cpu()

    for result in launch(run, world_size=2, device="cuda"):
        assert (result - trained_alone()).abs().max() < 1e-12
