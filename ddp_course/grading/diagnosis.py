"""Say whether an answer is right, part by part, and if not, why: held against the solution and known wrong answers.

An answer whose evidence equals that of a known wrong answer on the same inputs has its fault. Of any other the general
relation is told that explains all wrong values (unchanged, zeros, a factor, another order), or the first number that
differs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import Wrong
from .checks import Task
from .evidence import Evidence
from .plain import Odd

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
    """One value of the evidence: in which case, on which rank (None: there is one for all), and what was found.

    `still` is what it is after an answer that does nothing, None if that is not known.
    """

    case: str
    rank: int | None
    found: Any
    expected: Any
    still: Any = None


@dataclass
class Book:
    """What evidence is held against: the solution's, and of `wrong` answers [(what is said of them, evidence)].

    `still` is that of an answer that does nothing. Both are asked for only if something is wrong.
    """

    solution: Evidence
    wrong: Callable[[], Sequence[tuple[str, Evidence]]]
    still: Callable[[], Evidence]


def nothing(task: Task, said: str) -> Verdict:
    """The verdict on an answer that has no property."""
    return Verdict(False, said, tuple(Part(name, weight, said) for name, weight in task.parts.items()))


def verdict(task: Task, evidence: Evidence, book: Book, inputs: dict) -> Verdict:
    """Whether evidence is right, and what is wrong with it."""
    if evidence.found is None:
        return nothing(task, evidence.failure)
    if book.solution.found is None:
        return nothing(task, f"the course's own solution failed, so nothing can be said: {book.solution.failure}")
    unlike_solution = wrong_parts(task, evidence, book)
    parts, whole = [], all_like(evidence.found, book) if unlike_solution else []
    for name, weight in task.parts.items():
        if name in task.judges:
            said = judged(task.judges[name], evidence.found, inputs)
        else:
            said = compared(task, name, evidence, book, whole) if name in unlike_solution else ""
        parts.append(Part(name, weight, said))
    wrong = [part.message for part in parts if part.message]
    return Verdict(not wrong, wrong[0] if wrong else "", tuple(parts))


def judged(judge: Callable, found: dict, inputs: dict) -> str:
    """What a judge says of evidence, or ""."""
    try:
        judge(found, **inputs)
        return ""
    except Wrong as wrong:
        return str(wrong) or "something is wrong, and nothing says what"
    except Exception as error:
        return f"your answer returned something that cannot be compared ({type(error).__name__}: {str(error)[:300]})"


def wrong_parts(task: Task, evidence: Evidence, book: Book) -> list[str]:
    """The parts that differ from the solution's."""
    compared = (name for name in task.parts if name not in task.judges)
    return [name for name in compared if not holds(values_of(name, evidence, book.solution), task.bound)]


def values_of(part: str, evidence: Evidence, solution: Evidence, still: Evidence | None = None) -> list[Value]:
    """All values of a part, in the order of the solution's cases."""
    found, idle = (evidence.found or {}).get(part, {}), ((still.found if still else None) or {}).get(part, {})
    values = []
    for case, expected in (solution.found or {}).get(part, {}).items():
        if isinstance(expected, dict) and all(type(rank) is int for rank in expected):
            of_case, of_idle = found.get(case, {}), idle.get(case, {})
            values += [Value(case, rank, of_case.get(rank), one, of_idle.get(rank)) for rank, one in expected.items()]
        else:
            values.append(Value(case, None, found.get(case), expected, idle.get(case)))
    return values


def holds(values: Sequence[Value], bound: float) -> bool:
    """Whether all that was found is as expected."""
    return all(same(one.found, one.expected, bound) for one in values)


def same(found: Any, expected: Any, bound: float = 1e-6) -> bool:
    """Whether two pieces of plain data are equal, numbers to rounding: `bound` times the largest magnitude."""
    if isinstance(expected, torch.Tensor):
        alike = isinstance(found, torch.Tensor) and found.shape == expected.shape and found.dtype == expected.dtype
        return alike and bool(((found == expected) | (gap(found, expected) <= bound * largest(expected))).all())
    if isinstance(expected, list | tuple):
        alike = isinstance(found, list | tuple) and len(found) == len(expected)
        return alike and all(same(one, other, bound) for one, other in zip(found, expected, strict=True))
    if isinstance(expected, dict):
        alike = isinstance(found, dict) and found.keys() == expected.keys()
        return alike and all(same(found[key], one, bound) for key, one in expected.items())
    if type(expected) is float:
        close = min(bound, 1e-9) if bound else 0.0
        return type(found) in (int, float) and abs(found - expected) <= close * max(1e-300, abs(expected))
    return type(found) is type(expected) and bool(found == expected)


def gap(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How far numbers are apart, in float64; equal infinities are not."""
    return torch.where(found == expected, 0.0, (found.double() - expected.double()).abs())


def largest(expected: torch.Tensor) -> float:
    """The largest finite magnitude, at least 1."""
    finite = expected.double().abs()[expected.isfinite()]
    return max(1.0, finite.max().item() if finite.numel() else 1.0)


def all_like(found: dict, book: Book) -> list[str]:
    """What is said of the known wrong answers that have all of this evidence."""
    return [said for said, known in book.wrong() if known.found is not None and same(found, known.found)]


def compared(task: Task, part: str, evidence: Evidence, book: Book, whole: Sequence[str]) -> str:
    """What is wrong with a part: what is said of the known answers like the `whole`, or of those like the part."""
    values = values_of(part, evidence, book.solution, book.still())
    wrong = [one for one in values if not same(one.found, one.expected, task.bound)]
    first, known = wrong[0], whole[0] if whole else known_fault(part, values, wrong, book)
    if known:
        return f"{first.case}: {in_short(first)}{known}{others(values, wrong)}"
    if part in task.secret:
        return f"{first.case}: {unlike_type(first.found, first.expected) or f'{shown(first.found)} is not it'}"
    who = "" if first.rank is None else f"rank {first.rank}: "
    said = f"{first.case}: {who}{difference(first)}{relation(values, wrong)}"
    return f"{said}{others(values, wrong)}{right_ones(values, wrong)}"


def in_short(one: Value) -> str:
    """A number that was found, or a short list beside what was expected."""
    if type(one.found) in (int, float):
        return f"{shown(one.found)}; "
    short = isinstance(one.found, list | tuple) and len(repr(one.found)) + len(repr(one.expected)) < 100
    return f"{list(one.found)}; {list(one.expected)} was expected: " if short else ""


def known_fault(part: str, values: Sequence[Value], wrong: Sequence[Value], book: Book) -> str:
    """What is said of the known wrong answer that is like this part: everywhere, or wherever it is wrong.

    If none is, of the one that is like it in the first case that is wrong, if enough numbers are alike.
    """
    answers = [(said, {one[:2]: one.expected for one in values_of(part, known, known)}) for said, known in book.wrong()]
    here = [one for one in wrong if one.case == wrong[0].case]
    sure = here if sum(len(numbers(one.found)) for one in here) >= SURE else []
    for chosen in (values, wrong, sure):
        for said, known in answers:
            if chosen and all(one[:2] in known and same(one.found, known[one[:2]]) for one in chosen):
                return said
    return ""


def others(values: Sequence[Value], wrong: Sequence[Value]) -> str:
    """Which ranks are wrong in the first case that is, if not all are."""
    case = wrong[0].case
    ranks, all_ranks = [one.rank for one in wrong if one.case == case], [one.rank for one in values if one.case == case]
    return f" (on rank {', '.join(map(str, ranks))}; the others are right)" if len(ranks) < len(all_ranks) else ""


def right_ones(values: Sequence[Value], wrong: Sequence[Value]) -> str:
    """Which cases are right, if they are few."""
    bad = {one.case for one in wrong}
    good = list(dict.fromkeys(one.case for one in values if one.case not in bad))
    return f" (right: {'; '.join(good)})" if 0 < len(good) <= 2 else ""


def difference(one: Value) -> str:
    """What was found and what was expected: no result, another type or shape, or the first number that differs."""
    return unlike(one.found, one.expected, "the result") or "the result is another one"


def unlike(found: Any, expected: Any, what: str) -> str:
    """The first difference of two pieces of plain data in words, "" if there is none that is seen at once."""
    if found is None and expected is not None:
        return f"{what} is None: is there a `return`?"
    if isinstance(expected, torch.Tensor):
        return unlike_tensor(found, expected, what)
    if isinstance(expected, list | tuple):
        if not isinstance(found, list | tuple):
            return f"{what} is {kind_of(found)}; a list was expected"
        if len(found) != len(expected):
            return f"{what} has {len(found)} items; {len(expected)} were expected"
        pairs = enumerate(zip(found, expected, strict=True))
        said = (unlike(one, other, f"item {place} of {what}") for place, (one, other) in pairs)
        return next(filter(None, said), "")
    if isinstance(expected, dict):
        if not isinstance(found, dict) or found.keys() != expected.keys():
            keys = sorted(map(str, found)) if isinstance(found, dict) else kind_of(found)
            return f"{what} has {keys}; {sorted(map(str, expected))} was expected"
        return next(filter(None, (unlike(found[key], one, f"{key} in {what}") for key, one in expected.items())), "")
    if wrong_type := unlike_type(found, expected):
        return f"{what} is {wrong_type}"
    return "" if same(found, expected) else f"{what} is {shown(found)}; {shown(expected)} was expected"


def unlike_type(found: Any, expected: Any) -> str:
    """What is found where a plain number is expected, "" if it is one."""
    if type(expected) not in (int, float) or type(found) in (int, type(expected)):
        return ""
    return f"{kind_of(found)}; a plain {type(expected).__name__} was expected"


def unlike_tensor(found: Any, expected: torch.Tensor, what: str) -> str:
    """What is wrong with something that should be a tensor."""
    if not isinstance(found, torch.Tensor):
        return f"{what} is {kind_of(found)}; a tensor was expected"
    if found.shape != expected.shape:
        return f"{what} has shape {list(found.shape)}; {list(expected.shape)} was expected"
    if found.dtype != expected.dtype:
        return f"{what} has dtype {found.dtype}; {expected.dtype} was expected"
    x, y = found.reshape(-1).double(), expected.reshape(-1).double()
    apart = ~((x == y) | ((x - y).abs() <= 1e-6 * largest(expected)))
    if not bool(apart.any()):
        return ""
    place = int(apart.nonzero()[0])
    odd = "; such numbers come up when bytes are read as another dtype, or when nobody has filled a buffer"
    return f"number {place} of {len(x)} is {x[place]:.6g}; {y[place]:.6g} was expected" + (
        odd if x[place].abs() > 1e6 * largest(expected) else ""
    )


def kind_of(found: Any) -> str:
    """What type of thing came back, with an article."""
    name = found.type_name if isinstance(found, Odd) else type(found).__name__
    if found is None:
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
    x, y, z = (torch.cat([numbers(thing) for thing in things]) for things in
               zip(*((one.found, one.expected, one.still) for one in wrong), strict=True))  # fmt: skip
    if len(x) != len(y) or not len(x):
        return ""
    said = unchanged(x, y, z) or elsewhere(values, wrong) or scaled(values, wrong, x, y) or shifted(x, y, z)
    return f"; {said or agreeing(values, wrong)}" if said or agreeing(values, wrong) else ""


def near(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two vectors are equal to rounding."""
    return len(x) == len(y) and bool(((x - y).abs() <= 1e-6 * (y.abs() + largest(y) * (len(y) > 1))).all())


def unchanged(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> str:
    """Untouched, zero, or no numbers at all."""
    if near(x, z):
        return "nothing has changed: what was given must be changed itself, in place"
    if not bool(x.isfinite().all()):
        return "not all of it is finite"
    return "all of it is 0" if len(x) > 1 and not bool(x.any()) else ""


def elsewhere(values: Sequence[Value], wrong: Sequence[Value]) -> str:
    """Whether each wrong value is what another rank should have, or had."""
    for words, index in (("should have", 3), ("had before", 4)):
        owner = [
            next((other.rank for other in values if other.case == one.case and other.rank != one.rank
                  and len(numbers(other[index])) >= SURE / 2 and near(numbers(one.found), numbers(other[index]))), None)
            for one in wrong
        ]  # fmt: skip
        if None not in owner:
            return f"that is what rank {owner[0]} {words}"
    return ""


def scaled(values: Sequence[Value], wrong: Sequence[Value], x: torch.Tensor, y: torch.Tensor) -> str:
    """A constant factor, the sign, K times or a K-th."""
    size = {case: sum(one.case == case for one in values) for case in {one.case for one in values}}
    k = torch.cat([torch.full_like(numbers(one.found), float(size[one.case])) for one in wrong])
    if len(x) < 3 or near(x, y) or not bool(y.any()):
        return ""
    if wrong[0].rank is not None and near(x, k * y):
        return "that is K times as much: is there a division by K too few?"
    if wrong[0].rank is not None and near(x, y / k):
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
    digits = [
        n for n in range(7) if bool((x == torch.tensor([round(one, n) for one in y.tolist()], dtype=x.dtype)).all())
    ]
    return f"it is rounded to {digits[0]} digits: return it as it is" if digits and not near(x, y) else ""


def agreeing(values: Sequence[Value], wrong: Sequence[Value]) -> str:
    """Whether all ranks have the same, and should."""
    of_case = [one for one in values if one.case == wrong[0].case]
    alike = all(same(one.found, of_case[0].found) and same(one.expected, of_case[0].expected) for one in of_case)
    return "your replicas agree with each other; that does not make them right" if alike and len(of_case) > 1 else ""
