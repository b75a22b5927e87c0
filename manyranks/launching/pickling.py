"""Packs functions and results, by cloudpickle, which can send what a cell defines.

Where cloudpickle is not installed, pickle packs what modules define.
"""

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
    """Pack a function under `functools.lru_cache` as its parts, if a cell has defined it.

    pickle would send only the function's name, which ranks do not have.
    """
    if function.__module__ == "__main__":
        return cache_again, (function.__wrapped__, function.cache_parameters())
    return function.__reduce__()


def cache_again(function: Callable, parameters: dict) -> Callable:
    """Return the function that `pack_cached` has packed, with an empty cache."""
    return functools.lru_cache(**parameters)(function)


CachedFunction = type(functools.lru_cache(len))  # Python has no name for this type.
copyreg.pickle(CachedFunction, pack_cached)
__all__ = ["Pickler", "dumps", "unsendable"]


def unsendable(function: Callable, args: tuple, kwargs: dict) -> tuple[str, str] | None:
    """Return the name of what cannot be sent, and why; None if everything can.

    The name is that of the first argument, or outer variable of the function, that fails.
    """
    try:
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        outside = inspect.getclosurevars(function)
    except (TypeError, ValueError):
        # The function is not written in Python, or does not take these arguments.
        return None
    sent = {**kwargs, **arguments, **outside.nonlocals, **outside.globals}
    for name, value in sent.items():
        try:
            dumps(value, protocol=5)
        except Exception as error:
            return name, str(error)
    return None
