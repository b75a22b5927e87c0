"""Says whether an answer is right, part by part, and if not, why.

An answer's evidence is compared with the solution's and with that of known wrong answers, on the
same inputs. If it equals that of a wrong answer, the answer gets its message. For other answers the
message is a relation that explains all wrong values (unchanged, zeros, a factor, another order), or
the first wrong value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from manyranks.launching.stacks import enumerate_ranks
from manyranks.torch_inside import tree_leaves

from .attempt import Evidence
from .plain import ODD, apart, largest
from .tasks import Known, Task, known_wrong

NOTHING = Evidence({})
SURE = 8  # So many equal numbers are no coincidence.
KINDS = {torch.Tensor: "a tensor", list | tuple: "a list", dict: "a dict"}


@dataclass(frozen=True)
class Verdict:
    """What is wrong with each of the `parts` of an answer, such as "bytes"; "" for a right part.

    An answer is not `judged` if the course's own solution could not be tried. The `misconception`
    is the name of the known wrong answer whose fault the answer has, or "".
    """

    parts: dict[str, str]
    judged: bool = True
    misconception: str = ""

    @property
    def message(self) -> str:
        """The message of the first wrong part; "" if the answer is right."""
        return next(filter(None, self.parts.values()), "")


class Value(NamedTuple):
    """A value of a part, on one rank, or on all ranks together if the rank is None.

    `still` is the value that an answer which does nothing leaves.
    """

    case: str
    rank: int | None
    actual: Any
    expected: Any
    still: Any = None


def nothing(task: Task, message: str) -> Verdict:
    """Return the verdict on an answer that fails in all parts, with the same `message`."""
    return Verdict(dict.fromkeys(task.parts, message))


def verdict(
    task: Task, evidence: Evidence, solution: Evidence, others: Callable[[], Sequence[Evidence]]
) -> Verdict:
    """Return the verdict on `evidence`.

    `others()` returns the evidence of an answer that does nothing, and of the known wrong ones.
    """
    if evidence.failure:
        return nothing(task, evidence.failure)
    if solution.failure:
        failed = f"not judged: the course's own solution failed here ({solution.failure})"
        return Verdict(dict.fromkeys(task.parts, failed), judged=False)
    messages = dict.fromkeys(task.parts, "")
    wrong = wrong_cases(task, evidence, solution)
    if not wrong:
        return Verdict(messages)
    still, *tried = others()
    known = list(zip(known_wrong(task.number), tried, strict=False))
    alike = [answer for answer, other in known if same(evidence.values, other.values)]
    # The fault of these known wrong answers may be in this answer.
    possible = [
        (answer, other)
        for answer, other in known
        if len(wrong_cases(task, other, solution) - wrong) <= 1
    ]
    misconception = ""
    for part in task.parts:
        values = values_of(part, evidence, solution, still)
        differing = sorted(differing_values(values, task.bound), key=is_unsaid)
        if not differing:
            continue
        fault = alike[0] if alike else known_fault(part, values, differing, possible)
        message = fault.message if fault else ""
        messages[part] = difference(values, differing, message, part in task.secret)
        if fault and not misconception:
            misconception = fault.name
    return Verdict(messages, misconception=misconception)


def wrong_cases(task: Task, evidence: Evidence, solution: Evidence) -> set[tuple[str, str]]:
    """Return each (part, case) in which an answer is wrong.

    An answer with a fault is wrong wherever this fault makes an answer wrong, except perhaps in one
    case for which it has lines of its own, such as a single rank.
    """
    cases = set()
    for part in task.parts:
        for value in differing_values(values_of(part, evidence, solution), task.bound):
            cases.add((part, value.case))
    return cases


def values_of(
    part: str, evidence: Evidence, solution: Evidence, still: Evidence = NOTHING
) -> list[Value]:
    """Return all values of a part, in the order of the solution's cases."""
    values = []
    for (name, case), by_rank in solution.values.items():
        if name != part:
            continue
        actual = evidence.values.get((part, case), {})
        idle = still.values.get((part, case), {})
        for rank, expected in by_rank.items():
            values.append(Value(case, rank, actual.get(rank), expected, idle.get(rank)))
    return values


def differing_values(values: Sequence[Value], bound: float) -> list[Value]:
    """Return the values that are not as expected."""
    return [value for value in values if not same(value.actual, value.expected, bound)]


def is_unsaid(value: Value) -> bool:
    """Return whether a probe found nothing simple to say, so that another value says more."""
    return value.actual is None and isinstance(value.expected, str)


def difference(values: Sequence[Value], wrong: Sequence[Value], message: str, secret: bool) -> str:
    """Return what is wrong with a part: a known answer's `message`, or else what differs."""
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
    """Return the answer's number, or a short list beside the expected one; "" for other values."""
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
    """Return the first of the `known` answers that has the same values in this part, or None.

    `known` has pairs of a wrong answer and its evidence. First all values are compared, then only
    the wrong ones: these must be at least SURE numbers or of two cases, as one number may be equal
    by chance.
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
    """Return whether evidence has the same value in the same case and on the same rank."""
    by_rank = evidence.values.get((part, value.case), {})
    return value.rank in by_rank and same(value.actual, by_rank[value.rank])


def ranks_in_words(values: Sequence[Value], wrong: Sequence[Value]) -> str:
    """Return in words which ranks are wrong in the first wrong case; "" if all are."""
    case = wrong[0].case
    ranks = [value.rank for value in wrong if value.case == case]
    if len(ranks) == sum(value.case == case for value in values):
        return ""
    return f" ({enumerate_ranks(ranks, 'is', 'are')} wrong; the others are right)"


def same(actual: Any, expected: Any, bound: float = 1e-6) -> bool:
    """Return whether two pieces of plain data are equal, numbers to `bound` times the largest."""
    return not unlike(actual, expected, "it", bound)


def unlike(actual: Any, expected: Any, what: str, bound: float = 1e-6) -> str:
    """Return the first difference of two pieces of plain data in words; "" if there is none."""
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
    # The probe itself has said in words what is wrong.
    if expected == "" and isinstance(actual, str):
        return actual
    # A single number must agree to nine digits, unless it is nearly 0.
    if type(expected) is float:
        equal = abs(actual - expected) <= min(bound, 1e-9) * max(1e-6, abs(expected))
    else:
        equal = type(actual) is type(expected) and bool(actual == expected)
    if equal:
        return ""
    size = ""
    # NaN, which does not equal itself, is neither too small nor too large.
    if type(expected) in (int, float) and actual == actual:
        size = "too small: " if actual < expected else "too large: "
    return f"{what} is {size}{in_words(actual)}; {in_words(expected)} was expected"


def wrong_items(actual: Any, expected: Any) -> str:
    """Return how many items of a list are wrong, or that only their order is; else ""."""
    if not isinstance(actual, list | tuple) or not isinstance(expected, list | tuple):
        return ""
    count = sum(not same(*pair) for pair in zip(actual, expected, strict=False))
    if not count or len(actual) != len(expected) or len(expected) == 1:
        return ""
    if sorted(map(repr, actual)) == sorted(map(repr, expected)):
        return "the items are right, in another order: "
    return f"{count} of {len(expected)} items are wrong: "


def unlike_type(actual: Any, expected: Any) -> str:
    """Return in words that a value is no plain number where one is expected; "" if it is."""
    right = type(expected) not in (int, float) or type(actual) in (int, type(expected))
    return "" if right else f"{kind_of(actual)}; a plain {type(expected).__name__} was expected"


def unlike_tensor(actual: torch.Tensor, expected: torch.Tensor, what: str, bound: float) -> str:
    """Return in words how a tensor differs from another; "" if they are the same."""
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
    # NaN is not less than any number, so it has this cause, too.
    if not x[place].abs() <= 1e5 * largest(expected):
        cause = (
            "; such numbers come up when bytes are read as another dtype, when nobody has filled a"
            " buffer, or when a number is too large or divided by 0"
        )
    return (
        f"{len(places)} of {len(x)} numbers are wrong: number {place} is {x[place]:.6g};"
        f" {y[place]:.6g} was expected{cause}"
    )


def kind_of(actual: Any) -> str:
    """Return the type of a value, with an article."""
    if actual is None:
        return "None (is there a `return`?)"
    name = actual[ODD] if isinstance(actual, dict) and ODD in actual else type(actual).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def in_words(thing: Any) -> str:
    """Return a value as a message shows it."""
    return f"{thing:.10g}" if type(thing) in (int, float) else repr(thing)[:200]


def numbers(thing: Any) -> torch.Tensor:
    """Return all numbers of a piece of plain data as one vector, which may be empty."""
    vectors = [torch.empty(0, dtype=torch.float64)]
    for each in tree_leaves(thing):
        if isinstance(each, torch.Tensor | int | float):
            vectors.append(torch.as_tensor(each, dtype=torch.float64).reshape(-1))
    return torch.cat(vectors)


def relation(wrong: Sequence[Value]) -> str:
    """Return in words a relation that explains all wrong values, followed by ": ", or "".

    It is between these values (x), those expected (y) and those that doing nothing leaves (z).
    """
    # A truth or a text, once shown, needs no relation.
    if isinstance(wrong[0].expected, bool | str):
        return ""
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
    """Return whether two vectors are equal to rounding, relative to each number or the largest."""
    rounding = 1e-6 * largest(y) if len(y) > 1 else 0.0
    return len(x) == len(y) and torch.allclose(x, y, 1e-6, rounding)
