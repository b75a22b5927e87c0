"""Exercise 8: pipeline schedules, their bubble, and the memory they need.

A task's `draw`, `probe` and `read` are what `ddp_exercises.tasks.Task` says.
"""

import math
from itertools import pairwise, product
from numbers import Integral

import torch
import torch.distributed as dist

from ddp_course import wire
from ddp_course.stage8_pipeline import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    gpipe,
    one_forward_one_backward,
    timetable,
)
from ddp_exercises.attempt import COLLECTIVES
from ddp_exercises.diagnosis import kind_of
from ddp_exercises.errors import Wrong
from ddp_exercises.tasks import task

from .shared import (
    NO_TENSOR,
    as_it_is,
    form_of_explanation,
    in_words,
    nothing,
    require,
    several,
    tensors,
    unequal_lengths,
)

COURSES_OWN = tuple(
    f"ddp_course.stage8_pipeline.schedules.{name}"
    for name in ("gpipe", "one_forward_one_backward", "interleaved", "zero_bubble", "bubble")
)


def steps_of(steps, about, *kinds):
    """Return a learner's schedule as a list of pairs: which of the `kinds`, and a number.

    Raises Wrong for anything else.
    """
    require(
        isinstance(steps, list | tuple),
        f"{about}: a list of steps was expected, not {kind_of(steps)}",
    )
    pairs = []
    for step in steps:
        pair = tuple(step) if isinstance(step, list | tuple) else ()
        require(
            len(pair) == 2 and pair[0] in kinds and isinstance(pair[1], Integral),
            f'{about}: each step is a pair such as ("{kinds[0]}", 0) or ("{kinds[1]}", 0)',
        )
        pairs.append(pair)
    return pairs


def completeness(steps, about):
    """Yield evidence of which micro-batches go forward and backward, in which order.

    It also says which of them go backward first.
    """
    forward = [m for kind, m in steps if kind == "F"]
    backward = [m for kind, m in steps if kind == "B"]
    yield "complete", f"{about}, forward", fault_of_order(forward, "forward")
    yield "complete", f"{about}, backward", fault_of_order(backward, "backward")
    yield "complete", f"{about}, micro-batches that go forward", forward
    yield "complete", f"{about}, micro-batches that go backward", backward
    gone_forward = set()
    too_early = []
    for kind, m in steps:
        if kind == "F":
            gone_forward.add(m)
        elif m not in gone_forward:
            too_early.append(m)
    yield "complete", f"{about}, micro-batches that go backward before they went forward", too_early


def fault_of_order(passes, direction):
    """Return in words that micro-batches go in one direction, but not the oldest first; else ""."""
    if sorted(passes) != list(range(len(passes))):
        return ""
    for newer, older in pairwise(passes):
        if newer > older:
            return f"micro-batch {newer} goes {direction} before micro-batch {older}: the oldest goes first"
    return ""


def fault_of_warm_up(kinds, stage, stages, micro_batches):
    """Return in words that a stage goes forward too often or too rarely at first; else "".

    At first means before it first goes backward.
    """
    warm_up, *_ = kinds.partition("B")
    right = min(stages - stage, micro_batches)
    if len(warm_up) == right:
        return ""
    fault = "too few" if len(warm_up) < right else "too many"
    return (
        f"{len(warm_up)} forward passes before the first backward pass are {fault}: the last stage goes"
        " backward after 1, the one before it after 2, and so on, as long as there are micro-batches"
    )


def draw_stages(random):
    """Return (stage, stages, micro-batches) for every stage of some pipelines.

    One of them has eight stages.
    """
    shapes = [
        (4, 8),
        (3, 3),
        (2, random.randrange(3, 7)),
        (4, 2),
        (1, 3),
        (8, random.randrange(8, 20)),
    ]
    cases = []
    for stages, micro_batches in shapes:
        for stage in range(stages):
            cases.append((stage, stages, micro_batches))
    return {"cases": cases}


@task("8.1", "gpipe", {"complete": 1, "forward first": 1}, forbidden=COURSES_OWN)
class GPipe:
    """Forward all, then backward all."""

    draw = draw_stages

    def read(returned, cases):
        for (stage, stages, micro_batches), order in zip(cases, returned, strict=True):
            about = f"stage {stage} of {stages}, {micro_batches} micro-batches"
            steps = steps_of(order, about, "F", "B")
            kinds = "".join(kind for kind, _ in steps)
            yield from completeness(steps, about)
            yield "forward first", f"{about}, in the order of time", kinds


@task(
    "8.2",
    "one_forward_one_backward",
    {"complete": 1, "warm-up": 1, "in turn": 1},
    forbidden=COURSES_OWN,
)
class OneForwardOneBackward:
    """S-1-s forward passes to warm up, then one forward and one backward in turn, then the rest."""

    draw = draw_stages

    def read(returned, cases):
        for (stage, stages, micro_batches), order in zip(cases, returned, strict=True):
            about = f"stage {stage} of {stages}, {micro_batches} micro-batches"
            steps = steps_of(order, about, "F", "B")
            kinds = "".join(kind for kind, _ in steps)
            yield from completeness(steps, about)
            fault = fault_of_warm_up(kinds, stage, stages, micro_batches)
            yield "warm-up", f"{about}, the warm-up", fault
            yield "in turn", f"{about}, in the order of time", in_short(steps)


def in_short(steps):
    """Return steps as a text, such as "F0 F1 B0"."""
    return " ".join(f"{kind}{m}" for kind, m in steps)


@task("8.3", "bubble", {"equal stages": 1, "a slow stage": 1}, forbidden=COURSES_OWN)
class Bubble:
    """One minus M sum(t) over S (sum(t) + (M-1) max(t)), the time from first to last.

    With equal stages it is (S-1)/(M+S-1).
    """

    def draw(random):
        cases = []
        for _ in range(3):
            seconds = random.randrange(1, 9)
            stages = random.randrange(2, 9)
            cases.append(([seconds] * stages, random.randrange(2, 33)))
        cases += [([3], 4), ([2, 2, 2, 2], 1)]
        for stages, micro_batches in ((2, 5), (4, 8), (5, 3), (6, 40), (3, 1)):
            cases.append((random.sample(range(1, 30), stages), micro_batches))
        for times, micro_batches in cases:
            part = "equal stages" if len(set(times)) == 1 else "a slow stage"
            yield part, f"times {times}, {micro_batches} micro-batches", (times, micro_batches)


def letters(schedule, stages, micro_batches):
    """Return a schedule of the course's own as the exercise writes it.

    It has for each stage pairs such as ("F", 0).
    """
    orders = []
    for order in schedule(stages, micro_batches):
        orders.append([(each.letter, each.microbatch) for each in order])
    return orders


@task("8.4", "most_held", {"GPipe and 1F1B": 1, "any order": 1})
class MostHeld:
    """The most micro-batches at any time that went forward and not yet backward."""

    def draw(random):
        usual = []
        for stage, stages, micro_batches in draw_stages(random)["cases"][::2]:
            for schedule in (gpipe, one_forward_one_backward):
                usual.append(letters(schedule, stages, micro_batches)[stage])
        # In the second one an early micro-batch stays while later ones come and go.
        other = []
        for text in ("F0 F1 B1 F2 F3 B0 B2 B3", "F0 F1 B1 F2 B2 F3 B3 F4 B4 B0"):
            other.append([(step[0], int(step[1])) for step in text.split()])
        other += [any_order(random, 6), any_order(random, 9)]
        for order in usual:
            yield "GPipe and 1F1B", in_short(order), (order,)
        for order in other:
            yield "any order", in_short(order), (order,)


def any_order(random, micro_batches):
    """Return a schedule in which any micro-batch that went forward may go backward next."""
    waiting = []
    begun = 0
    order = []
    while len(order) < 2 * micro_batches:
        # A forward pass is likelier, so that several micro-batches are held.
        if begun < micro_batches and (not waiting or random.random() < 0.6):
            waiting.append(begun)
            order.append(("F", begun))
            begun += 1
        else:
            order.append(("B", waiting.pop(random.randrange(len(waiting)))))
    return order


def ticks(orders):
    """Return how long the stages take for their orders, each step as early as it can be.

    It is infinity if they wait for ever.
    """
    instructions = {"F": Forward, "B": BackwardInput, "W": BackwardWeight}
    schedule = []
    for stage, order in enumerate(orders):
        schedule.append([instructions[kind](m, stage) for kind, m in order])
    try:
        return round(max(end for row in timetable(schedule) for _, _, end in row))
    except ValueError:  # This schedule has a deadlock.
        return math.inf


WAIT = (
    "the stages wait for each other for ever: a step stands behind one that needs it, by way of a"
    " neighbour"
)


def where_they_wait(orders):
    """Return in words why stages wait for ever that do F, B and W of all micro-batches; else ""."""
    for stage, order in enumerate(orders):
        for m in range(len(order) // 3):
            kinds = "".join(kind for kind, number in order if number == m)
            if kinds != "FBW":
                return (
                    f"stage {stage} would wait for ever: it has {kinds} for micro-batch {m}; F comes"
                    " first, then B, then W"
                )
    return WAIT if ticks(orders) == math.inf else ""


def in_ticks(took):
    """Return ticks, or words if they are infinite: those would be equal to every number."""
    return took if took < math.inf else "none that count"


def peak(order):
    """Return the most micro-batches that a stage holds, from their F to their W."""
    held = 0
    most = 0
    for kind, _ in order:
        if kind == "F":
            held += 1
        elif kind == "W":
            held -= 1
        most = max(most, held)
    return most


@task(
    "8.5",
    "schedule",
    {"valid": 1, "memory": 1, "1F1B beaten": 1, "the best": 1},
    forbidden=COURSES_OWN,
)
class Schedule:
    """Forward, backward, and weights whenever there is time: 3 M + S - 1 ticks at best."""

    def draw(random):
        return {"cases": [(2, 4), (4, 8), (3, random.randrange(3, 12)), (4, 4), (8, 16)]}

    def read(returned, cases):
        for (stages, count), answer in zip(cases, returned, strict=True):
            about = f"{stages} stages, {count} micro-batches"
            several(answer, stages, f"{about}: a list of steps for each stage was expected")
            orders = []
            for stage, steps in enumerate(answer):
                orders.append(steps_of(steps, f"{about}, stage {stage}", "F", "B", "W"))
            for stage, order in enumerate(orders):
                case = f"{about}, all steps of stage {stage}, in alphabetical order"
                yield "valid", case, sorted(order)
            all_steps = list(product("BFW", range(count)))
            took = math.inf
            most_held = math.inf
            waiting = ""
            if all(sorted(order) == all_steps for order in orders):
                took = ticks(orders)
                waiting = where_they_wait(orders)
            if took < math.inf:
                most_held = max(map(peak, orders))
            fits = most_held <= stages
            yield "valid", f"{about}, waiting", waiting
            case = f"{about}, the most micro-batches that a stage holds (only W releases one)"
            held = "at most as many as there are stages" if fits else most_held
            yield "memory", case, held
            plain = ticks_of_1f1b(stages, count)
            case = f"{about}, ticks (1F1B needs {plain}, so let W wait)"
            compared = "fewer" if took < plain else in_ticks(took)
            yield "1F1B beaten", case, compared
            possible = (
                f"{3 * count + stages - 1} are possible: which stage is idle while it has a W"
                " to do?"
            )
            with_room = took if fits else math.inf
            yield "the best", f"{about}, ticks ({possible})", in_ticks(with_room)


def ticks_of_1f1b(stages, count):
    """Return how long 1F1B takes if each backward pass is B and, at once, W."""
    orders = []
    for order in letters(one_forward_one_backward, stages, count):
        steps = []
        for kind, m in order:
            steps.append((kind, m))
            if kind == "B":
                steps.append(("W", m))
        orders.append(steps)
    return ticks(orders)


def one_at_a_time(ranks, micro_batches):
    """Return a schedule in which each micro-batch ends before the next one begins."""
    schedule = []
    for rank in range(ranks):
        row = []
        for m in range(micro_batches):
            row += [Forward(m, rank), Backward(m, rank)]
        schedule.append(row)
    return schedule


SCHEDULES = {"GPipe": gpipe, "1F1B": one_forward_one_backward, "one at a time": one_at_a_time}


def timeline_of(random, name, stages, count, slow):
    """Return the spans of a schedule, shuffled, in which stage `slow` takes longer for everything.

    A span is (stage, letter, micro-batch, start, end).
    """
    forward = []
    for stage in range(stages):
        forward.append(1.5 if stage == slow else random.uniform(0.95, 1.05))
    backward = [2 * seconds for seconds in forward]
    spans = []
    for row in timetable(SCHEDULES[name](stages, count), forward, backward):
        for step, start, end in row:
            spans.append((step.stage, step.letter, step.microbatch, round(start, 3), round(end, 3)))
    return random.sample(spans, len(spans))


@task("8.6", "read", {"schedule": 1, "slow stage": 1})
class WhichSchedule:
    """Three schedules and a slow stage, read from their timelines."""

    def draw(random):
        cases = []
        four_of_each = [*SCHEDULES] * 4
        for name in random.sample(four_of_each, len(four_of_each)):
            stages = random.randrange(3, 6)
            slow = random.randrange(stages)
            micro_batches = random.randrange(stages, stages + 4)
            cases.append((timeline_of(random, name, stages, micro_batches, slow),))
        # With as many micro-batches as stages the first stage does the same in 1F1B and GPipe.
        for name in ("1F1B", "GPipe"):
            cases.append((timeline_of(random, name, 4, 4, random.randrange(4)),))
        return {"cases": cases}

    def read(returned, cases):
        for number, ((timeline,), pair) in enumerate(zip(cases, returned, strict=True)):
            schedule, stage = several(pair, 2, "return a pair: (schedule, slow stage)")
            last_stage = max(of_stage for of_stage, *_ in timeline)
            first = letters_in_time(timeline, 0)
            last = letters_in_time(timeline, last_stage)
            case = f"timeline {number}: the first stage does {first}, the last {last}"
            yield "schedule", case, schedule
            look = "look at how long its own steps take, not at when it ends or how long it waits"
            yield "slow stage", f"timeline {number}, the slow stage ({look})", stage


def letters_in_time(timeline, stage):
    """Return the letters of what a stage does, in the order of time, such as "FFBB"."""
    steps = [(start, letter) for of_stage, letter, _, start, _ in timeline if of_stage == stage]
    return "".join(letter for _, letter in sorted(steps))


class StageOfThree:
    """One of three stages of a small model, one on each rank, as 8.7 describes it."""

    def __init__(self, weights, inputs, targets):
        rank = dist.get_rank()
        self.microbatches = len(inputs)
        self.module = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh())
        self.module.load_state_dict({"0.weight": weights[rank], "0.bias": weights[rank][0]})
        self.before = rank - 1 if rank > 0 else None
        self.after = rank + 1 if rank < 2 else None
        self.shape = (3, 5)
        self.kept = {}
        if self.before is None:
            self.inputs = [x.clone() for x in inputs]
        if self.after is None:
            self.targets = targets
            self.loss = torch.nn.functional.mse_loss


@task(
    "8.7",
    ("forward", "backward"),
    {"gradients": 3, "messages": 1, "memory": 1},
    ranks=3,
    bound=1e-5,
    forbidden=COLLECTIVES,
    every_order="gradients",
    hang="does each stage send what it computes to the one after, and its input's gradient to the one"
    " before, once for each micro-batch?",
)
class StageWithMessages:
    """Activations go right, their gradients come back, and the loss is a mean over micro-batches."""

    def draw(random):
        return {
            "weights": tensors(random, 3, 5, 5),
            "inputs": tensors(random, 4, 3, 5),
            "targets": tensors(random, 4, 3, 5),
        }

    def probe(forward, backward, weights, inputs, targets):
        for microbatches in (4, 2):
            stage = StageOfThree(weights, inputs[:microbatches], targets)
            kept = []  # how many micro-batches are kept after each step
            events = []
            with wire.observing(events.append):
                for step in gpipe(3, microbatches)[dist.get_rank()]:
                    run = forward if isinstance(step, Forward) else backward
                    try:
                        with in_words(NO_TENSOR):
                            run(stage, step.microbatch)
                    except (AttributeError, RuntimeError) as error:
                        raise_in_words(error, stage)
                    kept.append(len(stage.kept))
            gradients = [parameter.grad for parameter in stage.module.parameters()]
            sent = [event.bytes for event in events if event.kind == "send"]
            lengths = unequal_lengths(events, dist.group.WORLD)
            yield "", microbatches, (gradients, len(sent), sum(sent), kept, lengths)

    def read(returned, weights, inputs, targets):
        for rank, of_rank in enumerate(returned):
            for microbatches, values in zip((4, 2), of_rank, strict=True):
                gradients, messages_sent, bytes_sent, kept, lengths = values
                about = f"GPipe, {microbatches} micro-batches, stage {rank}"
                case = f"{about}, the gradients of its parameters"
                yield "gradients", case, {rank: end_to_end(gradients)}
                yield "messages", f"{about}, messages sent in a step", {rank: messages_sent}
                yield "messages", f"{about}, bytes sent in a step", {rank: bytes_sent}
                yield "messages", f"{about}, lengths of messages", {rank: lengths}
                case = f"{about}, micro-batches that are kept at the same time"
                yield "memory", case, {rank: max(kept)}
                case = f"{about}, micro-batches that are kept after the step"
                yield "memory", case, {rank: kept[-1]}


CAUSES = {
    "object has no attribute 'inputs'": "only the first stage has them, and `before` is None there alone;"
    " rank 0 counts as false, so ask `is None`",
    "object has no attribute 'targets'": "only the last stage has them: there `after` is None",
    "object has no attribute 'loss'": "only the last stage has one: there `after` is None",
    "'NoneType' object has no attribute": "what is None? What came from the stage before has a"
    " gradient, x.grad, only if it asks for one before the module runs: requires_grad_()",
    "a second time": "is each micro-batch kept under its own number, and does backward take that one?",
    "does not require grad": "the graph is gone: keep what the module returned; only what is sent is"
    " detached",
    "grad can be implicitly created only for scalar": "the output of a stage that is not the last is no"
    " loss: it begins backward with the gradient that comes from the stage after",
    "as an argument to": "what came from the stage before must ask for its gradient before the module"
    " runs: requires_grad_()",
    "One of the differentiated Tensors": "what came from the stage before must ask for its gradient"
    " before the module runs: requires_grad_()",
}


def raise_in_words(error, stage):
    """Raise what autograd or a missing gradient says, with its cause if that is known."""
    for words, cause in CAUSES.items():
        if words in str(error):
            if stage.before is None and "NoneType" in words:
                cause = "nobody is before the first stage: it neither receives nor sends back"
            if stage.after is None and "scalar" in words:
                cause = "the last stage's backward pass begins at its loss: keep that"
            first_sentence, *_ = str(error).partition(". ")
            raise Wrong(f"{first_sentence}: {cause}") from error
    raise error


def end_to_end(gradients):
    """Return the gradients of a stage's weight and bias as one vector, zeros where there is none."""
    parts = []
    for size, gradient in zip((25, 5), gradients, strict=True):
        parts.append(torch.zeros(size) if gradient is None else gradient.reshape(-1))
    return torch.cat(parts)


@task("8.8", "explain_figure", {"text": 1, "ticks": 1})
class ExplainFigure:
    """A figure in the learner's own words, and which points the learner ticks; a teacher reads it."""

    draw = nothing
    probe = as_it_is
    read = form_of_explanation
