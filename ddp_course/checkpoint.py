"""Checkpoints that survive a power cut, and a resume that is exact to the last bit.

A checkpoint is one file in a folder, as `torch.save` makes it. It is written under a temporary
name, and renamed when it is whole:

    temporary file → flush → fsync → os.replace → fsync of the folder → delete the oldest

So at any moment every file with a checkpoint's name is whole, even after a process was killed. The
file is a zip archive with a checksum of each part; `load` skips a damaged checkpoint, and reads the
one before it.
"""

import io
import pickle
import random
import re
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .base import files
from .base.errors import CheckpointError
from .base.objects import of_all_ranks

WRITER = ".writer"
PATIENCE_SECONDS = 3.0
OWNER_ONLY = 0o600
NOT_WRITTEN = (
    'no checkpoint could be written to "{}": {}. Those before are untouched; free some space, or'
    " choose another folder."
)

PARTS = (
    "{} and perhaps more is this rank's part of a sharded or split model, or of its optimizer, and"
    " all ranks would load rank 0's part. Save the whole: state_dict() and"
    " optimizer_state_dict(optimizer) of FullyShardedDataParallel, state_dict() of ShardedOptimizer"
    " and Pipeline, or the model after stage9_tensor.restore(model); all ranks call these. Or let"
    " every rank torch.save() its part to a file of its own"
)


def save(path: str | Path, state: Any, keep: int = 2) -> Path | None:
    """Write `state` as the newest checkpoint in the folder `path`, and keep the `keep` newest.

    `state` is a dict of tensors and plain data (numbers, text, lists, dicts). With a process group,
    rank 0 writes and the other ranks return None at once. Returns the new file's path. Raises
    CheckpointError if it cannot be written, on a full disk say, or if another run writes there; the
    checkpoints before stay as they are.
    """
    if not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep is {keep}; it must be a whole number: at least 1 must stay")
    if dist.is_initialized() and dist.get_rank() != 0:
        return None
    folder = Path(path)
    content = packed(state)
    with writing_to(folder):
        try:
            # There is one writer at a time, so a writer that was killed has left these files.
            for leftover in folder.glob(".*.tmp"):
                leftover.unlink(missing_ok=True)
            number = max(map(number_of, checkpoints(folder)), default=0) + 1
            file = files.write_whole(folder / f"checkpoint-{number:08}.pt", content, OWNER_ONLY)
        except OSError as error:
            raise CheckpointError(NOT_WRITTEN.format(path, error.strerror)) from error
        for old in checkpoints(folder)[keep:]:
            try:
                old.unlink(missing_ok=True)
            except OSError as error:
                warnings.warn(
                    f"the old checkpoint {old} could not be deleted: {error.strerror}", stacklevel=2
                )
    return file


@contextmanager
def writing_to(path: str | Path) -> Iterator[None]:
    """Keep other processes from writing to the folder `path` during this block.

    The folder is made if it is missing. A run that saves many times claims its folder once for all
    of them; `save` claims it for one checkpoint. Raises CheckpointError, which names the process
    that writes there, if that process goes on for some seconds.
    """
    folder = Path(path)
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(files.claimed(folder.resolve() / WRITER, PATIENCE_SECONDS))
        except BlockingIOError as error:
            raise CheckpointError(
                f'another run writes its checkpoints to "{path}" ({error}); wait for its end or'
                " choose another folder"
            ) from None
        except OSError as error:
            raise CheckpointError(NOT_WRITTEN.format(path, error.strerror)) from error
        yield


def load(path: str | Path) -> Any:
    """Return the newest undamaged checkpoint of the folder `path`, its tensors on the CPU.

    A damaged checkpoint is skipped with a warning. Only tensors and plain data are read
    (`weights_only=True`): a file from a stranger cannot run code. Raises CheckpointError if there
    is nothing to load.
    """
    saved = checkpoints(path)
    for file in saved:
        try:
            return unpacked(file.read_bytes())
        except (ValueError, OSError) as error:
            warnings.warn(f"skipped the checkpoint {file.name}: {error}", stacklevel=2)
    if saved:
        raise CheckpointError(
            f'all {len(saved)} checkpoints in "{path}" are damaged; start anew in another folder'
        )
    raise CheckpointError(
        f'there is no checkpoint in "{path}"; is this the folder that --checkpoint named?'
    )


def checkpoints(path: str | Path) -> list[Path]:
    """Return the files of all checkpoints in a folder, newest first; [] if there is no folder."""
    files = [file for file in Path(path).glob("checkpoint-*.pt") if number_of(file)]
    return sorted(files, key=number_of, reverse=True)


def number_of(file: Path) -> int:
    """Return the number in a checkpoint's name, of eight digits or more; 0 for another name."""
    match = re.fullmatch(r"checkpoint-(\d{8,})\.pt", file.name, re.ASCII)
    return int(match[1]) if match else 0


def packed(state: Any) -> bytes:
    """Return `state` as the bytes of a checkpoint.

    Raises CheckpointError if `load` could not read them.
    """
    content = io.BytesIO()
    try:
        if parts := ", ".join(islice(parts_in(state), 3)):
            raise CheckpointError(PARTS.format(parts))
        torch.save(state, content)
        content.seek(0)
        foreign = ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(content)))
    except (pickle.PickleError, AttributeError, TypeError) as error:
        foreign = str(error)
    except (RecursionError, ValueError, OverflowError) as error:
        foreign = f"{type(error).__name__}: too deep a list, or too large a number"
    if foreign:
        raise CheckpointError(
            f"the state cannot be saved ({foreign}): a checkpoint holds tensors, numbers, text,"
            " lists and dicts only. Save the state_dict() of an object, and convert numbers of"
            " NumPy."
        )
    return content.getvalue()


def parts_in(state: Any, name: str = "state") -> Iterator[str]:
    """Yield the names of the tensors in `state` of which other ranks have other parts."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from parts_in(value, f"{name}[{key!r}]")
    elif isinstance(state, (list, tuple)):
        for index, value in enumerate(state):
            yield from parts_in(value, f"{name}[{index}]")
    elif hasattr(state, "is_part") and dist.is_initialized() and dist.get_world_size() > 1:
        yield name


def unpacked(content: bytes) -> Any:
    """Return the state in the bytes of a checkpoint.

    Raises ValueError if they are damaged or not plain data.
    """
    file = io.BytesIO(content)
    try:
        if damaged := zipfile.ZipFile(file).testzip():
            raise ValueError(f"the checksum of {damaged} is wrong")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # A damaged file may raise any error.
        raise ValueError(
            f"it is damaged, or no checkpoint: {type(error).__name__}: {error}".splitlines()[0]
        ) from error


def random_states() -> list[Any]:
    """Return the state of every rank's random generators, in rank order; all ranks call this."""
    name, keys, *position = np.random.get_state(legacy=True)
    # A rank has one GPU, or none.
    of_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    own = {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *position],
        "torch": torch.get_rng_state(),
        "cuda": of_gpu,
    }
    if not dist.is_initialized():
        return [own]
    return of_all_ranks(own)


def set_random_state(states: Sequence[Any]) -> None:
    """Set this rank's random generators to this rank's state in `states`.

    A rank that has no state in `states` keeps its own.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank >= len(states):
        return
    random.setstate(states[rank]["python"])
    np.random.set_state(states[rank]["numpy"])
    torch.set_rng_state(states[rank]["torch"])
    if states[rank]["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states[rank]["cuda"])
