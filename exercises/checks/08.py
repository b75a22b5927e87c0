"""Exercise 8: pipeline schedules, their bubble, and the memory they need."""

from collections.abc import Iterable
from numbers import Real

from ddp_course.grading.checks import require, task
from ddp_course.stage8_pipeline import Instruction, gpipe, one_forward_one_backward, timetable

COMPLETE = "each micro-batch goes forward once and backward once, in order"


def steps_of(steps, about, *kinds):
    """A schedule as a list of pairs: of which of two kinds a step is, and a number."""
    steps = list(steps) if isinstance(steps, Iterable) else steps
    require(isinstance(steps, list), f"{about}: a list of steps was expected, not {type(steps).__name__}")
    pairs = [tuple(step) if isinstance(step, list | tuple) else (step,) for step in steps]
    good = all(len(pair) == 2 and pair[0] in kinds and type(pair[1]) is int for pair in pairs)
    require(good, f'{about}: each step is a pair such as ("{kinds[0]}", 0) or ("{kinds[1]}", 0)')
    return pairs


def completeness(steps, micro_batches):
    """In words, whether each micro-batch goes forward and backward once, forward first, in order; or what is wrong."""
    for letter, what in (("F", "forward"), ("B", "backward")):
        done = [m for kind, m in steps if kind == letter]
        if lost := sorted(set(range(micro_batches)) - set(done)):
            counted = "; they are counted from 0" if lost == [0] and micro_batches in done else ""
            return f"micro-batch {lost[0]} never goes {what}{counted}"
        if len(done) != micro_batches:
            return f"{len(done)} {what} passes; {micro_batches} micro-batches, counted from 0, were expected"
        if done != sorted(done):
            return f"{what} passes run in the order {done}; micro-batch 0 comes first"
    early = [m for m in range(micro_batches) if steps.index(("B", m)) < steps.index(("F", m))]
    return f"micro-batch {early[0]} goes backward before it went forward" if early else COMPLETE


def draw_stages(random, hidden):
    """(stage, stages, micro-batches) for every stage of some pipelines, one of eight stages among them if `hidden`."""
    shapes = [(4, 8), (3, 3), (2, random.randrange(3, 7)), (4, 2), (1, 3), *[(8, random.randrange(8, 20))] * hidden]
    return {"cases": [(stage, stages, m) for stages, m in shapes for stage in range(stages)]}


@task("8.1", "gpipe", {"complete": 1, "forward first": 1})
class GPipe:
    """Forward all, then backward all."""

    draw = draw_stages

    def probe(gpipe, cases):
        """Of each stage's schedule, whether it is complete, and whether all forward passes come first."""
        for stage, stages, micro_batches in cases:
            about = f"stage {stage} of {stages}, {micro_batches} micro-batches"
            steps = steps_of(gpipe(stage, stages, micro_batches), about, "F", "B")
            kinds = "".join(kind for kind, _ in steps)
            yield "complete", about, completeness(steps, micro_batches)
            yield "forward first", f"{about}, in the order of time", kinds


@task("8.2", "one_forward_one_backward", {"complete": 1, "warm-up": 1, "in turn": 1})
class OneForwardOneBackward:
    """S-1-s forward passes to warm up, then one forward and one backward in turn, then the rest."""

    draw = draw_stages

    def probe(one_forward_one_backward, cases):
        """Of each stage's schedule, whether it is complete, the passes before the first backward, and their order."""
        for stage, stages, micro_batches in cases:
            about = f"stage {stage} of {stages}, {micro_batches} micro-batches"
            steps = steps_of(one_forward_one_backward(stage, stages, micro_batches), about, "F", "B")
            kinds = "".join(kind for kind, _ in steps)
            yield "complete", about, completeness(steps, micro_batches)
            yield "warm-up", f"{about}, forward passes before the first backward", (kinds + "B").index("B")
            yield "in turn", f"{about}, in the order of time", " ".join(f"{kind}{m}" for kind, m in steps)


@task("8.3", "bubble", {"equal stages": 1, "a slow stage": 1})
class Bubble:
    """One minus M sum(t) over S (sum(t) + (M-1) max(t)), the time from first to last; of equal stages (S-1)/(M+S-1)."""

    def draw(random, hidden):
        equal = [([random.randrange(1, 9)] * random.randrange(2, 9), random.randrange(2, 33)) for _ in range(3)]
        slow = [(random.sample(range(1, 30), stages), m) for stages, m in ((2, 5), (4, 8), (5, 3), (6, 40), (3, 1))]
        return {"cases": [*equal, ([3], 4), ([2, 2, 2, 2], 1), *slow]}

    def probe(bubble, cases):
        """The share in each case, as a plain number."""
        for times, micro_batches in cases:
            share = bubble(list(times), micro_batches)
            part = "equal stages" if len(set(times)) == 1 else "a slow stage"
            yield (
                part,
                f"times {times}, {micro_batches} micro-batches",
                float(share) if isinstance(share, Real) else share,
            )


def letters(schedule, stages, micro_batches):
    """A schedule of the course's own as the exercise writes it: for each stage pairs such as ("F", 0)."""
    return [[(action[0].upper(), m) for action, m, _ in order] for order in schedule(stages, micro_batches)]


@task("8.4", "most_held", {"GPipe and 1F1B": 1, "any order": 1})
class MostHeld:
    """The most micro-batches at any time that went forward and not yet backward."""

    def draw(random, hidden):
        cases = draw_stages(random, hidden)["cases"]
        schedules = (gpipe, one_forward_one_backward)
        usual = [letters(schedule, *case[1:])[case[0]] for case in cases[::2] for schedule in schedules]
        fixed = [("F", 0), ("B", 0), ("F", 1), ("F", 2), ("B", 1), ("F", 3), ("B", 2), ("B", 3)]
        return {"usual": usual, "other": [fixed, any_order(random, 6), any_order(random, 9)]}

    def probe(most_held, usual, other):
        """The number for each schedule."""
        kinds = {"GPipe and 1F1B": usual, "any order": other}
        return {part: {" ".join(f"{kind}{m}" for kind, m in order): most_held(list(order)) for order in orders}
                for part, orders in kinds.items()}  # fmt: skip


def any_order(random, count):
    """A schedule in which any micro-batch that went forward may go backward next."""
    waiting, begun, order = [], 0, []
    while len(order) < 2 * count:
        if begun < count and (not waiting or random.random() < 0.6):
            waiting.append(begun)
            order.append(("F", begun))
            begun += 1
        else:
            order.append(("B", waiting.pop(random.randrange(len(waiting)))))
    return order


def ticks(orders):
    """How long the stages take for their orders, each step as early as it can be; None if they wait for ever."""
    actions = {"F": "forward", "B": "input", "W": "weight"}
    schedule = [[Instruction(actions[kind], m, stage) for kind, m in order] for stage, order in enumerate(orders)]
    try:
        return round(max(end for row in timetable(schedule) for _, _, end in row))
    except ValueError:
        return None


def validity(orders, stages, count):
    """In words, whether every stage does F, B and W once for each micro-batch and nobody waits for ever."""
    if len(orders) != stages or not all(isinstance(order, list) for order in orders):
        return "a list of steps for each stage was expected"
    wanted = {(kind, m) for kind in "FBW" for m in range(count)}
    for stage, order in enumerate(orders):
        if not all(isinstance(step, tuple) and len(step) == 2 for step in order):
            return f'stage {stage}: each step is a pair such as ("F", 0)'
        if missing := sorted(wanted - set(order)):
            return f"stage {stage} never does {missing[0]}"
        if len(order) != len(wanted):
            return f"stage {stage} has {len(order)} steps; 3 for each micro-batch were expected"
    if ticks(orders) is None:
        return ("the stages wait for each other for ever: a step stands before one that it needs, on its own stage or "
                "by way of a neighbour")  # fmt: skip
    return "valid"


def peak(order):
    """The most micro-batches that a stage holds, from their F to their W."""
    held = most = 0
    for kind, _ in order:
        held += (kind == "F") - (kind == "W")
        most = max(most, held)
    return most


@task("8.5", "schedule", {"valid": 1, "memory": 1, "1F1B beaten": 1, "the best": 1})
class Schedule:
    """Forward, backward, and weights whenever there is time: a schedule with a score, 3 M + S - 1 ticks at best."""

    def draw(random, hidden):
        return {"cases": [(2, 4), (4, 8), (3, random.randrange(3, 12)), (4, 4), *([(8, 16)] if hidden else [])]}

    def probe(schedule, cases):
        """What holds of the orders in each case, in words; a schedule that is not valid is nothing else either."""
        for stages, count in cases:
            about, orders = f"{stages} stages, {count} micro-batches", schedule(stages, count)
            orders = [list(map(as_pair, order)) if isinstance(order, list | tuple) else order for order in orders]
            words = validity(orders, stages, count)
            yield "valid", about, words
            plain = letters(one_forward_one_backward, stages, count)
            plain = ticks([[(k, m) for kind, m in order for k in ("F" if kind == "F" else "BW")] for order in plain])
            took, best = (ticks(orders), 3 * count + stages - 1) if words == "valid" else (None, None)
            full = {stage: peak(order) for stage, order in enumerate(orders)} if took else {}
            over = next((f"stage {s} holds {n}; only W releases one" for s, n in full.items() if n > stages), "")
            yield "memory", f"{about}, memory", words if not took else over or f"at most {stages} are held"
            late = f"{took} ticks; 1F1B needs {plain}, so let W wait"
            yield "1F1B beaten", f"{about}, beside 1F1B", words if not took else late if took >= plain else "faster"
            idle = f"{took} ticks; {best} is possible: which stage is idle while it has a W to do?"
            beside = words if not took else over or (idle if took > best else "as fast as can be")
            yield "the best", f"{about}, beside the best", beside


def as_pair(step):
    """A step as a tuple, if it is a row of two."""
    return (str(step[0]), int(step[1])) if isinstance(step, list | tuple) and len(step) == 2 else step


def one_at_a_time(ranks, micro_batches):
    """A schedule in which each micro-batch goes forward and backward before the next one begins."""
    steps = [(action, m) for m in range(micro_batches) for action in ("forward", "backward")]
    return [[Instruction(*step, rank) for step in steps] for rank in range(ranks)]


SCHEDULES = {"GPipe": gpipe, "1F1B": one_forward_one_backward, "one at a time": one_at_a_time}


def played(random, name, stages, count, slow):
    """The timeline of a schedule in which stage `slow` takes longer for everything."""
    times = [1.5 if stage == slow else random.uniform(0.95, 1.05) for stage in range(stages)]
    rows = timetable(SCHEDULES[name](stages, count), times, [2 * time for time in times])
    spans = [(stage, action[0].upper(), m, round(start, 3), round(end, 3))
             for row in rows for (action, m, stage), start, end in row]  # fmt: skip
    return random.sample(spans, len(spans))


@task("8.6", "read", {"schedule": 1, "slow stage": 1})
class WhichSchedule:
    """Three schedules and a slow stage, read from their timelines."""

    def draw(random, hidden):
        cases = []
        for name in random.sample([*SCHEDULES] * (2 + 2 * hidden), len(SCHEDULES) * (2 + 2 * hidden)):
            stages = random.randrange(3, 6)
            slow = random.randrange(stages)
            cases.append((played(random, name, stages, random.randrange(stages, stages + 4), slow), name, slow))
        return {"cases": cases}

    def probe(read, cases):
        """What is read from each timeline, in words if it is not what the timeline shows."""
        for number, (timeline, name, slow) in enumerate(cases):
            answer = read(list(timeline))
            require(isinstance(answer, list | tuple) and len(answer) == 2, "return a pair: (schedule, slow stage)")
            schedule, stage = answer
            in_time = sorted(timeline, key=lambda span: span[3])
            first, last = ("".join(span[1] for span in in_time if span[0] == stage) for stage in (0, max(in_time)[0]))
            wrong = f'"{schedule}" does not look like that'
            if schedule not in [*SCHEDULES]:
                wrong = f"{str(schedule)[:40]!r} is none of {', '.join(SCHEDULES)}"
            case = f"timeline {number}: the first stage does {first}, the last {last}"
            yield "schedule", case, "that schedule" if schedule == name else wrong
            yield "slow stage", f"timeline {number}, the slow stage", (stage if type(stage) is not int else (
                "that stage" if stage == slow else slower(timeline, stage, slow)))  # fmt: skip


def slower(timeline, stage, slow):
    """In words, how long two stages take for a forward pass."""
    took = {s: [end - start for at, kind, _, start, end in timeline if (at, kind) == (s, "F")] for s in (stage, slow)}
    if not took[stage]:
        return f"there is no stage {stage}: they count from 0"
    mine, other = (sum(took[s]) / len(took[s]) for s in (stage, slow))
    return (f"stage {stage} takes {mine:.2f} for a forward pass, another one {other:.2f}: look at how long its own steps "
            "take, not at when it ends or how long it waits")  # fmt: skip
