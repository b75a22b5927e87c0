"""Exercise 8: two pipeline schedules, their bubble, and the memory they need."""

from . import require, task
from .diagnose import compare_numbers, kind_of, number


def gpipe_order(stage, stages, micro_batches):
    """All forward passes, then all backward passes."""
    return [("F", m) for m in range(micro_batches)] + [("B", m) for m in range(micro_batches)]


def one_f_one_b_order(stage, stages, micro_batches):
    """Warm-up, then one forward and one backward in turn, then the rest."""
    warm = min(stages - 1 - stage, micro_batches)
    steady = [step for m in range(micro_batches - warm) for step in (("F", warm + m), ("B", m))]
    return [("F", m) for m in range(warm)] + steady + [("B", m) for m in range(micro_batches - warm, micro_batches)]


def steps_of(found, about):
    """What was found as a list of pairs: the letter of a pass, and the number of a micro-batch."""
    require(isinstance(found, list | tuple), f"{about}: a list of steps was expected, not {kind_of(found)}")
    steps = [tuple(step) if isinstance(step, list | tuple) else step for step in found]
    good = all(
        isinstance(step, tuple) and len(step) == 2 and step[0] in ("F", "B") and type(step[1]) is int for step in steps
    )
    require(good, f'{about}: each step is a pair such as ("F", 0) or ("B", 0)')
    return steps


def check_schedule(found, about, micro_batches):
    """Each micro-batch goes forward once and backward once, forward first, in order."""
    steps = steps_of(found, about)
    for letter, what in (("F", "forward"), ("B", "backward")):
        done = [m for kind, m in steps if kind == letter]
        lost = sorted(set(range(micro_batches)) - set(done))
        counted = "; they are counted from 0" if lost == [0] and micro_batches in done else ""
        require(not lost, f"{about}: micro-batch {lost[:1]} never goes {what}{counted}")
        require(
            len(done) == micro_batches,
            f"{about}: {len(done)} {what} passes; {micro_batches} micro-batches, counted from 0, were expected",
        )
        require(done == sorted(done), f"{about}: {what} passes run in the order {done}; micro-batch 0 comes first")
    for m in range(micro_batches):
        require(
            steps.index(("F", m)) < steps.index(("B", m)),
            f"{about}: micro-batch {m} goes backward before it went forward",
        )
    return steps


def cases_of(random, hidden):
    """(stage, stages, micro-batches) for every stage of some pipelines."""
    shapes = [
        (4, 8),
        (3, 3),
        (2, random.randrange(3, 7)),
        (4, 2),
        (1, 3),
        *([(8, random.randrange(8, 20))] if hidden else []),
    ]
    return {"cases": [(stage, stages, m) for stages, m in shapes for stage in range(stages)]}


def held(steps):
    """The most micro-batches that have gone forward and not yet backward."""
    now = most = 0
    for kind, _ in steps:
        now += 1 if kind == "F" else -1
        most = max(most, now)
    return most


@task("8.1", "gpipe")
class GPipe:
    """Forward all, then backward all."""

    def draw(random, hidden):
        """All stages of several pipelines, one of eight stages among them if `hidden`."""
        return cases_of(random, hidden)

    def probe(gpipe, cases):
        """The schedule of each stage."""
        return [gpipe(*case) for case in cases]

    def judge_complete(evidence, cases):
        """Each micro-batch once in each direction, in order."""
        for case, found in zip(cases, evidence, strict=True):
            check_schedule(found, "stage {} of {}, {} micro-batches".format(*case), case[2])

    def judge_order(evidence, cases):
        """All forward passes, then all backward passes."""
        for case, found in zip(cases, evidence, strict=True):
            about = "stage {} of {}, {} micro-batches".format(*case)
            kinds = [kind for kind, _ in steps_of(found, about)]
            whole = kinds.count("F") == kinds.count("B") == case[2]
            require(whole, f"{about}: {len(kinds)} steps; each micro-batch goes forward once and backward once")
            first = "a backward pass starts before the last forward pass: that is another schedule"
            require(kinds == sorted(kinds, reverse=True), f"{about}: {first}")

    parts = {"complete": (1, judge_complete), "forward first": (1, judge_order)}


@task("8.2", "one_forward_one_backward")
class OneForwardOneBackward:
    """Warm-up, steady state, cool-down."""

    def draw(random, hidden):
        """All stages of several pipelines, one of eight stages among them if `hidden`."""
        return cases_of(random, hidden)

    def probe(one_forward_one_backward, cases):
        """The schedule of each stage."""
        return [one_forward_one_backward(*case) for case in cases]

    def judge_complete(evidence, cases):
        """Every micro-batch once in each direction, forward first, in order."""
        for case, found in zip(cases, evidence, strict=True):
            check_schedule(found, "stage {} of {}, {} micro-batches".format(*case), case[2])

    def judge_warm_up(evidence, cases):
        """S-1-s forward passes to warm up."""
        for case, found in zip(cases, evidence, strict=True):
            stage, stages, micro_batches = case
            about = f"stage {stage} of {stages}, {micro_batches} micro-batches"
            steps, expected = check_schedule(found, about, micro_batches), one_f_one_b_order(*case)
            first = next(i for i, step in enumerate(steps) if step[0] == "B")
            wanted = next(i for i, step in enumerate(expected) if step[0] == "B")
            require(
                first != micro_batches or wanted == micro_batches,
                f"{about}: all forward passes come first: that is GPipe",
            )
            where = f"{about}: {first} forward passes before the first backward; {wanted} were expected"
            require(first == wanted, f"{where}: the last stage goes backward after 1, the one before it after 2")

    def judge_turns(evidence, cases):
        """After the warm-up forward and backward in turn, then the rest."""
        for case, found in zip(cases, evidence, strict=True):
            about = "stage {} of {}, {} micro-batches".format(*case)
            steps, expected = check_schedule(found, about, case[2]), one_f_one_b_order(*case)
            differs = next((i for i, (a, b) in enumerate(zip(steps, expected, strict=True)) if a != b), None)
            said = f"{about}: after the warm-up, one forward and one backward take turns; step {differs} differs"
            require(differs is None, said)

    parts = {"complete": (1, judge_complete), "warm-up": (1, judge_warm_up), "in turn": (1, judge_turns)}


@task("8.3", "bubble")
class Bubble:
    """The share of the time in which a stage is idle."""

    def draw(random, hidden):
        """Numbers of stages and micro-batches, one of each among them."""
        return {"cases": [(random.randrange(2, 17), random.randrange(2, 65)) for _ in range(5)] + [(1, 4), (4, 1)]}

    def probe(bubble, cases):
        """The answer in each case."""
        return [bubble(*case) for case in cases]

    def judge_limits(evidence, cases):
        """Nothing with one stage, and all stages but one with one micro-batch."""
        check_bubble(evidence, cases, [1 in case for case in cases])

    def judge_any(evidence, cases):
        """(S-1)/(M+S-1), the idle share of all time, with more of both."""
        check_bubble(evidence, cases, [1 not in case for case in cases])

    parts = {"any pipeline": (0.5, judge_any), "one stage or one micro-batch": (0.5, judge_limits)}


def check_bubble(evidence, cases, chosen):
    """(S-1)/(M+S-1) in the `chosen` cases."""
    expected = [(s - 1) / (m + s - 1) for s, m in cases]
    faults = {
        "that is idle time over busy time; the share of all time was asked for": [(s - 1) / m for s, m in cases],
        "with S stages the pipeline takes S-1 steps to fill, not S": [s / (m + s) for s, m in cases],
        "that is the share of busy time": [1 - one for one in expected],
        "that is in per cent": [100 * one for one in expected],
        "the time in all is M + S - 1 steps": [(s - 1) / (m + s) for s, m in cases],
        "filling and draining overlap with other stages' work: S-1 steps in all, not twice": [
            2 * (s - 1) / (m + 2 * (s - 1)) for s, m in cases
        ],
        "stages and micro-batches are swapped": [(m - 1) / (m + s - 1) for s, m in cases],
        "more micro-batches make it smaller": [(s - 1) / s for s, _ in cases],
    }
    about = [f"{s} stages, {m} micro-batches" for s, m in cases]
    compare_numbers(evidence, expected, about, faults, chosen=chosen)


@task("8.4", "most_held")
class MostHeld:
    """How many micro-batches' activations a stage must hold at a time."""

    def draw(random, hidden):
        """Schedules of several pipelines, and one that is neither GPipe nor 1F1B."""
        cases = cases_of(random, hidden)["cases"]
        orders = [order(*case) for case in cases[::2] for order in (gpipe_order, one_f_one_b_order)]
        return {"orders": [*orders, [("F", 0), ("B", 0), ("F", 1), ("F", 2), ("B", 1), ("F", 3), ("B", 2), ("B", 3)]]}

    def probe(most_held, orders):
        """The answer for each schedule."""
        return [most_held(list(order)) for order in orders]

    def judge_usual(evidence, orders):
        """The most micro-batches at any time that went forward and not yet backward, in GPipe and in 1F1B."""
        check_held(evidence, orders, slice(-1))

    def judge_any(evidence, orders):
        """The same in a schedule of which the most comes late."""
        check_held(evidence, orders, slice(-1, None))

    parts = {"GPipe and 1F1B": (1, judge_usual), "any order": (1, judge_any)}


def check_held(evidence, orders, chosen):
    """The most micro-batches that are held in each of the `chosen` orders; what is wrong is told from all."""
    finals = [sum(1 if kind == "F" else 0 for kind, _ in order) for order in orders]
    after = []
    for order in orders:
        now, seen = 0, []
        for kind, _ in order:
            now += 1 if kind == "F" else -1
            seen.append(now)
        after.append(seen)
    faults = {
        "that is how many there are; those that went backward are released": finals,
        "that is what is left at the end; the most at any time was asked for": [seen[-1] for seen in after],
        "a backward pass releases its micro-batch when it is done, so the peak is before it": [
            max(seen) - 1 for seen in after
        ],
        "forward passes before the first backward are not always the peak": [
            next(i for i, (k, _) in enumerate(order) if k == "B") for order in orders
        ],
        "that counts passes; only forward passes that wait for their backward hold memory": [
            len(order) for order in orders
        ],
    }
    about = [" ".join(f"{kind}{m}" for kind, m in order) for order in orders]
    expected = [held(order) for order in orders]
    for found, what in zip(evidence, about, strict=True):
        number(found, int, f"{what}: the result")
    if evidence[chosen] != expected[chosen]:
        compare_numbers(evidence, expected, about, faults)


def needs(kind, micro_batch, stage, stages):
    """The steps (kind, micro-batch, stage) that must be done before one, in 8.5."""
    if kind == "F":
        return [("F", micro_batch, stage - 1)] if stage else []
    own = ("F" if kind == "B" else "B", micro_batch, stage)
    return [own] + ([("B", micro_batch, stage + 1)] if kind == "B" and stage < stages - 1 else [])


def ticks(orders):
    """How long the stages take for their orders, each step as early as it can be; None if they wait for ever."""
    done, at, free = {}, [0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                wanted = needs(*order[at[stage]], stage, len(orders))
                if not all(one in done for one in wanted):
                    break
                free[stage] = max([free[stage], *(done[one] for one in wanted)]) + 1
                done[(*order[at[stage]], stage)] = free[stage]
                at[stage] += 1
                moved = True
    return max(free) if all(place == len(order) for place, order in zip(at, orders, strict=True)) else None


def with_weights(order):
    """A schedule of F and B with each W right after its B."""
    return [step for kind, m in order for step in ([(kind, m), ("W", m)] if kind == "B" else [(kind, m)])]


@task("8.5", "schedule")
class Schedule:
    """Forward, backward, and weights whenever there is time: a schedule with a score."""

    def draw(random, hidden):
        """Numbers of stages and micro-batches, never fewer of these; eight stages if `hidden`."""
        return {"cases": [(2, 4), (4, 8), (3, random.randrange(3, 12)), (4, 4), *([(8, 16)] if hidden else [])]}

    def probe(schedule, cases):
        """The orders in each case."""
        return [schedule(*case) for case in cases]

    def judge_valid(evidence, cases):
        """Every stage does F, B and W once for each micro-batch, and nobody waits for ever."""
        for (stages, count), orders in zip(cases, evidence, strict=True):
            about = f"{stages} stages, {count} micro-batches"
            lists = isinstance(orders, list | tuple) and all(isinstance(one, list | tuple) for one in orders)
            require(lists and len(orders) == stages, f"{about}: a list of steps for each stage was expected")
            for stage, order in enumerate(orders):
                pairs = all(isinstance(step, list | tuple) and len(step) == 2 for step in order)
                require(pairs, f'{about}: stage {stage}: each step is a pair such as ("F", 0)')
                steps, wanted = list(map(tuple, order)), [(kind, m) for kind in "FBW" for m in range(count)]
                missing = [step for step in wanted if step not in steps]
                require(not missing, f"{about}: stage {stage} never does {missing[:1]}")
                more = f"{about}: stage {stage} has {len(steps)} steps; 3 for each micro-batch were expected"
                require(len(steps) == len(wanted), more)
            waits = "a step stands before one that it needs, on its own stage or by way of a neighbour"
            require(tidy(orders) and ticks(tidy(orders)), f"{about}: the stages wait for each other for ever: {waits}")

    def judge_memory(evidence, cases):
        """No stage holds more micro-batches than there are stages."""
        Schedule.judge_valid(evidence, cases)
        for (stages, count), orders in zip(cases, evidence, strict=True):
            for stage, order in enumerate(tidy(orders)):
                held = peak = 0
                for kind, _ in order:
                    held += (kind == "F") - (kind == "W")
                    peak = max(peak, held)
                said = f"{stages} stages, {count} micro-batches: stage {stage} holds {peak}"
                require(peak <= stages, f"{said}; {stages} are allowed, and only W releases one")

    def judge_beaten(evidence, cases):
        """Fewer ticks than 1F1B."""
        Schedule.judge_valid(evidence, cases)
        for (stages, count), orders in zip(cases, evidence, strict=True):
            score = ticks([with_weights(one_f_one_b_order(stage, stages, count)) for stage in range(stages)])
            yours = ticks(tidy(orders))
            require(
                yours < score,
                f"{stages} stages, {count} micro-batches: {yours} ticks; 1F1B needs {score}, so let W wait",
            )

    def judge_best(evidence, cases):
        """3 M + S - 1 ticks: the first stage's three steps for each, and the way through the others."""
        Schedule.judge_memory(evidence, cases)
        for (stages, count), orders in zip(cases, evidence, strict=True):
            yours, best = ticks(tidy(orders)), 3 * count + stages - 1
            what = "which stage is idle while it has a W to do?"
            require(yours <= best, f"{stages} stages, {count} micro-batches: {yours} ticks; {best} is possible: {what}")

    parts = {
        "valid": (1, judge_valid),
        "memory": (1, judge_memory),
        "1F1B beaten": (1, judge_beaten),
        "the best": (1, judge_best),
    }


def tidy(orders):
    """Orders as lists of pairs."""
    return [[(str(kind), int(m)) for kind, m in order] for order in orders]


SCHEDULES = ("GPipe", "1F1B", "one at a time")


def played(random, name, stages, count, slow):
    """The timeline of a schedule in which stage `slow` takes longer for everything."""
    orders = {
        "GPipe": gpipe_order,
        "1F1B": one_f_one_b_order,
        "one at a time": lambda stage, stages, count: [(kind, m) for m in range(count) for kind in "FB"],
    }[name]
    pending, done, free, spans = [list(orders(s, stages, count)) for s in range(stages)], {}, [0.0] * stages, []
    while any(pending):
        for stage in range(stages):
            while pending[stage]:
                kind, m = pending[stage][0]
                wanted = needs(kind, m, stage, stages)
                if not all(one in done for one in wanted):
                    break
                start = max([free[stage], *(done[one] for one in wanted)])
                if name == "one at a time" and kind == "F" and stage == 0 and m:
                    start = done["B", m - 1, 0]
                end = start + (1.0 + 1.0 * (kind == "B")) * (1.5 if stage == slow else random.uniform(0.95, 1.05))
                free[stage] = done[kind, m, stage] = end
                spans.append((stage, kind, m, round(start, 3), round(end, 3)))
                pending[stage].pop(0)
    return random.sample(spans, len(spans))


@task("8.6", "read")
class WhichSchedule:
    """Three schedules and a slow stage, told by their timelines."""

    def draw(random, hidden):
        """Timelines of each schedule, with the slow stage anywhere; twice as many if `hidden`."""
        cases = []
        for name in random.sample(SCHEDULES * (2 + 2 * hidden), len(SCHEDULES) * (2 + 2 * hidden)):
            stages = random.randrange(3, 6)
            slow = random.randrange(stages)
            cases.append((played(random, name, stages, random.randrange(stages, stages + 4), slow), name, slow))
        return {"cases": cases}

    def probe(read, cases):
        """What is read from each timeline."""
        return [read(list(timeline)) for timeline, _, _ in cases]

    def judge_schedule(evidence, cases):
        """The schedule."""
        for found, (timeline, name, _) in zip(evidence, cases, strict=True):
            require(isinstance(found, list | tuple) and len(found) == 2, "return a pair: (schedule, slow stage)")
            require(found[0] in SCHEDULES, f"{str(found[0])[:40]!r} is none of {', '.join(SCHEDULES)}")
            last = max(span[0] for span in timeline)
            orders = [
                "".join(kind for stage, kind, _, _, _ in sorted(timeline, key=lambda s: s[3]) if stage == one)
                for one in (0, last)
            ]
            said = f"the first stage does {orders[0]}, the last {orders[1]}"
            require(found[0] == name, f'{said}: "{found[0]}" does not look like that')

    def judge_stage(evidence, cases):
        """The stage that takes longest for its steps."""
        for found, (timeline, _, slow) in zip(evidence, cases, strict=True):
            require(isinstance(found, list | tuple) and len(found) == 2, "return a pair: (schedule, slow stage)")
            number(found[1], int, "the slow stage")
            mean = {
                s: [e - b for stage, kind, _, b, e in timeline if stage == s and kind == "F"] for s in (found[1], slow)
            }
            require(mean[found[1]], f"there is no stage {found[1]}: they count from 0")
            times = {stage: sum(of) / len(of) for stage, of in mean.items()}
            said = (
                f"stage {found[1]} takes {times[found[1]]:.2f} for a forward pass, stage {slow} takes {times[slow]:.2f}"
            )
            require(
                found[1] == slow,
                f"{said}: look at how long its own steps take, not at when it ends or how long it waits",
            )

    parts = {"schedule": (1, judge_schedule), "slow stage": (1, judge_stage)}
