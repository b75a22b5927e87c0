"""What packs functions and results: cloudpickle, which can send what a cell defines; else what modules define."""

from typing import Any

try:
    from cloudpickle import Pickler, dumps
except ImportError:  # a machine with torch and numpy only, which is enough for `make gpu`
    from pickle import Pickler as Plain
    from pickle import dumps

    class Pickler(Plain):  # type: ignore[no-redef]
        """pickle's own, with the method that cloudpickle's has."""

        def reducer_override(self, obj: object) -> Any:
            """Nothing is special."""
            return NotImplemented


__all__ = ["Pickler", "dumps"]
