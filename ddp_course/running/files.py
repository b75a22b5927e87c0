"""Files: folders that can be written to, files that are replaced whole or not at all, and locks between processes."""

import errno
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def writable_folder(folder: str | Path, option: str = "--out") -> Path:
    """Return `folder` as a Path, made if need be; ValueError, naming `option`, if nothing can be written there."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f'cannot write to the folder "{folder}": {error.strerror}; choose another with {option}'
        ) from error
    return path


def replace_file(path: Path, content: bytes, option: str = "--out", mode: int = 0o644) -> Path:
    """Write `content` (bytes) to `path`, with the rights `mode`; ValueError, naming `option`, if that fails."""
    try:
        return write_whole(path, content, mode)
    except OSError as error:
        raise ValueError(
            f'cannot write "{path}": {error.strerror}; free some space or choose another {option}'
        ) from error


def write_whole(path: Path, content: bytes, mode: int) -> Path:
    """Put `content` at `path`: at any moment, even if the power fails, the old or the new file is there, whole.

    The new file is this user's own, whatever lay at `path` before.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())  # the contents are on the disk before the name is
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name follows the contents
        finally:
            os.close(folder)
    return path


class FileLock:
    """A lock for all threads of all processes that name the same file; it opens when its process ends, however it ends.

    On a file system without locks it keeps no process out.
    """

    def __init__(self, path: str | Path):
        self.file, self.threads = open(path, "a+b", buffering=0), threading.Lock()  # noqa: SIM115 (open with the lock)

    def acquire(self, wait: bool = True) -> bool:
        """Take the lock; False if another process or thread has it and this one is not to `wait`."""
        if not self.threads.acquire(blocking=wait):
            return False
        try:
            if sys.platform == "win32":
                import msvcrt

                self.file.seek(0)
                msvcrt.locking(self.file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(self.file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except (BlockingIOError, PermissionError):
            self.threads.release()
            return False
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise
        return True

    def release(self) -> None:
        """Let the next one have it."""
        if sys.platform == "win32":
            import msvcrt

            self.file.seek(0)
            msvcrt.locking(self.file.fileno(), msvcrt.LK_UNLCK, 1)
        else:
            import fcntl

            fcntl.flock(self.file, fcntl.LOCK_UN)
        self.threads.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@contextmanager
def claimed(path: Path, patience: float = 0.0) -> Iterator[None]:
    """Keep other processes from this block with the same `path`, a file that names the process in it.

    BlockingIOError, with the holder in its text, if another process stays in it for longer than `patience` seconds.
    """
    lock, deadline = FileLock(path), time.monotonic() + patience
    with lock.file:
        while not lock.acquire(wait=False):
            if time.monotonic() > deadline:
                raise BlockingIOError(path.read_text(errors="replace").strip() or "a process that has just begun")
            time.sleep(0.05)
        lock.file.truncate(0)
        lock.file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        try:
            yield
        finally:
            lock.release()


def course_folder(name: str) -> Path:
    """Where the course's `notebooks`, `exercises` or `docs` are: in its repository, or in the installed package."""
    package = Path(__file__).resolve().parents[1]
    packed = package / "course" / name  # setup.py puts them there
    return packed if packed.is_dir() else package.parent / name


def connection_folder() -> Path:
    """Where `ddp-course hosts start` leaves the files with which heads and engines connect."""
    return Path(os.environ.get("DDP_COURSE_HOSTS") or Path.home() / ".ddp_course" / "hosts")
