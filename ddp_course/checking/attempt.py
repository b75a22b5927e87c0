"""One answer at work on one rank: load it, refuse what its task forbids, put it to the task's
probe, count its traffic.

Nothing here knows what is right.
"""

import linecache
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import Wrong
from ..running.torch_inside import TorchDispatchMode
from .checks import Task, find
from .guard import enter
from .plain import pack, unpack

SENDERS = ("torch.distributed.", "ddp_course.stage3", "ddp_course.stage4", "ddp_course.collectives")
BEGINNINGS = ("all_", "broadcast", "gather", "reduce", "scatter", "send", "isend", "batch_isend")
COLLECTIVES = tuple(
    f"torch.distributed.{name}"
    for name, thing in vars(dist).items()
    if name.startswith(BEGINNINGS) and type(thing) is FunctionType
)
groups: dict[
    int, Any
] = {}  # {size: group of the first `size` ranks}; the groups last for the whole launch.


class Attempt(NamedTuple):
    """`answers` to a task are functions, or pickled with the source of their cells, or {id: source}
    of cells to run.
    """

    number: str
    inputs: dict
    answers: Any


class Evidence(NamedTuple):
    """What an attempt returned: `values` are {part: {case: value}}, or a `failure` says why there
    are none.
    """

    values: dict | None
    failure: str = ""


def make_attempts(attempts: Sequence[Attempt], folder: str, patience: float, work: str) -> None:
    """On each rank: make every attempt and write its evidence into a file named by the attempt's
    place and the rank.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    torch.set_num_threads(1)  # Probes are small: more threads would wait for each other.
    tasks = [find(attempt.number) for attempt in attempts]
    for size in range(1, ranks + 1) if ranks > 1 else ():
        groups[size] = dist.new_group(list(range(size)), timeout=timedelta(seconds=patience))
    # A learner gets our message, and not what gloo prints ("terminate called …") when it ends a
    # process.
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    if work:
        enter(work)
    for place, (task, attempt) in enumerate(zip(tasks, attempts, strict=True)):
        answers = load(task, attempt.answers)
        if ranks > 1:
            dist.barrier()  # No rank waits in an answer for one that is still loading.
        Path(folder, f"{place}-{rank}").write_bytes(pack(probed(task, answers, attempt.inputs)))


def assembled(attempt: Attempt, content: Sequence[bytes]) -> Evidence:
    """The evidence of all ranks as {part: {case: value}}: with several ranks, a value is {rank:
    value}.
    """
    values: dict = {}
    try:
        by_rank = list(map(unpack, content))
        for rank, parts in enumerate(by_rank):
            for part, cases in parts.items():
                for case, value in cases.items():
                    values.setdefault(part, {}).setdefault(case, {})[rank] = value
    except Exception as error:  # Only a value that the answer returned can fail here.
        return Evidence(
            None, f"your answer returned something that cannot be compared ({str(error)[:300]})"
        )
    return Evidence(by_rank[0] if find(attempt.number).ranks == 1 else values)


def load(task: Task, answers: Any) -> Sequence:
    """The objects that an answer defines, in the order of the task's `names`."""
    if not isinstance(answers, bytes | dict):
        return answers
    functions, sources = pickle.loads(answers) if isinstance(answers, bytes) else ((), answers)
    for name, text in sources.items():  # Tracebacks then show the lines of cells.
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    if functions:
        return functions
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for name, source in answers.items():
        exec(compile(source, name, "exec"), namespace)
    return [namespace[name] for name in task.names]


def probed(task: Task, answers: Sequence, inputs: dict) -> dict:
    """The evidence of one answer on this rank; where torch's collectives are forbidden, the wire
    must send all.
    """
    evidence: dict = {}
    past = PastTheWire() if set(COLLECTIVES) <= set(task.forbidden) else nullcontext()
    with past, refusing(task.forbidden):
        for part, case, value in task.probe(*answers, **inputs):
            evidence.setdefault(part, {})[case] = value
    return evidence


@contextmanager
def refusing(forbidden: Sequence[str]) -> Iterator[None]:
    """Raise Wrong where code outside of torch and the course calls a forbidden function, and once
    more at the end.
    """
    messages, calls = {}, []
    for name in forbidden:
        sends = ", with wire.send and wire.recv" if name.startswith(SENDERS) else ""
        message = f"your code calls {name.removeprefix('ddp_course.')}: write it yourself{sends}"
        with suppress(ImportError, AttributeError):  # This version of torch may lack the function.
            function, callers = resolve_name(name), 1
            while hasattr(function, "__wrapped__"):
                function, callers = function.__wrapped__, callers + 1
            messages[function.__code__] = message, callers

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in messages:
            message, callers = messages[frame.f_code]
            for _ in range(callers):
                frame = frame.f_back
            if not frame.f_globals.get("__name__", "").startswith(
                ("torch.", "ddp_course.", "exercise_checks.")
            ):
                calls.append(message)
                raise Wrong(message)

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)
    if calls:  # The answer may have caught the first error.
        raise Wrong(calls[0])


class PastTheWire(TorchDispatchMode):
    """Raises Wrong if this thread calls torch's collectives; it may call sends and receives, as the
    wire does.
    """

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Refuse collectives."""
        name = function._schema.name
        free = ("send", "recv_", "barrier", "wait_tensor")
        if name.startswith(("c10d::", "_c10d_functional::")) and not name.endswith(free):
            raise Wrong(
                f"your code calls torch's own {name}: send and receive with the wire's functions"
            )
        return function(*args, **(kwargs or {}))
