"""Plain data: what may come back from code that nobody vouches for.

Only exact types pass. An object whose `__eq__` is always true, or a tensor class with comparisons of its own, comes
back as the name of its class and nothing else.
"""

import base64
import math
from collections import deque
from fractions import Fraction
from itertools import islice
from types import GeneratorType
from typing import Any

import numpy
import torch

DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)}
DTYPES |= {str(dtype): dtype for dtype in (torch.int32, torch.uint8, torch.bool)}
MOST_ELEMENTS = 1 << 22
MOST_ITEMS, MOST_DIGITS = 1 << 20, 60
LARGEST = 10**MOST_DIGITS
NUMPY_NUMBERS = {numpy.float64, numpy.float32, numpy.float16, numpy.bool_}
NUMPY_NUMBERS |= {getattr(numpy, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}
LAZY = (GeneratorType, range, map, zip, filter, reversed, enumerate, type({}.keys()), type({}.values()), deque)


class Odd:
    """Stands for something that is not plain data; equal to nothing, not even to itself."""

    def __init__(self, type_name: str) -> None:
        self.type_name = type_name

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"an object of type {self.type_name}"


def pack(thing: Any) -> Any:
    """Plain data as JSON can carry it: numbers, text, lists, dicts and tensors of exactly these types.

    numpy's numbers and fractions are taken for numbers, generators and the like for lists.
    """
    kind = type(thing)
    if kind in (bool, str, type(None)):
        return thing
    if kind is int:
        return thing if abs(thing) < LARGEST else {"odd": f"int of more than {MOST_DIGITS} digits"}
    if kind in NUMPY_NUMBERS:
        return pack(thing.item())
    if kind is Fraction:
        return pack(int(thing) if thing.denominator == 1 else float(thing))
    if kind in LAZY:
        return pack(list(islice(thing, MOST_ITEMS)))
    if kind is float:
        return thing if math.isfinite(thing) else {"float": repr(thing)}
    if kind in (list, tuple):
        return {kind.__name__: [pack(item) for item in thing]}
    if kind is dict:
        return {"dict": [[pack(key), pack(value)] for key, value in thing.items()]}
    if kind in (torch.Tensor, torch.nn.Parameter):
        return pack_tensor(thing)
    return {"odd": kind.__name__[:80]}


def pack_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor's dtype, shape and bytes."""
    tensor = tensor.detach().to("cpu").contiguous()
    if str(tensor.dtype) not in DTYPES or tensor.numel() > MOST_ELEMENTS:
        return {"odd": f"Tensor of {tensor.numel()} x {tensor.dtype}"}
    data = bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
    return {"tensor": [str(tensor.dtype), list(tensor.shape), base64.b64encode(data).decode()]}


def unpack(packed: Any) -> Any:
    """The other end of `pack`; whatever it was not made by, it gives plain data or raises ValueError."""
    if not isinstance(packed, dict):
        return packed
    ((kind, value),) = packed.items()
    if kind == "float":
        return float(value)
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(unpack(item) for item in value)
    if kind == "dict":
        return {unpack(key): unpack(item) for key, item in value}
    if kind == "tensor":
        dtype, shape, data = value
        raw = bytearray(base64.b64decode(data))
        flat = torch.frombuffer(raw, dtype=DTYPES[dtype]) if raw else torch.empty(0, dtype=DTYPES[dtype])
        return flat.reshape(shape)
    if kind == "odd":
        return Odd(str(value))
    raise ValueError(f"not plain data: {kind}")
