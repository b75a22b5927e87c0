"""An interrupted cell says in one line where it stopped, and one that lacks a name what to run."""

import inspect
import linecache
import re
import sys
import traceback
from types import TracebackType
from typing import Any

from manyranks.errors import RankError

# A cell says the second part alone, and its ranks say both.
MISSING = re.compile(r"(?:rank \d+: NameError: )?name '(\w+)' is not defined")


def tell_in_one_line() -> None:
    """In a notebook, let an interrupt say where it came, and a missing name which cells to run.

    Elsewhere, or where somebody handles exceptions in a way of their own, nothing changes.
    """
    if "IPython" not in sys.modules:
        return
    from IPython import get_ipython

    shell: Any = get_ipython()  # type: ignore[no-untyped-call]
    if shell is not None and not shell.custom_exceptions:
        shell.set_custom_exc((KeyboardInterrupt, NameError, RankError), show)


def show(
    shell: Any, kind: type, error: Any, trace: TracebackType | None, tb_offset: Any = None
) -> None:
    """Show the error as IPython would; of an interrupt one line in place of the traceback."""
    if kind is KeyboardInterrupt:
        line = f"Stopped{where(trace, shell.user_ns)}. The kernel goes on: run any cell."
        error._render_traceback_ = lambda: [line]
    shell.showtraceback((kind, error, trace))
    missing = MISSING.match(str(error))
    if missing and missing[1] not in shell.user_ns:
        print(where_it_comes_from(missing[1], shell.user_ns))


def where_it_comes_from(missing: str, names: dict[str, Any]) -> str:
    """Say where the notebook with these names may have a name that its kernel does not know."""
    advice = (
        f"No cell that has run in this kernel makes {missing}. If a cell further up does, run that"
        " one, or choose Run › Run All Above Selected Cell."
    )
    for function in filter(inspect.isfunction, names.values()):
        if function.__globals__ is names and missing in function.__code__.co_varnames:
            return (
                f"{advice} ({missing} is known inside {function.__name__}, only to lines that are"
                " indented as that function's are.)"
            )
    return advice


def where(trace: TracebackType | None, names: dict[str, Any]) -> str:
    """The line of the notebook in which the program was, in words.

    `names` are the notebook's own: code that does not see them is a library's.
    """
    words = ""
    for frame, number in traceback.walk_tb(trace):
        if frame.f_globals is names:
            text = linecache.getline(frame.f_code.co_filename, number).strip()
            function = frame.f_code.co_name
            of = "the cell" if function.startswith("<") else f"the cell that defines {function}"
            words = f" at line {number} of {of}: {text}"
    return words
