"""Exercise 8: two pipeline schedules, their bubble, and the memory they need."""

from . import Wrong, require, task
from .diagnose import compare_numbers


def gpipe_order(stage, stages, micro_batches):
    """All forward passes, then all backward passes."""
    return [("F", m) for m in range(micro_batches)] + [("B", m) for m in range(micro_batches)]


def one_f_one_b_order(stage, stages, micro_batches):
    """Warm-up, then one forward and one backward in turn, then the rest."""
    warm = min(stages - 1 - stage, micro_batches)
    steady = [step for m in range(micro_batches - warm) for step in (("F", warm + m), ("B", m))]
    return [("F", m) for m in range(warm)] + steady + [("B", m) for m in range(micro_batches - warm, micro_batches)]


def check_schedule(found, about, micro_batches):
    """Each micro-batch goes forward once and backward once, forward first, in order."""
    require(isinstance(found, list | tuple), f"{about}: a list of steps was expected, not {type(found).__name__}")
    steps = [tuple(step) if isinstance(step, list | tuple) else step for step in found]
    good = all(
        isinstance(step, tuple) and len(step) == 2 and step[0] in ("F", "B") and type(step[1]) is int for step in steps
    )
    require(good, f'{about}: each step is a pair such as ("F", 0) or ("B", 0)')
    for letter, what in (("F", "forward"), ("B", "backward")):
        done = [m for kind, m in steps if kind == letter]
        lost = sorted(set(range(micro_batches)) - set(done))
        require(not lost, f"{about}: micro-batch {lost[:1]} never goes {what}")
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

    def judge(evidence, cases):
        """All forward passes in order, then all backward passes."""
        for case, found in zip(cases, evidence, strict=True):
            about = "stage {} of {}, {} micro-batches".format(*case)
            steps = check_schedule(found, about, case[2])
            require(
                steps == gpipe_order(*case),
                f"{about}: a backward pass starts before the last forward pass: that is another schedule",
            )


@task("8.2", "one_forward_one_backward")
class OneForwardOneBackward:
    """Warm-up, steady state, cool-down."""

    def draw(random, hidden):
        """All stages of several pipelines, one of eight stages among them if `hidden`."""
        return cases_of(random, hidden)

    def probe(one_forward_one_backward, cases):
        """The schedule of each stage."""
        return [one_forward_one_backward(*case) for case in cases]

    def judge(evidence, cases):
        """S-1-s forward passes to warm up, then forward and backward in turn, then the rest."""
        for case, found in zip(cases, evidence, strict=True):
            stage, stages, micro_batches = case
            about = f"stage {stage} of {stages}, {micro_batches} micro-batches"
            steps = check_schedule(found, about, micro_batches)
            if steps == one_f_one_b_order(*case):
                continue
            expected = one_f_one_b_order(*case)
            first = next(i for i, step in enumerate(steps) if step[0] == "B")
            wanted = next(i for i, step in enumerate(expected) if step[0] == "B")
            require(
                first != micro_batches or wanted == micro_batches,
                f"{about}: all forward passes come first: that is GPipe",
            )
            where = f"{about}: {first} forward passes before the first backward; {wanted} were expected"
            require(first == wanted, f"{where}: the last stage goes backward after 1, the one before it after 2")
            raise Wrong(
                f"{about}: after the warm-up, one forward and one backward take turns; step {next(i for i, (a, b) in enumerate(zip(steps, expected, strict=True)) if a != b)} differs"
            )


@task("8.3", "bubble")
class Bubble:
    """The share of the time in which a stage is idle."""

    def draw(random, hidden):
        """Numbers of stages and micro-batches, one of each among them."""
        return {"cases": [(random.randrange(2, 17), random.randrange(2, 65)) for _ in range(5)] + [(1, 4), (4, 1)]}

    def probe(bubble, cases):
        """The answer in each case."""
        return [bubble(*case) for case in cases]

    def judge(evidence, cases):
        """(S-1)/(M+S-1), the idle share of all time."""
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
        }
        compare_numbers(evidence, expected, [f"{s} stages, {m} micro-batches" for s, m in cases], faults)


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

    def judge(evidence, orders):
        """The most micro-batches at any time that went forward and not yet backward."""
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
        compare_numbers(evidence, [held(order) for order in orders], about, faults)
