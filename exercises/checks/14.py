"""Exercise 14: send the largest, meet less often, find a lossy hook, bet on a winner, send a byte.

A task's `draw`, `probe` and `read` are what `ddp_exercises.tasks.Task` says.
"""

from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddp_exercises.attempt import COLLECTIVES
from ddp_exercises.tasks import task
from manyranks.torch_inside import TorchDispatchMode

from .shared import (
    as_it_is,
    form_of_explanation,
    noted_ring,
    nothing,
    require,
    several,
    tensors,
    worlds,
)


@task("14.1", "compress", {"largest": 1, "feedback": 2}, bound=1e-5)
class Compress:
    """The largest values by magnitude, with their places; the rest is added to the next gradient."""

    def draw(random):
        cases = []
        for size, share in ((40, 0.1), (25, 0.2), (19, 0.14), (9, 0.01)):
            cases.append((tensors(random, 5, size), share))  # A case has five steps.
        return {"cases": cases}

    def probe(compress, cases):
        for gradients, share in cases:
            size = len(gradients[0])
            left = torch.zeros(size)
            for step, gradient in enumerate(gradients, 1):
                about = f"{size} values, share {share:g}, step {step}"
                given = gradient.clone()
                left_before = left.clone()
                answer = compress(given, left, share)
                fault = overwritten(given, gradient, left, left_before)
                values, places, left = several(answer, 3, f"{about}: return (values, places, left)")
                places = torch.as_tensor(places)
                require(
                    not places.is_floating_point(),
                    f"{about}: `places` are whole numbers: return (values, places, left), in this order",
                )
                require(
                    places.dtype != torch.bool,
                    f"{about}: `places` are the numbers of the places, as topk gives them, not a mask",
                )
                part = "largest" if step == 1 else "feedback"
                sent = torch.zeros(size).index_add(0, places.long(), values)
                yield part, f"{about}, the inputs afterwards", fault
                yield part, f"{about}, how many values; max(1, round(share * n)) are", len(values)
                yield part, f"{about}, what was sent", sent
                yield "feedback", f"{about}, what is left", left


def overwritten(gradient, gradient_before, left, left_before):
    """Return in words which of its inputs an answer has changed; "" if none."""
    if not torch.equal(gradient, gradient_before):
        return "the gradient was changed (aliasing): make a new tensor"
    if not torch.equal(left, left_before):
        return "`left` was changed (aliasing): make a new tensor"
    return ""


@task(
    "14.2",
    "outer_step",
    {"local SGD": 1, "outer step": 1},
    ranks=4,
    bound=1e-5,
    forbidden=COLLECTIVES,
)
class Meet:
    """Local SGD's meeting, with DiLoCo's outer step, to which the mean change is a gradient."""

    def draw(random):
        settings = [(1.0, 0.0), (0.7, 0.0), (0.5, 0.9)]  # (rate, momentum): the first is local SGD.
        settings.append((round(random.uniform(0.1, 2), 2), round(random.uniform(0.1, 0.9), 2)))
        shared, velocity = tensors(random, 2, 30)
        own = tensors(random, 4, 30)
        return {"shared": shared, "own": own, "velocity": velocity, "settings": settings}

    def probe(outer_step, shared, own, velocity, settings):
        for size, group in worlds(2, 3):
            for index, (rate, momentum) in enumerate(settings):
                about = f"with {size} ranks, rate {rate:g}, momentum {momentum:g}"
                all_reduce, calls = noted_ring(group)
                mine = own[dist.get_rank()].clone()
                answer = outer_step(
                    shared.clone(), mine, velocity.clone(), all_reduce, size, rate, momentum
                )
                pair = f"{about}: return a pair: (weights, velocity)"
                weights, new_velocity = several(answer, 2, pair)
                part = "outer step" if index else "local SGD"
                yield part, f"{about}, all-reduces", len(calls)
                yield part, f"{about}, the weights", weights
                yield part, f"{about}, the velocity", new_velocity


@task("14.3", ("the_bug", "make_hook"), {"the line": 1, "mended": 1}, secret=("the line",))
class FindTheLossyHook:
    """A hook that never sends what is large and negative: line 6 does not go by magnitude."""

    def draw(random):
        drifts = [tensors(random, 1, 24)[0] for _ in range(2)]
        return {"drifts": drifts, "noise": [tensors(random, 40, 24) for _ in range(2)]}

    def probe(the_bug, make_hook, drifts, noise):
        yield "", "line", the_bug()
        hook = make_hook(0.25)
        other = make_hook(0.25)
        for step in range(40):
            other("layer0", 5 - drifts[1])  # Another hook, of another model with the same names.
            for number, drift in enumerate(drifts):
                gradient = drift + 0.1 * noise[number][step]
                yield "", f"{step} {number}", hook(f"layer{number}", gradient).clone()

    def read(returned, drifts, noise):
        line, *sent = returned
        yield "the line", "the faulty line", line
        for number, drift in enumerate(drifts):
            gradients = [drift + 0.1 * of_step for of_step in noise[number]]
            case = f"parameter {number}, step by step"
            of_parameter = sent[number :: len(drifts)]  # The probe takes the parameters in turn.
            yield "mended", case, broken_promise(of_parameter, gradients)


NO_FEEDBACK = (
    "only this step's gradient counts: what was not sent is kept under the name, and added before the"
    " largest are chosen"
)


def broken_promise(steps, gradients):
    """Return in words what is wrong with the first wrong step of a hook; "" if nothing is.

    Of what is owed, this gradient and the rest of those before, a step sends the quarter of the
    largest magnitudes, as they are.
    """
    owed = torch.zeros_like(gradients[0])
    for number, (sent, gradient) in enumerate(zip(steps, gradients, strict=True), 1):
        require(
            isinstance(sent, torch.Tensor) and sent.shape == gradient.shape,
            f"step {number}: the hook returns a tensor as long as the gradient: what is sent, else 0",
        )
        owed = owed + gradient
        places = sent != 0
        values = int(places.sum())
        if values != 6:
            return f"step {number} sends {values} values; a quarter of 24 are 6"
        fault = wrong_values(sent[places], owed[places], gradient[places])
        if not fault:
            fault = wrong_places(owed, places, gradient)
        if fault:
            return f"step {number}: {fault}"
        owed = owed - sent
    return ""


def wrong_values(sent, owed, gradient):
    """Return in words what is wrong with the values that a hook sends; "" if they are owed."""
    near = {"atol": 1e-3, "rtol": 1e-3}
    if torch.allclose(sent, owed, **near):
        return ""
    if torch.allclose(sent, owed.abs(), **near):
        return (
            "the values have lost their sign: magnitudes choose the places, and owed itself is sent"
        )
    if torch.allclose(sent, gradient, **near):
        return NO_FEEDBACK
    return (
        "what is sent is not what is owed, the gradient and what is left of the steps before: is"
        " everything kept that was not sent, nothing that was, and for each name of each hook on its own?"
    )


def wrong_places(owed, places, gradient):
    """Return in words which other places a hook chooses; "" if these are the largest magnitudes."""
    chosen = owed[places]
    others = owed[~places]
    if chosen.abs().min() >= others.abs().max() - 1e-3:
        return ""
    if chosen.min() >= others.max() - 1e-3:
        return "large negative values are not sent, however much is owed: go by magnitude"
    if chosen.abs().max() <= others.abs().min() + 1e-3:
        return "the smallest magnitudes are sent; the largest should be"
    if gradient[places].abs().min() >= gradient[~places].abs().max() - 1e-3:
        return NO_FEEDBACK
    return "larger magnitudes are owed elsewhere"


class Way(NamedTuple):
    """How a way of 14.4 trains: its loss falls at a rate, and a step sends so many bytes."""

    rate: float
    steps: int
    nbytes: float


WAYS = {
    "every step": Way(rate=0.09, steps=40, nbytes=4e6),
    "local SGD": Way(rate=0.07, steps=60, nbytes=5e5),
    "top 1 %": Way(rate=0.05, steps=60, nbytes=8e4),
}
TARGET = 2.6  # The loss of 14.4.


@task("14.4", ("winner", "break_even"), {"winner": 1, "break-even": 1})
class Winner:
    """Loss against time: who is first on a link, and from which link on the plain way wins."""

    def draw(random):
        ways = {}
        for name, way in WAYS.items():
            losses = falling_losses(way.rate * random.uniform(0.95, 1.05), way.steps)
            if name == "top 1 %":
                # This way's loss never falls below the target.
                losses = [max(loss, TARGET) for loss in losses]
            ways[name] = {"losses": losses, "bytes": int(way.nbytes * random.uniform(0.9, 1.1))}
        # This way never comes to the target.
        losses = [5 - 0.02 * step for step in range(1, 61)]
        ways["far too coarse"] = {"losses": losses, "bytes": 1000}
        links = [1e6, 2e7, 1e8, 1e9, 1e11, 5e6, 5e8]
        return {
            "ways": ways,
            "target": TARGET,
            "compute_s": random.uniform(0.02, 0.05),
            "links": links,
        }

    def probe(winner, break_even, ways, target, compute_s, links):
        for link in links:
            about = (
                f"on {link / 1e6:g} Mbit/s, by the time to a loss of {target:g}, not by steps or"
                " bytes alone"
            )
            copies = {name: dict(way) for name, way in ways.items()}
            yield "winner", about, winner(copies, target, compute_s, link)
        for name in ("local SGD", "top 1 %"):
            level = break_even(dict(ways["every step"]), dict(ways[name]), target, compute_s)
            case = f"every step and {name}, in bit/s"
            rounded = float(f"{level:.6g}") if type(level) in (int, float) else level
            yield "break-even", case, rounded


def falling_losses(rate, steps):
    """Return the losses of so many steps, which fall from 5 towards 2, though not in every step."""
    losses = []
    for step in range(1, steps + 1):
        ripple = 0.01 * (step % 3)
        losses.append(2 + 3 * 2.718 ** (-rate * step) + ripple)
    return losses


@task("14.5", "int8_mean", {"first step": 2, "feedback": 1, "bytes": 1}, bound=1e-5)
class Int8Mean:
    """Whole numbers of one byte and a scale per rank; what rounding loses is sent later."""

    def draw(random):
        rounds = []
        for _ in range(4):
            usual, large, small = tensors(random, 3, 30)
            rounds.append([usual, 20 * large, 0.01 * small])
        return {"rounds": rounds, "zeros": [torch.zeros(8) for _ in range(3)]}

    def probe(int8_mean, rounds, zeros):
        left = [torch.zeros(30) for _ in range(3)]
        for number, gradients in enumerate(rounds, start=1):
            about = f"step {number}"
            step = on_ranks(int8_mean, gradients, left, about)
            left = step.left
            part = "first step" if number == 1 else "feedback"
            for rank in range(3):
                yield part, f"{about}, the mean on rank {rank}", step.means[rank]
                yield "feedback", f"{about}, what is left on rank {rank}", step.left[rank]
            yield "feedback", f"{about}, gradient and left afterwards", step.changed
            yield "bytes", f"{about}, bytes of what rank 0 gathers", step.nbytes
        two = rounds[0][:2]
        step = on_ranks(int8_mean, two, [torch.zeros(30)] * 2, "two ranks")
        yield "first step", "two ranks, the mean on rank 0", step.means[0]
        with Conversions() as conversions:
            step = on_ranks(int8_mean, zeros, zeros, "all zeros")
        yield "first step", "all zeros, what is rounded", conversions.fault
        yield "first step", "all zeros, the mean on rank 0", step.means[0]
        yield "feedback", "all zeros, what is left on rank 0", step.left[0]


class Conversions(TorchDispatchMode):
    """Notices, in words in `fault`, that what is no number becomes a byte: that may be any byte."""

    fault = ""

    def __torch_dispatch__(self, function, types, arguments=(), names=None):
        result = function(*arguments, **(names or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.int8:
            for given in arguments:
                if isinstance(given, torch.Tensor) and given.isnan().any():
                    self.fault = (
                        "0 / 0 is not a number, and which byte it becomes differs from processor to"
                        " processor: where the scale is 0, divide by something else"
                    )
        return result


class Played(NamedTuple):
    """What an answer did on all ranks.

    `means` and `left` have what each rank returned, `nbytes` is what rank 0 gave to `gather`, and
    `changed` says in words whether an answer has changed what it was given.
    """

    means: list[Any]
    left: list[Any]
    nbytes: int
    changed: str


def on_ranks(int8_mean, gradients, left, about):
    """Play a rank for each of the `gradients`; return what was Played.

    A rank's call is repeated until `gather` can give it what the others have at the same place.
    """
    ranks = range(len(gradients))
    gathered = [[] for _ in ranks]  # what each rank has handed to gather, call by call
    answers = [None for _ in ranks]
    changed = ""
    while None in answers:
        calls_before = [len(calls) for calls in gathered]
        for rank in ranks:
            arguments = (gradients[rank].clone(), left[rank].clone())
            try:
                result = int8_mean(*arguments, gather_of_rank(rank, gathered, about))
            except Later:
                continue
            originals = (gradients[rank], left[rank])
            for name, now, before in zip(("gradient", "left"), arguments, originals, strict=True):
                if not torch.equal(now, before):
                    changed = f"`{name}` was changed: somebody else needs it, so make a new tensor"
            answers[rank] = several(result, 2, f"{about}: return a pair: (mean, left)")
        if calls_before == [len(calls) for calls in gathered]:
            break  # No rank comes any further.
    require(None not in answers, f"{about}: ranks do not call gather equally often")
    nbytes = sum(tensor.nbytes for tensor in gathered[0])
    means = [mean for mean, _ in answers]
    rests = [rest for _, rest in answers]
    return Played(means, rests, nbytes, changed)


def gather_of_rank(rank, gathered, about):
    """Return the `gather` of one call of a rank's answer.

    It raises Later where another rank has not `gathered` as often.
    """
    calls = count()

    def gather(tensor):
        require(
            isinstance(tensor, torch.Tensor),
            f"{about}: gather takes a tensor, not {tensor!r:.40}: the scale is a tensor of one"
            " number",
        )
        place = next(calls)
        if len(gathered[rank]) == place:  # A repeated call hands over the same once more.
            gathered[rank].append(tensor.clone())
        if any(len(of_rank) <= place for of_rank in gathered):
            raise Later
        return [of_rank[place].clone() for of_rank in gathered]

    return gather


class Later(Exception):
    """A rank has to wait for what another one gathers; not to be caught by an answer."""


@task("14.6", "explain_figure", {"text": 1, "ticks": 1})
class ExplainFigure:
    """Two figures in the learner's own words, and which points the learner ticks; a teacher reads it."""

    draw = nothing
    probe = as_it_is
    read = form_of_explanation
