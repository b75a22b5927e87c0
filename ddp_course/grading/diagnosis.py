"""Say whether an answer is right, part by part, and if not, why: held against the solution and known wrong answers.

An answer whose evidence equals that of a known wrong answer on the same inputs has its fault. Of any other the general
relation is told that explains all wrong values (unchanged, zeros, a factor, another order), or the first number that
differs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .attempt import Evidence
from .checks import Task, known_wrong
from .evidence import BUSY
from .plain import Odd, apart, largest, same

SURE = 8  # equal numbers that are no coincidence


@dataclass(frozen=True)
class Part:
    """A property of an answer, such as "bytes": its weight among the task's points; `message` is "" if it holds."""

    name: str
    weight: float
    message: str = ""


@dataclass(frozen=True)
class Verdict:
    """`right` only if all parts hold; a `message` for all else."""

    right: bool
    message: str = ""
    parts: tuple = ()


class Value(NamedTuple):
    """One value of the evidence: in which case, on which rank (None: there is one for all), and what it is.

    `still` is what it is after an answer that does nothing, None if that is not known.
    """

    case: str
    rank: int | None
    actual: Any
    expected: Any
    still: Any = None


def nothing(task: Task, message: str) -> Verdict:
    """The verdict on an answer that has no property."""
    return Verdict(False, message, tuple(Part(name, weight, message) for name, weight in task.parts.items()))


def verdict(task: Task, evidence: Evidence, solution: Evidence, others: Callable[[], Sequence[Evidence]]) -> Verdict:
    """Whether evidence is that of the solution, and what is wrong with it.

    `others` gives that of an answer that does nothing and of the known wrong ones, if something is wrong.
    """
    if evidence.values is None:
        return nothing(task, evidence.failure)
    if solution.values is None:
        return nothing(task, f"{BUSY} (the course's own solution failed: {solution.failure})")
    wrong = {name for name in task.parts if differing(values_of(name, evidence, solution), task.bound)}
    still, *tried = (others() if wrong else []) or [Evidence(None)]
    known = list(zip((answer.message for answer in known_wrong(task.number)), tried, strict=False))
    alike = [message for message, other in known if same(evidence.values, other.values)]
    messages = dict.fromkeys(task.parts, "")
    for name in wrong:
        values = values_of(name, evidence, solution, still)
        faulty = differing(values, task.bound)
        message = alike[0] if alike else known_fault(name, values, faulty, known)
        messages[name] = compared(values, faulty, message, name in task.secret)
    parts = tuple(Part(name, weight, messages[name]) for name, weight in task.parts.items())
    return Verdict(not wrong, next(filter(None, messages.values()), ""), parts)


def values_of(part: str, evidence: Evidence, solution: Evidence, still: Evidence | None = None) -> list[Value]:
    """All values of a part, in the order of the solution's cases."""
    actual, idle, expected = (
        ((source and source.values) or {}).get(part, {}) for source in (evidence, still, solution)
    )
    values = []
    for case, right in expected.items():
        if isinstance(right, dict) and all(type(rank) is int for rank in right):
            of_case, of_idle = actual.get(case, {}), idle.get(case, {})
            values += [Value(case, rank, of_case.get(rank), item, of_idle.get(rank)) for rank, item in right.items()]
        else:
            values.append(Value(case, None, actual.get(case), right, idle.get(case)))
    return values


def differing(values: Sequence[Value], bound: float) -> list[Value]:
    """The values that are not as expected."""
    return [value for value in values if not same(value.actual, value.expected, bound)]


def compared(values: Sequence[Value], wrong: Sequence[Value], message: str, secret: bool) -> str:
    """What is wrong with a part: the `message` of a known answer, or if there is none, what is seen by itself."""
    first = wrong[0]
    if message:
        return f"{first.case}: {in_short(first)}{message}{ranks_in_words(values, wrong)}"
    if secret:
        return f"{first.case}: {unlike_type(first.actual, first.expected) or f'{shown(first.actual)} is not it'}"
    who = "" if first.rank is None else f"rank {first.rank}: "
    difference = unlike(first.actual, first.expected, "the result") or "the result is another one"
    bad = {value.case for value in wrong}
    good = list(dict.fromkeys(value.case for value in values if value.case not in bad))
    right = f" (right: {'; '.join(good)})" if 0 < len(good) <= 2 else ""
    return f"{first.case}: {who}{difference}{relation(values, wrong)}{ranks_in_words(values, wrong)}{right}"


def in_short(value: Value) -> str:
    """A number that came back, or a short list beside what was expected."""
    if type(value.actual) in (int, float):
        return f"{shown(value.actual)}; "
    short = isinstance(value.actual, list | tuple) and len(repr(value.actual)) + len(repr(value.expected)) < 100
    return f"{list(value.actual)}; {list(value.expected)} was expected: " if short else ""


def known_fault(part: str, values: Sequence[Value], wrong: Sequence[Value], known: Sequence[tuple]) -> str:
    """The message of the known wrong answer that is like this part: everywhere, or wherever it is wrong.

    If none is, of the one that is like it in the first case that is wrong, if enough numbers are alike.
    """
    first = [value for value in wrong if value.case == wrong[0].case]
    enough = first if sum(len(numbers(value.actual)) for value in first) >= SURE else []
    for chosen in (values, wrong, enough):
        for message, other in known:
            like = {value[:2]: value.actual for value in values_of(part, other, other)}
            if chosen and all(value[:2] in like and same(value.actual, like[value[:2]]) for value in chosen):
                return message
    return ""


def ranks_in_words(values: Sequence[Value], wrong: Sequence[Value]) -> str:
    """Which ranks are wrong in the first case that is, if not all are."""
    ranks, of_case = ([value.rank for value in some if value.case == wrong[0].case] for some in (wrong, values))
    return f" (on rank {', '.join(map(str, ranks))}; the others are right)" if len(ranks) < len(of_case) else ""


def unlike(actual: Any, expected: Any, what: str) -> str:
    """The first difference of two pieces of plain data in words, "" if there is none that is seen at once."""
    if actual is None and expected is not None:
        return f"{what} is None: is there a `return`?"
    if isinstance(expected, torch.Tensor):
        return unlike_tensor(actual, expected, what)
    if isinstance(expected, list | tuple):
        if not isinstance(actual, list | tuple):
            return f"{what} is {kind_of(actual)}; a list was expected"
        if len(actual) != len(expected):
            return f"{what} has {len(actual)} items; {len(expected)} were expected"
        pairs = enumerate(zip(actual, expected, strict=True))
        return next(filter(None, (unlike(*pair, f"item {place} of {what}") for place, pair in pairs)), "")
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or actual.keys() != expected.keys():
            keys = sorted(map(str, actual)) if isinstance(actual, dict) else kind_of(actual)
            return f"{what} has {keys}; {sorted(map(str, expected))} was expected"
        items = expected.items()
        return next(filter(None, (unlike(actual[key], item, f"{key} in {what}") for key, item in items)), "")
    if wrong_type := unlike_type(actual, expected):
        return f"{what} is {wrong_type}"
    if expected == "" and isinstance(actual, str):
        return actual  # a probe has put into words what is wrong
    return "" if same(actual, expected) else f"{what} is {shown(actual)}; {shown(expected)} was expected"


def unlike_type(actual: Any, expected: Any) -> str:
    """What came back where a plain number is expected, "" if it is one."""
    if type(expected) not in (int, float) or type(actual) in (int, type(expected)):
        return ""
    return f"{kind_of(actual)}; a plain {type(expected).__name__} was expected"


def unlike_tensor(actual: Any, expected: torch.Tensor, what: str) -> str:
    """What is wrong with something that should be a tensor."""
    if not isinstance(actual, torch.Tensor):
        return f"{what} is {kind_of(actual)}; a tensor was expected"
    if actual.shape != expected.shape:
        return f"{what} has shape {list(actual.shape)}; {list(expected.shape)} was expected"
    if actual.dtype != expected.dtype:
        return f"{what} has dtype {actual.dtype}; {expected.dtype} was expected"
    places = apart(actual, expected).reshape(-1).nonzero()
    if not len(places):
        return ""
    place, x, y = int(places[0]), actual.reshape(-1).double(), expected.reshape(-1).double()
    odd = "; such numbers come up when bytes are read as another dtype, or when nobody has filled a buffer"
    huge = bool(x[place].abs() > 1e6 * largest(expected))
    return f"number {place} of {len(x)} is {x[place]:.6g}; {y[place]:.6g} was expected{odd if huge else ''}"


def kind_of(actual: Any) -> str:
    """What type of thing came back, with an article."""
    name = actual.type_name if isinstance(actual, Odd) else type(actual).__name__
    if actual is None:
        return "None (is there a `return`?)"
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def shown(thing: Any) -> str:
    """A value as a message shows it."""
    return f"{thing:.10g}" if type(thing) in (int, float) else repr(thing)[:200]


def numbers(thing: Any) -> torch.Tensor:
    """All numbers of a piece of plain data as one vector; an empty one if there are none."""
    if isinstance(thing, torch.Tensor):
        return thing.reshape(-1).double()
    if type(thing) in (int, float, bool):
        return torch.tensor([float(thing)], dtype=torch.float64)
    items = list(thing.values()) if isinstance(thing, dict) else list(thing) if isinstance(thing, list | tuple) else []
    return torch.cat([torch.empty(0, dtype=torch.float64), *map(numbers, items)])


def relation(values: Sequence[Value], wrong: Sequence[Value]) -> str:
    """What holds between all wrong values and those expected, as "; words", or ""."""
    x, y, z = (torch.cat(list(map(numbers, column))) for column in list(zip(*wrong, strict=True))[2:])
    if len(x) != len(y) or not len(x):
        return ""
    words = unchanged(x, z) or elsewhere(values, wrong) or scaled(values, wrong, x, y) or shifted(x, y, z)
    words = words or agreeing(values, wrong)
    return f"; {words}" if words else ""


def near(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two vectors are equal to rounding."""
    return len(x) == len(y) and bool(((x - y).abs() <= 1e-6 * (y.abs() + largest(y) * (len(y) > 1))).all())


def unchanged(x: torch.Tensor, z: torch.Tensor) -> str:
    """Untouched, zero, or no numbers at all."""
    if near(x, z):
        return "nothing has changed: what was given must be changed itself, in place"
    if not bool(x.isfinite().all()):
        return "not all of it is finite"
    return "all of it is 0" if len(x) > 1 and not bool(x.any()) else ""


def elsewhere(values: Sequence[Value], wrong: Sequence[Value]) -> str:
    """Whether each wrong value is what another rank should have, or had."""

    def owner(value: Value, index: int) -> int | None:
        others = (other for other in values if other.case == value.case and other.rank != value.rank)
        own = ((other.rank, numbers(other[index])) for other in others)
        return next((rank for rank, it in own if len(it) >= SURE / 2 and near(numbers(value.actual), it)), None)

    for words, index in (("should have", 3), ("had before", 4)):
        owners = [owner(value, index) for value in wrong]
        if None not in owners:
            return f"that is what rank {owners[0]} {words}"
    return ""


def scaled(values: Sequence[Value], wrong: Sequence[Value], x: torch.Tensor, y: torch.Tensor) -> str:
    """A constant factor, the sign, K times or a K-th."""
    if len(x) < 3 or near(x, y) or not bool(y.any()):
        return ""
    if wrong[0].rank is not None:
        size = {case: sum(value.case == case for value in values) for case in {value.case for value in wrong}}
        k = torch.cat([torch.full_like(numbers(value.actual), float(size[value.case])) for value in wrong])
        if near(x, k * y):
            return "that is K times as much: is there a division by K too few?"
        if near(x, y / k):
            return "that is a K-th of it: is there a division by K too many?"
    place = int(y.abs().argmax())
    factor = (x[place] / y[place]).item()
    if not near(x, factor * y):
        return ""
    return "the sign is the other way round" if near(x, -y) else f"all are {factor:.6g} times what was expected"


def shifted(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> str:
    """Its own part missing or twice there, something added, another order, or rounded."""
    if len(x) >= SURE and bool(z.any()) and near(x, y - z):
        return "what was there before is missing in it"
    if len(x) >= SURE and bool(z.any()) and near(x, y + z):
        return "what was there before counts twice"
    if len(x) > 1 and near(x - y, (x - y)[:1].expand(len(x))):
        return f"all are {(x - y)[0].item():+.6g} off"
    if len(x) > 1 and near(x.sort().values, y.sort().values):
        return "these are the right numbers, in another order"
    rounded = (n for n in range(7) if x.tolist() == [round(item, n) for item in y.tolist()])
    digits = None if near(x, y) else next(rounded, None)
    return f"it is rounded to {digits} digits: return it as it is" if digits is not None else ""


def agreeing(values: Sequence[Value], wrong: Sequence[Value]) -> str:
    """Whether all ranks have the same, and should."""
    first, *others = (value for value in values if value.case == wrong[0].case)
    alike = all(same(other.actual, first.actual) and same(other.expected, first.expected) for other in others)
    return "your replicas agree with each other; that does not make them right" if alike and others else ""
