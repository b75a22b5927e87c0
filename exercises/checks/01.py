"""Exercise 1: one training step, accumulation, and the size of a gradient."""

import copy

import torch
from torch import nn

from ddp_exercises.tasks import task

from .shared import tensors

RATE = 0.07


def small_model(seed):
    """A little net in float64, and its plain SGD optimizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=RATE)


def weights(model):
    """All parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def after_one_step(model, batches):
    """The weights after a step of plain SGD on all batches at once; the model stays as it is."""
    ahead = copy.deepcopy(model)
    inputs = torch.cat([part for part, _ in batches])
    targets = torch.cat([part for _, part in batches])
    loss = nn.functional.cross_entropy(ahead(inputs), targets)
    gradients = torch.autograd.grad(loss, list(ahead.parameters()))
    return weights(ahead) - RATE * torch.cat([gradient.reshape(-1) for gradient in gradients])


def size_of_update(before, after, goal):
    """In words, that an update has the right direction but not the right size; else "". There is no
    update of size 0: the weights themselves show that nothing has changed.
    """
    right = goal - before
    update = after - before
    factor = (update @ right / (right @ right)).item()
    same_direction = update.allclose(factor * right, rtol=1e-6, atol=1e-12)
    if same_direction and factor != 0 and abs(factor - 1) > 1e-6:
        return f"the update is {factor:.4g} times as large as it should be"
    return ""


def batches_of(random, count, size):
    """`count` batches of (inputs, targets) for the little net."""
    batches = []
    for inputs in tensors(random, count, size, 5, dtype=torch.float64):
        targets = torch.tensor([random.randrange(3) for _ in range(size)])
        batches.append((inputs, targets))
    return batches


@task("1.1", "train_step", {"weights": 1, "loss": 1}, bound=1e-9)
class TrainStep:
    """Forward, backward, update: the weights are plain SGD's, the losses plain numbers from before
    each update.
    """

    def draw(random):
        return {"seed": random.randrange(10**6), "batches": batches_of(random, 5, 8)}

    def probe(train_step, seed, batches):
        model, optimizer = small_model(seed)
        for step, batch in enumerate(batches, 1):
            before = weights(model)
            goal = after_one_step(model, [batch])
            yield "loss", f"step {step}, the loss", train_step(model, optimizer, *batch)
            yield "weights", f"step {step}", size_of_update(before, weights(model), goal)
            yield "weights", f"after step {step}, the weights", weights(model)


@task("1.2", "accumulate", {"weights": 1, "loss": 1}, bound=1e-9)
class Accumulate:
    """Several micro-batches, one update: the weights and the loss of the whole batch at once."""

    def draw(random):
        counts = random.sample(range(2, 7), 3)
        return {
            "seed": random.randrange(10**6),
            "rounds": [batches_of(random, count, 6) for count in counts],
        }

    def probe(accumulate, seed, rounds):
        model, optimizer = small_model(seed)
        updates = 0
        step = optimizer.step

        def counted_step(*args, **kwargs):
            nonlocal updates
            updates += 1
            return step(*args, **kwargs)

        optimizer.step = counted_step
        for number, micro_batches in enumerate(rounds, 1):
            updates = 0
            before = weights(model)
            goal = after_one_step(model, micro_batches)
            yield "loss", f"call {number}, the loss", accumulate(model, optimizer, micro_batches)
            wrong_count = ""
            if updates != 1:
                wrong_count = f"{updates} updates: a call makes one, at its end"
            yield "weights", f"call {number}", wrong_count
            wrong_size = size_of_update(before, weights(model), goal)
            yield "weights", f"call {number}, size of the update", wrong_size
            yield "weights", f"call {number}, the weights after it", weights(model)


@task("1.3", "gradient_bytes", {"dtypes": 1, "trained only": 1})
class GradientBytes:
    """Bytes that all gradients of a model take: by each parameter's own dtype, trainable ones only,
    each once.
    """

    def draw(random):
        return {"widths": [random.randrange(3, 40) for _ in range(3)]}

    def probe(gradient_bytes, widths):
        inputs, hidden, outputs = widths
        yield "dtypes", "a float32 model", gradient_bytes(nn.Linear(inputs, hidden))
        yield "dtypes", "a float64 model", gradient_bytes(nn.Linear(hidden, outputs).double())
        yield "dtypes", "a bfloat16 model", gradient_bytes(nn.Linear(outputs, inputs).bfloat16())
        two_dtypes = nn.Sequential(nn.Linear(inputs, hidden), nn.Linear(hidden, outputs).double())
        yield "dtypes", "a model of two dtypes", gradient_bytes(two_dtypes)
        with_buffers = nn.Sequential(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs))
        yield "trained only", "a model with buffers", gradient_bytes(with_buffers)
        with_frozen_layer = nn.Sequential(nn.Linear(inputs, hidden), nn.Linear(hidden, outputs))
        with_frozen_layer[0].requires_grad_(False)
        yield "trained only", "a model with a frozen layer", gradient_bytes(with_frozen_layer)
        with_tied_layers = nn.Sequential(nn.Linear(hidden, hidden), nn.Linear(hidden, hidden))
        with_tied_layers[1].weight = with_tied_layers[0].weight
        yield "trained only", "a model with tied layers", gradient_bytes(with_tied_layers)
