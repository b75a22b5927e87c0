"""Exercise 2: scatter, reduce, and what passes through the master.

A task's `draw`, `probe` and `read` are what `ddp_exercises.tasks.Task` says.
"""

from itertools import product

import torch
from torch import nn

from ddp_exercises.diagnosis import same
from ddp_exercises.tasks import task

from .shared import copied_gradient, require, tensors


@task(
    "2.1",
    "scatter",
    {"uneven sizes": 1, "even sizes": 1},
    forbidden=("ddp_course.stage2_dataparallel.scatter",),
)
class Scatter:
    """Cut a batch into shards, as equal as can be: in order, the longer first, no empty ones."""

    def draw(random):
        cases = []
        many = random.randrange(9, 30)
        for rows, devices in ((8, 2), (10, 4), (7, 3), (3, 4), (5, 1), (many, 8)):
            (tensor,) = tensors(random, 1, rows, 3)
            cases.append((tensor, devices))
        return {"cases": cases}

    def probe(scatter, cases):
        for tensor, devices in cases:
            part = "uneven sizes" if len(tensor) % devices else "even sizes"
            about = f"{len(tensor)} samples on {devices} devices"
            shards = scatter(tensor, ["cpu"] * devices)
            if shards is None:
                yield part, f"{about}, shards of", None
                yield part, f"{about}, the shards", None
                continue
            require(
                isinstance(shards, list | tuple),
                f"it returned a {type(shards).__name__}: a list of shards was expected",
            )
            yield part, f"{about}, shards of", [rows_of(shard) for shard in shards]
            yield part, f"{about}, the shards", shards
            names = [("meta", "cpu")[index % 2] for index in range(devices)]
            places = [str(shard.device) for shard in scatter(tensor, names)]
            case = f'{about} called "meta" and "cpu" in turn, where the shards are'
            yield part, case, places


def rows_of(shard):
    """Return how many samples a shard has; 0 if it is a single number."""
    return len(shard) if shard.ndim else 0


def replicas_of(seed, count, some_missing):
    """Return `count` models of one shape, each with its own gradients.

    With `some_missing`, no model has a gradient of the first layer's bias, and only the last model
    one of the last layer's weight.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        models = [nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double() for _ in range(count)]
        for model in models:
            missing = []
            if some_missing:
                missing = ["0.bias"] if model is models[-1] else ["0.bias", "1.weight"]
            for name, parameter in model.named_parameters():
                if name not in missing:
                    parameter.grad = torch.randn_like(parameter)
    return models


def gradients(model):
    """Return copies of all gradients as a list, None where there is none."""
    return [copied_gradient(parameter) for parameter in model.parameters()]


def addresses(models):
    """Return where in memory the gradients of some models begin."""
    places = set()
    for model in models:
        for parameter in model.parameters():
            if parameter.grad is not None:
                places.add(parameter.grad.data_ptr())
    return places


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
        kept = "replicas kept"
        for count, some_missing in product(counts, (False, True)):
            models = replicas_of(seed, count, some_missing)
            master, *others = models
            before = [gradients(model) for model in models]
            reduce(master, models)
            after = [gradients(model) for model in models]
            part = "sums"
            about = f"{count} replicas"
            if some_missing:
                part = "missing gradients"
                about += ", of which none has a gradient in 1, and only the last one in 2"
            for index, gradient in enumerate(after[0]):
                yield part, f"{about}: the master's gradient of parameter {index}", gradient
            added = count == 1 or not same(before[0], after[0])
            yield kept, f"{about}: something was added to the master's gradients", added
            as_before = same(before[1:], after[1:])
            yield kept, f"{about}: the replicas' gradients are as they were", as_before
            own = addresses([master]).isdisjoint(addresses(others))
            yield kept, f"{about}: the master's gradients are tensors of its own", own


@task("2.3", "master_sends", {"the model": 1, "the batch": 1})
class MasterSends:
    """Bytes that leave the master in one step: K-1 models, and all shards but its own."""

    def draw(random):
        for devices in (2, 4, 8, 1):
            model = random.randrange(10**5, 10**8)
            inputs = 840 * random.randrange(10, 9999)  # Shards are equal: 1, 2, 4 and 8 divide 840.
            outputs = 840 * random.randrange(1, 99)
            yield "the model", f"{devices} devices, p={model}, no batch", (model, 0, 0, devices)
            about = f"{devices} devices, no model, inputs={inputs}, outputs={outputs}"
            yield "the batch", about, (0, inputs, outputs, devices)
