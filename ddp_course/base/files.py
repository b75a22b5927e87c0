"""Files that are replaced whole or not at all, and locks between processes."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


def writable_folder(folder: str | Path) -> Path:
    """Return `folder` as a Path, and make it if it is missing.

    Raises ValueError if nothing can be written there.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f'cannot write to the folder "{folder}": {error.strerror}; choose another with --out'
        ) from error
    return path


def replace_file(path: Path, content: bytes, option: str = "--out") -> Path:
    """Write `content` (bytes) to `path`; raises ValueError, naming `option`, if that fails."""
    try:
        return write_whole(path, content, 0o644)
    except OSError as error:
        raise ValueError(
            f'cannot write "{path}": {error.strerror}; free some space or choose another {option}'
        ) from error


def write_whole(path: Path, content: bytes, mode: int) -> Path:
    """Put `content` at `path` so that at any moment the old or the new file is there, whole.

    That holds even if the power fails. The new file is this user's own, whatever lay at `path`
    before.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            # The contents must be on the disk before the name is.
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            # The name follows the contents.
            os.fsync(folder)
        finally:
            os.close(folder)
    return path


@contextmanager
def claimed(path: Path, patience: float) -> Iterator[None]:
    """Keep other processes out of such a block with the same `path`.

    The file at `path` names the process that is in its block. Raises BlockingIOError, which names
    that process, if it stays there for more than `patience` seconds.
    """
    try:
        lock = FileLock(f"{path}.lock", is_singleton=True).acquire(timeout=patience)
    except Timeout:
        holder = path.read_text(errors="replace") if path.exists() else ""
        raise BlockingIOError(holder or "a process that has just begun") from None
    # The same thread may claim a path twice.
    with lock:
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
