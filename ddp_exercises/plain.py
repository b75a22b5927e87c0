"""Plain data, the only kind of value that may come back from a submission.

Only exact types pass. An object whose `__eq__` is always true, or a tensor class with comparisons
of its own, comes back as the name of its type and nothing else.
"""

import io
from collections import deque
from collections.abc import Iterator, KeysView, ValuesView
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy
import torch

MOST_ITEMS = 1 << 20  # A generator may have no end.
MOST_DIGITS = 60  # An integer of 309 digits or more has no float to be compared with.
LAZY = Iterator | KeysView | ValuesView | range | deque
# This key, with the name of a type, stands for an object that is not plain data.
ODD = "an object of type"


def plain(thing: Any) -> Any:
    """Return a thing as plain data of exact types.

    Numpy's numbers and fractions become numbers, and generators and their like become lists.
    """
    kind = type(thing)
    if kind in (bool, str, float, type(None)):
        return thing
    if kind is int:
        if abs(thing) < 10**MOST_DIGITS:
            return thing
        return {ODD: f"int of more than {MOST_DIGITS} digits"}
    if isinstance(thing, numpy.number | numpy.bool_):
        return plain(thing.item())
    if kind is Fraction:
        return plain(int(thing) if thing.denominator == 1 else float(thing))
    if isinstance(thing, LAZY):
        return plain(list(islice(thing, MOST_ITEMS)))
    if kind in (list, tuple):
        return kind(map(plain, thing))
    if kind is dict:
        return {plain(key): plain(value) for key, value in thing.items()}
    if kind in (torch.Tensor, torch.nn.Parameter):
        return thing.detach().to("cpu").contiguous().clone()
    return {ODD: kind.__name__[:80]}


def pack(thing: Any) -> bytes:
    """Return bytes from which `unpack` makes plain data."""
    buffer = io.BytesIO()
    torch.save(plain(thing), buffer)
    return buffer.getvalue()


def unpack(content: bytes) -> Any:
    """Return the plain data in packed bytes: `torch.load` makes no other objects."""
    return torch.load(io.BytesIO(content), weights_only=True)


def apart(actual: torch.Tensor, expected: torch.Tensor, bound: float = 1e-6) -> torch.Tensor:
    """Return which numbers differ by more than `bound` times the largest magnitude.

    Equal infinities do not differ, nor does NaN from NaN.
    """
    if expected.dtype in (torch.bool, torch.int64):
        return actual != expected
    most = bound * largest(expected)
    return ~actual.double().isclose(expected.double(), 0.0, most, equal_nan=True)


def largest(expected: torch.Tensor) -> float:
    """Return the largest finite magnitude, or 1 if that is larger."""
    finite = expected.double().abs()[expected.isfinite()]
    return max(1.0, finite.max().item() if finite.numel() else 1.0)
