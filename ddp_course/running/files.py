"""Results on disk: a folder that can be written to, and files that are replaced whole or not at all."""

import os
import tempfile
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


def replace_file(path: Path, content: bytes, option: str = "--out") -> Path:
    """Write `content` (bytes) to `path` so that at any moment either the old or the new file is there, whole."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise ValueError(
            f'cannot write "{path}": {error.strerror}; free some space or choose another {option}'
        ) from error
    return path


def course_folder(name: str) -> Path:
    """Where the course's `notebooks`, `exercises` or `docs` are: in its repository, or in the installed package."""
    package = Path(__file__).resolve().parents[1]
    packed = package / "course" / name  # setup.py puts them there
    return packed if packed.is_dir() else package.parent / name
