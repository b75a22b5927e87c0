"""Exercise 1: one training step, accumulation, and the size of a gradient."""

import torch
from torch import nn

from . import require, task
from .diagnose import number, same, tensors


def small_model(seed, batch_norm=False):
    """A little net in float64, and its plain SGD optimizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(5, 7), nn.Tanh(), *([nn.BatchNorm1d(7)] if batch_norm else []), nn.Linear(7, 3)]
        model = nn.Sequential(*layers).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def weights(model):
    """All parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def batches_of(random, count, size):
    """`count` batches of (inputs, targets) for the little net."""
    return [
        (inputs, torch.tensor([random.randrange(3) for _ in range(size)]))
        for inputs in tensors(random, count, size, 5, dtype=torch.float64)
    ]


def loss_of(model, inputs, targets, times=1):
    """The mean loss of a batch, so many times."""
    return nn.functional.cross_entropy(model(inputs), targets) * times


def reference_steps(seed, batches, zero=True):
    """Losses and weights after one SGD step a batch; with `zero` false gradients pile up."""
    model, optimizer = small_model(seed)
    losses = []
    for batch in batches:
        if zero:
            optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights(model)


@task("1.1", "train_step")
class TrainStep:
    """Forward, backward, update."""

    def draw(random, hidden):
        """A seed for the net, and three batches (five if `hidden`)."""
        return {"seed": random.randrange(10**6), "batches": batches_of(random, 3 + 2 * hidden, 8)}

    def probe(train_step, seed, batches):
        """Train the little net on all batches; the loss of each step, and the weights at the end."""
        model, optimizer = small_model(seed)
        return {"losses": [train_step(model, optimizer, *batch) for batch in batches], "weights": weights(model)}

    def judge_weights(evidence, seed, batches):
        """The weights are plain SGD's."""
        expected = reference_steps(seed, batches)[1]
        untouched, found = weights(small_model(seed)[0]), evidence["weights"]
        asks = "is there a backward() and then a step(), and no zero_grad() between them?"
        require(not same(found, untouched), f"the weights have not changed: {asks}")
        summed = reference_steps(seed, [(*batch, len(batch[0])) for batch in batches])[1]
        require(
            not same(found, summed, 1e-9),
            "the steps are too large: the loss is the mean over the samples, not their sum",
        )
        piled = reference_steps(seed, batches, zero=False)[1]
        require(not same(found, piled, 1e-9), "gradients pile up from step to step: is there a zero_grad()?")
        late = [new for _, new in [reference_steps(seed, batches[: n + 1]) for n in range(len(batches))]]
        require(
            not any(same(found, one, 1e-9) for one in late[:-1]),
            "the update is one step late: backward() comes before step()",
        )
        require(same(found, expected, 1e-9), f"the weights are not those of plain SGD after {len(batches)} steps")

    def judge_losses(evidence, seed, batches):
        """The losses are plain numbers from before each update."""
        losses = reference_steps(seed, batches)[0]
        for found in evidence["losses"]:
            require(not isinstance(found, torch.Tensor), "the loss is a tensor; return loss.item(), a plain number")
            number(found, float, "the loss")
        require(
            all(abs(a - b) < 1e-9 for a, b in zip(evidence["losses"], losses, strict=True)),  # not so if one is NaN
            "the loss is another one: return the mean loss before the update",
        )

    parts = {"weights": (1, judge_weights), "loss": (1, judge_losses)}


@task("1.2", "accumulate")
class Accumulate:
    """Several micro-batches, one update."""

    def draw(random, hidden):
        """A seed for the net, and two rounds of micro-batches (three if `hidden`)."""
        count = random.randrange(3, 6)
        return {"seed": random.randrange(10**6), "rounds": [batches_of(random, count, 4) for _ in range(2 + hidden)]}

    def probe(accumulate, seed, rounds):
        """One call a round; losses, final weights, and how often the optimizer stepped."""
        model, optimizer = small_model(seed)
        steps, step = [0], optimizer.step
        optimizer.step = lambda *args, **kwargs: (steps.__setitem__(0, steps[0] + 1), step(*args, **kwargs))[1]
        losses = [accumulate(model, optimizer, micro_batches) for micro_batches in rounds]
        return {"losses": losses, "weights": weights(model), "steps": steps[0]}

    def judge_weights(evidence, seed, rounds):
        """One update a round, and the weights of the whole batch at once."""
        count, steps = len(rounds[0]), evidence["steps"]
        expected = reference_steps(seed, whole_batches(rounds))[1]
        require(
            steps != len(rounds) * count, "there is an update after every micro-batch; all together give one update"
        )
        require(steps == len(rounds), f"{steps} updates for {len(rounds)} calls; each call makes one, at its end")
        found = evidence["weights"]
        faults = accumulated_wrongly(seed, rounds)
        for message, wrong in faults.items():
            require(not same(found, wrong, 1e-9), message)
        require(same(found, expected, 1e-9), "the weights are not those of one step on the whole batch")

    def judge_losses(evidence, seed, rounds):
        """The losses of the whole batch."""
        losses = reference_steps(seed, whole_batches(rounds))[0]
        for found_loss, loss in zip(evidence["losses"], losses, strict=True):
            require(not isinstance(found_loss, torch.Tensor), "the loss is a tensor; return a plain number")
            number(found_loss, float, "the loss")
            require(
                abs(found_loss - loss) < 1e-9,
                f"the loss is {found_loss:.4f}, that of the whole batch {loss:.4f}: return the mean over all samples",
            )

    parts = {"weights": (1, judge_weights), "loss": (1, judge_losses)}


def whole_batches(rounds):
    """The micro-batches of each round as one batch."""
    return [tuple(torch.cat(parts) for parts in zip(*round, strict=True)) for round in rounds]


def accumulated_wrongly(seed, rounds):
    """{message: weights} of what learners often write."""
    count = len(rounds[0])

    def run(scale=1 / count, zero="once", only=slice(None)):
        model, optimizer = small_model(seed)
        for micro_batches in rounds:
            if zero == "once":
                optimizer.zero_grad()
            for batch in micro_batches[only]:
                if zero == "each":
                    optimizer.zero_grad()
                (loss_of(model, *batch) * scale).backward()
            optimizer.step()
        return weights(model)

    return {
        f"the gradients add up to {count} times too much: divide each loss by the number of micro-batches": run(1.0),
        "only the last micro-batch counts: zero_grad() belongs before the first one, not before each": run(zero="each"),
        "only the last micro-batch counts, and undivided: zero_grad() belongs before the first one": run(1.0, "each"),
        "gradients pile up from call to call: is there a zero_grad()?": run(zero="never"),
        "the gradients are divided twice: the loss is a mean over samples already": run(
            1 / count / len(rounds[0][0][0])
        ),
        "the last micro-batch is left out": run(only=slice(None, -1)),
    }


@task("1.3", "gradient_bytes")
class GradientBytes:
    """Bytes that all gradients of a model take."""

    def draw(random, hidden):
        """Widths of the layers; if `hidden` two layers of one more model share their weights."""
        return {"widths": [random.randrange(3, 40) for _ in range(3)], "tied": hidden}

    def probe(gradient_bytes, widths, tied):
        """The answer for five or six models: dtypes, buffers, frozen and tied layers differ."""
        return [gradient_bytes(model) for model in sized_models(widths, tied).values()]

    def judge_dtypes(evidence, widths, tied):
        """Bytes by each parameter's own dtype, where all are trained."""
        check_bytes(evidence, widths, tied, lambda kind: "float" in kind)

    def judge_trained(evidence, widths, tied):
        """Of the trainable parameters only, each once."""
        check_bytes(evidence, widths, tied, lambda kind: "float" not in kind)

    parts = {"dtypes": (1, judge_dtypes), "trained only": (1, judge_trained)}


def check_bytes(evidence, widths, tied, chosen):
    """The bytes of those models whose kind is `chosen`."""
    for (kind, model), found in zip(sized_models(widths, tied).items(), evidence, strict=True):
        if not chosen(kind):
            continue
        number(found, int, "the result")
        trained = [p for p in model.parameters() if p.requires_grad]
        expected = sum(p.nbytes for p in trained)
        faults = {
            "those are numbers, not bytes: each takes element_size() bytes": sum(p.numel() for p in trained),
            "that is the number of tensors": len(trained),
            "frozen parameters (requires_grad=False) have no gradient": sum(p.nbytes for p in model.parameters()),
            "buffers have no gradient": sum(t.nbytes for t in [*model.parameters(), *model.buffers()]),
            "weights that two layers share have one gradient": sum(
                p.nbytes for p in shared_twice(model) if p.requires_grad
            ),
            "not every parameter is float32: ask for element_size()": sum(p.numel() * 4 for p in trained),
        }
        for message, wrong in faults.items():
            require(found != wrong or wrong == expected, f"{kind}: {found}; {message}")
        require(found == expected, f"{kind}: {found}; {expected} bytes were expected")


def shared_twice(model):
    """The parameters of all layers, those that layers share as often as they are used."""
    return [parameter for layer in model.modules() for parameter in layer.parameters(recurse=False)]


def sized_models(widths, tied):
    """Models in float32, in float64, with buffers, with a frozen layer, and if asked for with tied layers."""
    one, two, three = widths
    frozen = nn.Sequential(nn.Linear(one, two), nn.Linear(two, three))
    frozen[0].requires_grad_(False)
    shared = nn.Sequential(nn.Linear(two, two), nn.Linear(two, two))
    shared[1].weight = shared[0].weight
    return {
        "a float32 model": nn.Linear(one, two),
        "a float64 model": nn.Linear(two, three).double(),
        "a bfloat16 model": nn.Linear(three, one).bfloat16(),
        "a model with buffers": nn.Sequential(nn.Linear(one, three), nn.BatchNorm1d(three)),
        "a model with a frozen layer": frozen,
        **({"a model with tied layers": shared} if tied else {}),
    }
