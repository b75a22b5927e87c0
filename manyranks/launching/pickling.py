"""Packs functions and results, by cloudpickle, which can send what a cell defines.

Where cloudpickle is not installed, pickle packs what modules define.
"""

import copyreg
import functools
import inspect
import io
import pickle
from collections.abc import Callable
from types import CodeType
from typing import Any

try:
    from cloudpickle import Pickler as AnyPickler
except ImportError:  # A machine with torch and numpy only is enough for `make gpu`.
    AnyPickler = None


class CellPickler(AnyPickler or pickle.Pickler):  # type: ignore[misc]
    """Packs functions of cells with the names of their files, which messages need for lines.

    cloudpickle leaves these names out from 3.1.3 on.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is packed, or NotImplemented where pickle knows."""
        if AnyPickler is None:
            return NotImplemented
        if isinstance(obj, CodeType):
            make, arguments = self.dispatch_table[CodeType](obj)
            return of_file, (obj.co_filename, make, arguments)
        return super().reducer_override(obj)


def of_file(path: str, make: Callable, arguments: tuple) -> CodeType:
    """Return the code that a `CellPickler` has packed, as that of the file at `path`."""
    return make(*arguments).replace(co_filename=path)


def dumps(obj: Any, protocol: int | None = None) -> bytes:
    """Return an object as bytes, packed by a `CellPickler`."""
    with io.BytesIO() as file:
        CellPickler(file, protocol).dump(obj)
        return file.getvalue()


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
