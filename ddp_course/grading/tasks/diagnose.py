"""Say what is wrong with a set of tensors, one a rank: which ranks, by how much, and which known fault looks so."""

import torch

from ..plain import Odd
from . import Wrong, require

UNIT_ROUNDOFF = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-24, torch.float64: 2**-53}


def tensors(random, count, *shape, dtype=torch.float32, whole=False):
    """`count` tensors of `shape`, all different; whole numbers if sums are to be exact."""
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    if whole:
        return [torch.randint(-999, 999, shape, generator=generator).to(dtype) for _ in range(count)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


def check_tensor(found, like, who):
    """`found` is a tensor with the dtype and the shape of `like`."""
    require(found is not None, f"{who} has no result: is there a `return`?")
    require(not isinstance(found, Odd), f"{who} has {found!r}; a plain torch.Tensor was expected")
    require(isinstance(found, torch.Tensor), f"{who} has {kind_of(found)}; a tensor was expected")
    require(found.shape == like.shape, f"{who} has shape {list(found.shape)}; {list(like.shape)} was expected")
    require(found.dtype == like.dtype, f"{who} has dtype {found.dtype}; {like.dtype} was expected")


def same(found, expected, tolerance=0.0):
    """Whether two tensors are equal, within `tolerance` times the largest magnitude expected."""
    if found.shape != expected.shape:
        return False
    bound = tolerance * max(1.0, expected.double().abs().max().item() if expected.numel() else 1.0)
    difference = (found.double() - expected.double()).abs()
    return bool((difference <= bound).all())


def compare_ranks(found, expected, about, guesses=(), tolerance=0.0, oracle="the single process"):
    """Hold one tensor a rank against what each should have; raise Wrong with the best explanation.

    `guesses` are (message, tensors): the results of known faults.
    """
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        check_tensor(one, other, f"{about}: rank {rank}")
    wrong = [rank for rank in range(len(found)) if not same(found[rank], expected[rank], tolerance)]
    if not wrong:
        return
    for message, looks in guesses:
        if all(same(found[rank], looks[rank], max(tolerance, 1e-6)) for rank in wrong):
            only = "" if len(wrong) == len(found) else f" (on rank {', '.join(map(str, wrong))}; the others are right)"
            raise Wrong(f"{about}: {message}{only}")
    together = all(same(one, found[0], 1e-6) for one in found) and len(found) > 1
    if together and all(same(one, expected[0]) for one in expected):
        size = len(found)
        divided = any(same(found[0] * factor, expected[0], 1e-6) for factor in (size, 1 / size, size * size))
        division = (
            ": is there a division by K too few or too many?"
            if divided
            else "; that they are equal does not make them right"
        )
        raise Wrong(f"{about}: your replicas agree with each other but not with {oracle}{division}")
    raise Wrong(f"{about}: {which_are_wrong(found, expected, wrong)}")


def which_are_wrong(found, expected, wrong):
    """The wrong ranks, and the largest error among them."""
    gaps = {rank: (found[rank].double() - expected[rank].double()).abs().max().item() for rank in wrong}
    worst = max(gaps, key=gaps.get)
    usual = max(1.0, expected[worst].double().abs().max().item())
    odd = "; such numbers come up when bytes are read as another dtype, or when nobody has filled a buffer"
    why = odd if gaps[worst] > 1e6 * usual else ""
    if len(wrong) == 1:
        return f"rank {worst} is wrong, by up to {gaps[worst]:.3g}{why}"
    which = "all ranks are" if len(wrong) == len(found) else f"ranks {', '.join(map(str, wrong))} are"
    return f"{which} wrong, rank {worst} by up to {gaps[worst]:.3g}{why}"


def compare_numbers(found, expected, about, faults=(), unit="", chosen=None):
    """Hold numbers against those expected; `about` describes each case; `faults` is {message: what it would give}.

    Only the `chosen` cases, as bools, need be right, or all; what is wrong with them is told from all.
    """
    kind = int if all(type(one) is int for one in expected) else float
    for one, case in zip(found, about, strict=True):
        number(one, kind, f"{case}: the result")
    chosen = chosen or [True] * len(about)
    cases = enumerate(zip(found, expected, chosen, strict=True))
    wrong = [index for index, (one, other, counts) in cases if counts and not close(one, other)]
    if not wrong:
        return
    case = max(wrong, key=lambda index: abs(found[index] - expected[index]))
    said = f"{about[case]}: {found[case]:.10g} {unit}".rstrip()
    for message, looks in dict(faults).items():
        if all(close(one, other) for one, other in zip(found, looks, strict=True)):
            raise Wrong(f"{said}; {message}")
    raise Wrong(f"{said}; {expected[case]:.10g} was expected")


def number(found, kind, what):
    """`found` is a plain number of `kind` (int, or float for either)."""
    require(found is not None, f"{what} is None: is there a `return`?")
    good = type(found) is int if kind is int else type(found) in (int, float)
    require(good, f"{what} is {kind_of(found)}; a plain {kind.__name__} was expected")


def kind_of(found):
    """What type of thing came back, with an article; nothing is said of `Odd`, which stands for what is not plain."""
    name = found.type_name if isinstance(found, Odd) else type(found).__name__
    if found is None:
        return "None (is there a `return`?)"
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def close(found, expected):
    """Whether two numbers are equal to rounding."""
    return abs(found - expected) <= 1e-9 * max(1.0, abs(expected))


def check_line(found, right, why):
    """The number of a faulty line, counted from the `def` as line 1; `why` maps other lines to a word about them."""
    number(found, int, "the line's number")
    hint = why.get(found, "that one does what it should; where do its values come from?")
    require(found == right, f"line {found}: {hint}")
