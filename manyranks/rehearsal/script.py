"""Runs the script on each rank of a rehearsal as torchrun would, and keeps what it did when."""

import builtins
import importlib.util
import linecache
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .. import clocks, own_code
from ..clocks import recording, stalls, streams
from ..devices.memory import Memory
from ..devices.sizes import Counted
from ..joining import join
from ..torch_inside import replaced
from .as_gpus import as_gpus

PATIENCE_S = 60.0  # Under --sizes-only a rank may be busy for long while virtual time stands still.


class Script(NamedTuple):
    """The file of a script and, if it is given by a module's name, its package."""

    file: str
    package: str | None = None


@dataclass
class RankRecord(recording.Recording):
    """What one rank tells of its run; all moments are picoseconds.

    `steps` are the moments at which its optimizers had made their steps.
    """

    steps: list[int] = field(default_factory=list)
    peak: int = 0
    ended: int = 0
    made_group: bool = False


def run_script(script: Script, arguments: list[str], device: Any, per_host: int) -> RankRecord:
    """Run the script as this rank's `__main__`; return what it did.

    The patches here end with the rank's process.
    """
    rank = dist.get_rank()
    record = RankRecord()
    os.environ.update(variables(rank, dist.get_world_size(), per_host))
    stalls.PATIENCE_S = PATIENCE_S
    recording.current = record
    memory = Memory.current
    with ExitStack() as stack:
        if memory is None:  # Under --sizes-only the launch counts memory.
            memory = Memory(device.capacity)
            stack.enter_context(memory.counting())
            stack.enter_context(Counted(memory))
        stack.enter_context(own_group(record))
        stack.enter_context(as_gpus(device, rank % per_host, per_host))
        note_steps(record)
        # These warnings are about versions of torch, or the processor, not about the script.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", ".*(on cpu device mesh|no accelerator is found)")
        execute(script, arguments)
    streams.synchronize()
    record.peak = memory.peak
    record.ended = clocks.moment()
    return record


def variables(rank: int, world_size: int, per_host: int) -> dict[str, str]:
    """Return the environment that torchrun gives a rank, without the address of the store."""
    host = rank // per_host
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank % per_host,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": per_host,
        "GROUP_RANK": host,
        "GROUP_WORLD_SIZE": world_size // per_host,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
    }
    texts = {name: str(number) for name, number in numbers.items()}
    return {**texts, "TORCHELASTIC_RUN_ID": "rehearsal", "TORCHELASTIC_RESTART_COUNT": "0"}


@contextmanager
def own_group(record: RankRecord) -> Iterator[None]:
    """Let the script make and end the group of all ranks within this block, in appearance.

    It may ask for any backend, and gets the group with clocks that the launch has made.
    """

    def make(*_: Any, **__: Any) -> tuple[int, int]:
        record.made_group = True
        return dist.get_rank(), dist.get_world_size()

    functions = {
        "init_process_group": make,
        "destroy_process_group": lambda *_, **__: None,
        "is_initialized": lambda: record.made_group,
        "is_nccl_available": lambda: True,
    }
    with replaced(dist, **functions), replaced(join, join=make):
        yield


def note_steps(record: RankRecord) -> None:
    """Note the moments at which optimizers have made their steps, from now on.

    If an optimizer steps inside another one, only the outermost step counts.
    """
    depth = 0

    def before(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def after(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if not depth:
            moment = clocks.moment()
            record.steps.append(streams.current().start() if streams.are_on() else moment)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def find_script(name: str, is_module: bool) -> Script:
    """Return the script with this path, or this module's name; raises ValueError without one."""
    if not is_module:
        path = Path(name).resolve()
        if not path.is_file():
            raise ValueError(f"there is no file {name}")
        return Script(str(path))
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:
        spec = None
    finally:
        sys.path.pop(0)
    if spec is None or not spec.has_location:
        raise ValueError(f"there is no module {name}")
    return Script(str(spec.origin), spec.parent)


def execute(script: Script, arguments: list[str]) -> None:
    """Run a script as `__main__` with these arguments; `sys.exit()` without an error ends it."""
    path = script.file
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __package__=script.package, __builtins__=builtins)
    with open(path, encoding="utf-8") as file:
        source = file.read()
    own_code.scripts.add(path)
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path) if script.package is None else os.getcwd())
    linecache.checkcache(path)
    main_before = sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.modules["__main__"] = main_before


def run_for_orders(script: Script, arguments: list[str], device: Any, per_host: int) -> None:
    """Run the script where its messages are tried in every order."""
    rank = dist.get_rank()
    os.environ.update(variables(rank, dist.get_world_size(), per_host))
    with own_group(RankRecord()), as_gpus(device, rank % per_host, per_host):
        execute(script, arguments)
