"""Exercise 2: scatter, reduce, and what passes through the master."""

import torch
from torch import nn

from ddp_course.checking.diagnosis import same
from ddp_course.checking.tasks import task

from .shared import copied_gradient, require, tensors


@task(
    "2.1",
    "scatter",
    {"uneven sizes": 1, "even sizes": 1},
    forbidden=("ddp_course.stage2_dataparallel.scatter",),
)
class Scatter:
    """Cut a batch into shards, as equal as can be: nothing lost or twice, in order, the longer
    first, no empty ones.
    """

    def draw(random):
        sizes = [
            (8, 2),
            (10, 4),
            (7, 3),
            (3, 4),
            (5, 1),
            (random.randrange(9, 30), 8),
        ]
        return {"cases": [(tensors(random, 1, rows, 3)[0], devices) for rows, devices in sizes]}

    def probe(scatter, cases):
        for tensor, devices in cases:
            part = "uneven sizes" if len(tensor) % devices else "even sizes"
            about = f"{len(tensor)} samples on {devices} devices"
            shards = scatter(tensor, ["cpu"] * devices)
            in_a_list = isinstance(shards, list | tuple)
            require(
                in_a_list or shards is None,
                f"it returned a {type(shards).__name__}: a list of shards was expected",
            )
            rows = [rows_of(shard) for shard in shards] if in_a_list else None
            yield part, f"{about}, shards of", rows
            yield part, f"{about}, the shards", shards
            if in_a_list:
                in_turn = [("meta", "cpu")[place % 2] for place in range(devices)]
                on_meta = scatter(tensor, in_turn)
                yield (
                    part,
                    f'{about} called "meta" and "cpu" in turn, where the shards are',
                    [str(shard.device) for shard in on_meta],
                )


def rows_of(shard):
    """How many samples a shard has; none if it is a single number."""
    return len(shard) if shard.ndim else 0


def replicas_of(seed, count, frozen):
    """A model and its copies, each with own gradients; if `frozen`, only the last copy has one for
    its last layer's weight, and none has one for the first layer's bias.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        models = [nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double() for _ in range(count)]
        for index, model in enumerate(models):
            for name, parameter in model.named_parameters():
                elsewhere = name == "0.bias" or (name == "1.weight" and index != count - 1)
                if not (frozen and elsewhere):
                    parameter.grad = torch.randn_like(parameter)
    return models


def gradients(model):
    """All gradients as a list, None where there is none."""
    return [copied_gradient(parameter) for parameter in model.parameters()]


@task(
    "2.2",
    "reduce",
    {"sums": 1, "missing gradients": 1, "replicas kept": 1},
    bound=1e-12,
    forbidden=("ddp_course.stage2_dataparallel.reduce",),
)
class Reduce:
    """The master's gradients become the sum; the other replicas keep their own."""

    def draw(random):
        return {"seed": random.randrange(10**6), "counts": (3, 1, 2, 5)}

    def probe(reduce, seed, counts):
        for count in counts:
            for frozen in (False, True):
                models = replicas_of(seed, count, frozen)
                before = [gradients(model) for model in models]
                reduce(models[0], models)
                after = [gradients(model) for model in models]
                about = f"{count} replicas"
                if frozen:
                    about += ", of which none has a gradient in 1, and only the last one in 2"
                for index, gradient in enumerate(after[0]):
                    part = "missing gradients" if frozen else "sums"
                    yield part, f"{about}: the master's gradient of parameter {index}", gradient
                own = {p.grad.data_ptr() for p in models[0].parameters() if p.grad is not None}
                taken = {
                    p.grad.data_ptr()
                    for model in models[1:]
                    for p in model.parameters()
                    if p.grad is not None
                }
                added = count == 1 or not same(before[0], after[0])
                yield (
                    "replicas kept",
                    f"{about}: something was added to the master's gradients",
                    added,
                )
                as_before = same(before[1:], after[1:])
                yield (
                    "replicas kept",
                    f"{about}: the replicas' gradients are as they were",
                    as_before,
                )
                yield (
                    "replicas kept",
                    f"{about}: the master's gradients are tensors of its own",
                    not own & taken,
                )


@task("2.3", "master_sends", {"the model": 1, "the batch": 1})
class MasterSends:
    """Bytes that leave the master in one step: K-1 models, and all shards but its own."""

    def draw(random):
        for k in (2, 4, 8, 1):
            p = random.randrange(10**5, 10**8)
            inputs = random.randrange(10, 9999)
            outputs = random.randrange(1, 99)
            batch = (840 * inputs, 840 * outputs)
            yield "the model", f"{k} devices, p={p}, no batch", (p, 0, 0, k)
            yield (
                "the batch",
                f"{k} devices, no model, inputs={batch[0]}, outputs={batch[1]}",
                (0, *batch, k),
            )
