"""Results on disk: a folder that can be written to, and files that are replaced whole or not at all."""

import os
import tempfile
from pathlib import Path


def writable_folder(folder):
    """Return `folder` as a Path, made if need be; ValueError if nothing can be written there."""
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


def replace_file(path, content):
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
        raise ValueError(f'cannot write "{path}": {error.strerror}; free some space or choose another --out') from error
    return path
