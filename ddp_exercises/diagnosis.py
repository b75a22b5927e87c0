"""Say whether an answer is right, part by part, and if not, why.

It is held against the solution and known wrong answers.

An answer whose evidence equals that of a known wrong answer on the same inputs gets its message.
For other answers the message is a relation that explains all wrong values (unchanged, zeros, a
factor, another order), or the first of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from manyranks.torch_inside import tree_leaves

from .attempt import Evidence
from .plain import ODD, apart, largest
from .tasks import Known, Task, known_wrong

NOTHING = Evidence(None)
SURE = 8  # So many equal numbers are no coincidence.
KINDS = {torch.Tensor: "a tensor", list | tuple: "a list", dict: "a dict"}


@dataclass(frozen=True)
class Verdict:
    """What is wrong with each part of an answer, such as "bytes"; "" if the part is right.

    It is not `judged` if the course's own solution could not be tried. The `misconception` is the
    name of the known wrong answer whose fault it has, "" if of none.
    """

    parts: dict[str, str]
    judged: bool = True
    misconception: str = ""

    @property
    def message(self) -> str:
        """What is wrong with the first wrong part; "" if the answer is right."""
        for message in self.parts.values():
            if message:
                return message
        return ""


class Value(NamedTuple):
    """A value of a part, on one rank or (None) for all.

    `still` is the value after an answer that does nothing.
    """

    case: str
    rank: int | None
    actual: Any
    expected: Any
    still: Any = None


def nothing(task: Task, message: str) -> Verdict:
    """The verdict on an answer that fails in all parts, with the same `message`."""
    return Verdict(dict.fromkeys(task.parts, message))


def verdict(
    task: Task, evidence: Evidence, solution: Evidence, others: Callable[[], Sequence[Evidence]]
) -> Verdict:
    """The verdict on `evidence`.

    `others` gives the evidence of an answer that does nothing and of known wrong ones.
    """
    if evidence.values is None:
        return nothing(task, evidence.failure)
    if solution.values is None:
        failed = f"not judged: the course's own solution failed here ({solution.failure})"
        return Verdict(dict.fromkeys(task.parts, failed), judged=False)
    messages = dict.fromkeys(task.parts, "")
    wrong = wrong_cases(task, evidence, solution)
    if not wrong:
        return Verdict(messages)
    still, *tried = others()
    known = list(zip(known_wrong(task.number), tried, strict=False))
    alike = [answer for answer, other in known if same(evidence.values, other.values)]
    possible = []  # The fault of each of these may be in this answer.
    for answer, other in known:
        if len(wrong_cases(task, other, solution) - wrong) <= 1:
            possible.append((answer, other))
    wrong_parts = {part for part, _ in wrong}
    misconception = ""
    for part in filter(wrong_parts.__contains__, task.parts):
        values = values_of(part, evidence, solution, still)
        differing = sorted(differing_values(values, task.bound), key=is_unsaid)
        fault = alike[0] if alike else known_fault(part, values, differing, possible)
        message = fault.message if fault else ""
        messages[part] = difference(values, differing, message, part in task.secret)
        if fault and not misconception:
            misconception = fault.name
    return Verdict(messages, misconception=misconception)


def wrong_cases(task: Task, evidence: Evidence, solution: Evidence) -> set[tuple[str, str]]:
    """(part, case) wherever an answer is wrong.

    If a fault is in an answer, it is wrong wherever this fault makes it wrong, but for one case
    that it may have lines of its own for, such as a single rank.
    """
    cases = set()
    for part in task.parts:
        for value in differing_values(values_of(part, evidence, solution), task.bound):
            cases.add((part, value.case))
    return cases


def values_of(
    part: str, evidence: Evidence, solution: Evidence, still: Evidence = NOTHING
) -> list[Value]:
    """All values of a part, in the order of the solution's cases."""
    values = []
    for (name, case), by_rank in (solution.values or {}).items():
        if name != part:
            continue
        actual = of_ranks(evidence, part, case)
        idle = of_ranks(still, part, case)
        for rank, expected in by_rank.items():
            values.append(Value(case, rank, actual.get(rank), expected, idle.get(rank)))
    return values


def of_ranks(evidence: Evidence, part: str, case: str) -> dict:
    """{rank: value} of a case; empty if there is no evidence of it."""
    return (evidence.values or {}).get((part, case), {})


def differing_values(values: Sequence[Value], bound: float) -> list[Value]:
    """The values that are not as expected."""
    return [value for value in values if not same(value.actual, value.expected, bound)]


def is_unsaid(value: Value) -> bool:
    """Whether a probe had nothing simple to say about what an answer left.

    Then another value says more.
    """
    return value.actual is None and isinstance(value.expected, str)


def difference(values: Sequence[Value], wrong: Sequence[Value], message: str, secret: bool) -> str:
    """What is wrong with a part.

    It is the `message` of a known answer, or if there is none, what differs.
    """
    first = wrong[0]
    ranks = ranks_in_words(values, wrong)
    if message:
        return f"{first.case}: {message}{ranks}{in_short(first)}"
    if secret:
        wrong_type = unlike_type(first.actual, first.expected)
        return f"{first.case}: {wrong_type or in_words(first.actual) + ' is not it'}"
    where = "" if first.rank is None else f"rank {first.rank}: "
    first_fault = unlike(first.actual, first.expected, "the result") or "the result is another one"
    where += wrong_items(first.actual, first.expected)
    wrong_in = {value.case for value in wrong}
    right_in = {value.case: None for value in values if value.case not in wrong_in}
    right = ""
    if 0 < len(right_in) <= 2:
        right = f" (right: {'; '.join(right_in)})"
    return f"{first.case}: {relation(wrong)}{where}{first_fault}{ranks}{right}"


def in_short(value: Value) -> str:
    """The answer's number, or its short list beside the expected one; "" for any other value."""
    text = in_words(value.actual)
    expected = in_words(value.expected)
    if type(value.actual) in (int, float):
        return f" (yours: {text})"
    if isinstance(value.actual, list | tuple) and len(text) + len(expected) < 100:
        return f" (yours: {text}; {expected} was expected)"
    return ""


def known_fault(
    part: str, values: Sequence[Value], wrong: Sequence[Value], known: Sequence[tuple]
) -> Known | None:
    """The first of the `known` answers that has the same values in this part.

    They are (wrong answer, its evidence); all values count, or all that are wrong.

    One number may be equal by chance, so what is wrong must be SURE numbers or of two cases.
    """
    choices = [values]
    count = len(numbers([value.actual for value in wrong]))
    if count >= SURE or len({value.case for value in wrong}) > 1:
        choices.append(wrong)
    for compared in choices:
        for answer, other in known:
            if all(has(other, part, value) for value in compared):
                return answer
    return None


def has(evidence: Evidence, part: str, value: Value) -> bool:
    """Whether the evidence has the same value in the same case and on the same rank."""
    by_rank = of_ranks(evidence, part, value.case)
    return value.rank in by_rank and same(value.actual, by_rank[value.rank])


def ranks_in_words(values: Sequence[Value], wrong: Sequence[Value]) -> str:
    """Which ranks are wrong in the first wrong case; "" if all ranks are."""
    case = wrong[0].case
    ranks = [str(value.rank) for value in wrong if value.case == case]
    if len(ranks) == sum(value.case == case for value in values):
        return ""
    return f" (on rank {', '.join(ranks)}; the others are right)"


def same(actual: Any, expected: Any, bound: float = 1e-6) -> bool:
    """Whether two pieces of plain data are equal, numbers to rounding.

    That is `bound` times the largest magnitude.
    """
    return not unlike(actual, expected, "it", bound)


def unlike(actual: Any, expected: Any, what: str, bound: float = 1e-6) -> str:
    """The first difference of two pieces of plain data in words, "" if they are the same."""
    if actual is None and expected is not None:
        return f"{what} is None: is there a `return`?"
    for kind, name in KINDS.items():
        if isinstance(expected, kind) and not isinstance(actual, kind):
            return f"{what} is {kind_of(actual)}; {name} was expected"
    if isinstance(expected, torch.Tensor):
        return unlike_tensor(actual, expected, what, bound)
    if isinstance(expected, list | tuple):
        if len(actual) != len(expected):
            return f"{what} has {len(actual)} items; {len(expected)} were expected"
        for place, pair in enumerate(zip(actual, expected, strict=True)):
            if fault := unlike(*pair, f"item {place} of {what}", bound):
                return fault
        return ""
    if isinstance(expected, dict):
        if actual.keys() != expected.keys():
            keys = sorted(map(str, actual))
            return f"{what} has {keys}; {sorted(map(str, expected))} was expected"
        for key, item in expected.items():
            if fault := unlike(actual[key], item, f"{key} in {what}", bound):
                return fault
        return ""
    if wrong_type := unlike_type(actual, expected):
        return f"{what} is {wrong_type}"
    if expected == "" and isinstance(actual, str):
        return actual  # The probe has said in words what is wrong.
    if type(expected) is float:  # One number agrees to nine digits, wherever it is not nearly 0.
        equal = abs(actual - expected) <= min(bound, 1e-9) * max(1e-6, abs(expected))
    else:
        equal = type(actual) is type(expected) and bool(actual == expected)
    if equal:
        return ""
    size = ""
    if type(expected) in (int, float) and actual == actual:  # NaN is neither.
        size = "too small: " if actual < expected else "too large: "
    return f"{what} is {size}{in_words(actual)}; {in_words(expected)} was expected"


def wrong_items(actual: Any, expected: Any) -> str:
    """How many items of two lists of one length are wrong, or that only their order is.

    Return "" for other values.
    """
    if not isinstance(actual, list | tuple) or not isinstance(expected, list | tuple):
        return ""
    count = sum(not same(*pair) for pair in zip(actual, expected, strict=False))
    if not count or len(actual) != len(expected) or len(expected) == 1:
        return ""
    if sorted(map(repr, actual)) == sorted(map(repr, expected)):
        return "the items are right, in another order: "
    return f"{count} of {len(expected)} items are wrong: "


def unlike_type(actual: Any, expected: Any) -> str:
    """The type of a value where a plain number is expected; "" if it is such a number."""
    right = type(expected) not in (int, float) or type(actual) in (int, type(expected))
    return "" if right else f"{kind_of(actual)}; a plain {type(expected).__name__} was expected"


def unlike_tensor(actual: torch.Tensor, expected: torch.Tensor, what: str, bound: float) -> str:
    """How a tensor differs from another, "" if they are the same."""
    if actual.shape != expected.shape:
        return f"{what} has shape {list(actual.shape)}; {list(expected.shape)} was expected"
    if actual.dtype != expected.dtype:
        return f"{what} has dtype {actual.dtype}; {expected.dtype} was expected"
    places = apart(actual, expected, bound).reshape(-1).nonzero()
    if not len(places):
        return ""
    place = int(places[0])
    x = actual.reshape(-1).double()
    y = expected.reshape(-1).double()
    cause = ""
    if not x[place].abs() <= 1e5 * largest(expected):  # NaN too is no such number.
        cause = (
            "; such numbers come up when bytes are read as another dtype, when nobody has filled a"
            " buffer, or when a number is too large or divided by 0"
        )
    return (
        f"{len(places)} of {len(x)} numbers are wrong: number {place} is {x[place]:.6g};"
        f" {y[place]:.6g} was expected{cause}"
    )


def kind_of(actual: Any) -> str:
    """The type of a value, with an article."""
    if actual is None:
        return "None (is there a `return`?)"
    name = actual[ODD] if isinstance(actual, dict) and ODD in actual else type(actual).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def in_words(thing: Any) -> str:
    """A value as a message shows it."""
    return f"{thing:.10g}" if type(thing) in (int, float) else repr(thing)[:200]


def numbers(thing: Any) -> torch.Tensor:
    """All numbers of a piece of plain data as one vector; an empty one if there are none."""
    vectors = [torch.empty(0, dtype=torch.float64)]
    for each in tree_leaves(thing):
        if isinstance(each, torch.Tensor | int | float):
            vectors.append(torch.as_tensor(each, dtype=torch.float64).reshape(-1))
    return torch.cat(vectors)


def relation(wrong: Sequence[Value]) -> str:
    """What holds between all wrong values (x), those expected (y) and those left (z).

    The latter are left by doing nothing. It is "words: ".
    """
    if isinstance(wrong[0].expected, bool | str):
        return ""  # What is shown says it, and a law of the other values would be about them.
    if any(len(numbers(value.actual)) != len(numbers(value.expected)) for value in wrong):
        return ""
    x = numbers([value.actual for value in wrong])
    y = numbers([value.expected for value in wrong])
    z = numbers([value.still for value in wrong])
    if len(x) < 2 or near(x, y):
        return ""
    if isinstance(wrong[0].expected, torch.Tensor) and near(x, z):
        return "nothing has changed: what was given must be changed itself, in place: "
    if not x.any():
        return "all of it is 0: "
    factor = (x / y)[y.abs().argmax()].item()
    if len(x) > 2 and y.any() and near(x, factor * y):
        return f"all are {factor:.6g} times what was expected: "
    offset = (x - y)[0]
    if near(x - y, offset.expand(len(x))):
        return f"all are {offset:+.6g} off: "
    if near(x.sort().values, y.sort().values):
        return "these are the right numbers, in another order: "
    return ""


def near(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two vectors are equal to rounding; of several numbers the largest counts too."""
    rounding = 1e-6 * largest(y) if len(y) > 1 else 0.0
    return len(x) == len(y) and torch.allclose(x, y, 1e-6, rounding)
