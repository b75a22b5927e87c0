"""What packs functions and results: cloudpickle, which can send what a cell defines; else what modules define."""

import copyreg
import functools
import inspect
from collections.abc import Callable
from typing import Any

try:
    from cloudpickle import Pickler, dumps
except ImportError:  # A machine with torch and numpy only is enough for `make gpu`.
    from pickle import Pickler, dumps  # type: ignore[assignment]


def pack_cached(function: Any) -> tuple:
    """A function under `functools.lru_cache`, which pickle knows by its name alone, as what it is made of."""
    if function.__module__ == "__main__":
        return cache_again, (function.__wrapped__, function.cache_parameters())
    return function.__reduce__()


def cache_again(function: Callable, parameters: dict) -> Callable:
    """The other end of `pack_cached`: the same function, with nothing remembered yet."""
    return functools.lru_cache(**parameters)(function)


copyreg.pickle(type(functools.lru_cache(len)), pack_cached)
__all__ = ["Pickler", "dumps", "unsendable"]


def unsendable(function: Callable, args: tuple, kwargs: dict) -> tuple[str, str] | None:
    """The first argument, or name that the function finds outside, that cannot be sent, and why; None if all can."""
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        outside = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # not written in Python, or called as it cannot be
        return None
    for name, value in {**kwargs, **given, **outside.nonlocals, **outside.globals}.items():
        try:
            dumps(value, protocol=5)
        except Exception as error:
            return name, str(error)
    return None
