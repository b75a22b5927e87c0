"""Files that only lie in memory, and sources that no file has."""

import linecache
import os
import tempfile
from typing import IO


def open_memory(name: str, content: bytes = b"") -> IO[bytes]:
    """Open a new file that no folder lists, in memory where the system can do that.

    A file in memory is possible on a full disk, too.
    """
    in_memory = hasattr(os, "memfd_create")
    file = open(os.memfd_create(name), "w+b") if in_memory else tempfile.TemporaryFile()  # noqa: SIM115
    file.write(content)
    file.seek(0)
    return file


def remembered_sources() -> dict[str, str]:
    """Return {name: text} of the sources that no file has, such as those of all cells."""
    sources = {}
    for name, entry in list(linecache.cache.items()):
        # An entry has size, time, lines and path; before its source was read it has only a loader.
        if len(entry) == 4 and not os.path.exists(name):
            _, _, lines, _ = entry
            sources[name] = "".join(lines)
    return sources


def remember_source(name: str, text: str) -> None:
    """Have tracebacks find the lines of a text, such as a cell's, by a name that no file has."""
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
