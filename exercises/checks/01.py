"""Exercise 1: one training step, accumulation, and the size of a gradient.

A task's `draw`, `probe` and `read` are what `ddp_exercises.tasks.Task` says.
"""

import copy
import weakref

import torch
from torch import nn

from ddp_exercises.tasks import task

from .shared import require, tensors

RATE = 0.07
SAMPLES = 6  # A micro-batch of 1.2 has so many.


def small_model(seed):
    """Return a little net in float64, and its plain SGD optimizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=RATE)


def weights(model):
    """Return all parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def after_one_step(model, batches):
    """Return the weights after a step of plain SGD on all batches; the model stays as it is."""
    ahead = copy.deepcopy(model)
    inputs = torch.cat([part for part, _ in batches])
    targets = torch.cat([part for _, part in batches])
    loss = nn.functional.cross_entropy(ahead(inputs), targets)
    gradients = torch.autograd.grad(loss, list(ahead.parameters()))
    return weights(ahead) - RATE * torch.cat([gradient.reshape(-1) for gradient in gradients])


def size_of_update(before, after, goal):
    """Return in words that an update has the right direction but not the right size; else "".

    There is no update of size 0: the weights themselves show that nothing has changed.
    """
    right = goal - before
    update = after - before
    factor = (update @ right / (right @ right)).item()
    same_direction = update.allclose(factor * right, rtol=1e-6, atol=1e-12)
    if same_direction and factor != 0 and abs(factor - 1) > 1e-6:
        return f"the update is {factor:.4g} times as large as it should be"
    return ""


def batches_of(random, count, size):
    """Return `count` batches of (inputs, targets) for the little net."""
    batches = []
    for inputs in tensors(random, count, size, 5, dtype=torch.float64):
        targets = torch.tensor([random.randrange(3) for _ in range(size)])
        batches.append((inputs, targets))
    return batches


class Updates:
    """Counts the updates that an optimizer makes."""

    def __init__(self, optimizer):
        self.count = 0
        self.step = optimizer.step
        optimizer.step = self.counted_step

    def counted_step(self, *args, **kwargs):
        self.count += 1
        return self.step(*args, **kwargs)


class RoomForOne:
    """While it is entered, a little net has room for one micro-batch.

    It refuses a forward pass of more samples, and `most` counts of how many passes the activations
    were there at the same time.
    """

    def __init__(self, model, samples):
        self.model = model
        self.samples = samples
        self.activations = []  # There is a weak reference for each forward pass.
        self.most = 0

    def __enter__(self):
        _, hidden, _ = self.model
        self.hooks = [
            self.model.register_forward_pre_hook(self.refuse_more),
            hidden.register_forward_hook(self.note),
        ]
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def refuse_more(self, _, arguments):
        (inputs,) = arguments
        require(
            len(inputs) <= self.samples,
            f"a forward pass of {len(inputs)} samples: there is room for the {self.samples} of one"
            " micro-batch, so take one after the other",
        )

    def note(self, module, arguments, activations):
        # Only the graph keeps these, until its backward pass is over.
        self.activations.append(weakref.ref(activations))
        alive = sum(reference() is not None for reference in self.activations)
        self.most = max(self.most, alive)

    def fault(self):
        """Return in words that there was no forward pass, or that activations were kept; else "".

        The activations are those of several micro-batches.
        """
        if self.most == 0:
            return "there is no forward pass of the model"
        if self.most == 1:
            return ""
        return (
            f"{self.most} graphs are kept at the same time, and memory has room for the activations of"
            " one micro-batch: go backward after each forward pass, which frees them"
        )


@task(
    "1.1",
    "train_step",
    {"weights": 1, "loss": 1},
    bound=1e-9,
    forbidden=("ddp_course.stage1_single.train",),
)
class TrainStep:
    """Forward, backward, update: weights are plain SGD's, losses numbers from before updates."""

    def draw(random):
        return {"seed": random.randrange(10**6), "batches": batches_of(random, 5, 8)}

    def probe(train_step, seed, batches):
        model, optimizer = small_model(seed)
        updates = Updates(optimizer)
        for step, batch in enumerate(batches, 1):
            updates.count = 0
            before = weights(model)
            goal = after_one_step(model, [batch])
            yield "loss", f"step {step}, the loss", train_step(model, optimizer, *batch)
            yield "weights", f"step {step}", size_of_update(before, weights(model), goal)
            yield "weights", f"after step {step}, the weights", weights(model)
            past_it = ""
            if updates.count == 0 and not weights(model).equal(before):
                past_it = (
                    "the weights change without the optimizer: it makes the update, by its step(), since"
                    " another one has momentum, or Adam's state"
                )
            yield "weights", f"step {step}, who makes the update", past_it


@task(
    "1.2",
    "accumulate",
    {"weights": 1, "loss": 0.5, "memory": 0.5},
    bound=1e-9,
    forbidden=("ddp_course.stage1_single.train",),
)
class Accumulate:
    """Several micro-batches, one update: that of the whole batch, in room for one of them."""

    def draw(random):
        counts = random.sample(range(2, 7), 3)
        return {
            "seed": random.randrange(10**6),
            "rounds": [batches_of(random, count, SAMPLES) for count in counts],
        }

    def probe(accumulate, seed, rounds):
        model, optimizer = small_model(seed)
        updates = Updates(optimizer)
        for number, micro_batches in enumerate(rounds, 1):
            updates.count = 0
            before = weights(model)
            goal = after_one_step(model, micro_batches)
            with RoomForOne(model, SAMPLES) as room:
                loss = accumulate(model, optimizer, micro_batches)
            yield "loss", f"call {number}, the loss", loss
            wrong_count = ""
            if updates.count != 1:
                wrong_count = f"{updates.count} updates: a call makes one, at its end"
            yield "weights", f"call {number}", wrong_count
            wrong_size = size_of_update(before, weights(model), goal)
            yield "weights", f"call {number}, size of the update", wrong_size
            yield "weights", f"call {number}, the weights after it", weights(model)
            yield "memory", f"call {number}, what is kept", room.fault()


@task("1.3", "gradient_bytes", {"dtypes": 1, "trained only": 1})
class GradientBytes:
    """Bytes that all gradients of a model take: each in its dtype, trainable ones, each once."""

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
