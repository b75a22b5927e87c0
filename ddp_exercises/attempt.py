"""Runs an answer on one rank, and returns its evidence.

The answer is loaded, functions that its task forbids are refused, and the task's probe calls it.
This module does not know what is right.
"""

import inspect
import math
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddp_course.base.torch_private import other_collectives
from manyranks.memory import remember_source

from .errors import TooSlow, Wrong
from .plain import pack, unpack
from .tasks import Task

OURS = ("torch.", "ddp_course.", "exercise_checks.")  # These modules may call what is forbidden.
UNUSABLE = "your answer returned something that cannot be used"
LONG = timedelta(seconds=1000)  # No rank gives up before the launch does, so deadlocks are found.
SHARE_SECONDS = 3.0  # One of several ranks may compute for so long, while the others wait.
# The names of torch's functions that send begin with these. COLLECTIVES has those of the installed
# torch, as no task forbids a function that this version lacks.
BEGINNINGS = ("all_", "broadcast", "gather", "reduce", "scatter", "send", "isend", "batch_isend")
COLLECTIVES = tuple(
    f"torch.distributed.{name}"
    for name, thing in vars(dist).items()
    if name.startswith(BEGINNINGS) and type(thing) is FunctionType
)
# By their sizes, these are the groups of the first ranks, and by its size below 0 that of all ranks
# but the first, whose numbers in the group are other ones. They last for the whole launch.
groups: dict[int, Any] = {}
# A `read` may draw from torch's one random state, and the grader reads in several threads.
reading = threading.Lock()


class Attempt(NamedTuple):
    """The `answers` to a task, in the form in which they travel to ranks.

    They are functions, or pickled with the source of their cells, or {id: source} of cells to run.
    """

    task: Task
    inputs: dict
    answers: Any


class Evidence(NamedTuple):
    """The evidence of an attempt.

    `values` are {(part, case): {rank: value}}, where the rank is None for all ranks together; if an
    answer failed, there are none, and `failure` says why. The first attempt of the launch had ended
    after `seconds`.
    """

    values: dict
    failure: str = ""
    seconds: float = 0.0


def make_attempts(
    attempts: Sequence[Attempt], folder: str, enter: Callable | None, ended: Callable = lambda: None
) -> None:
    """Make every attempt on this rank, and write the evidence of each into a file.

    The file is named by the attempt's place and the rank. `enter(folder)` sets a submission's
    limits before anything of it runs. `ended()` is called after each attempt.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    make_groups()
    if enter:
        enter(folder)
    silence_libraries()
    for place, attempt in enumerate(attempts):
        task = attempt.task
        answers = load(task, attempt.answers)
        if ranks > 1:
            # Without this a rank could wait in an answer for one that is still loading.
            dist.barrier()
        limit_processor_time(task.seconds if ranks == 1 else SHARE_SECONDS)
        evidence = pack(probe(task, answers, attempt.inputs))
        ended()
        Path(folder, f"{place}-{rank}").write_bytes(evidence)


def make_groups() -> None:
    """Make what probes need on a rank: its own random numbers, one thread, and groups."""
    torch.manual_seed(dist.get_rank())
    # Probes are small, so several threads would only wait for each other.
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    if ranks > 1:
        for size in range(1, ranks + 1):
            groups[size] = dist.new_group(list(range(size)), timeout=LONG)
        groups[1 - ranks] = dist.new_group(list(range(1, ranks)), timeout=LONG)


def silence_libraries() -> None:
    """Show what Python prints, but not what gloo prints when it ends a process.

    Gloo would print "terminate called …", and a learner gets a message of the course.
    """
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def limit_processor_time(seconds: float) -> None:
    """Raise TooSlow when this process has computed for so many seconds from now on."""
    end = math.ceil(time.process_time() + seconds)
    signal.signal(signal.SIGXCPU, too_slow)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (end, most))


def too_slow(*_: Any) -> None:
    """Raise TooSlow, as the handler of a signal."""
    raise TooSlow


def assemble(attempt: Attempt, contents: Sequence[bytes]) -> Evidence:
    """Return the evidence of all ranks together, from the contents of their files.

    A task's `read` is called here, in the grader's process, where nothing of the answer runs.
    """
    values: dict = {}
    task = attempt.task
    alone = task.ranks == 1
    try:
        of_ranks = [unpack(content) for content in contents]
        if task.read:
            returned = [list(of_rank.values()) for of_rank in of_ranks]
            one_or_all = returned[0] if alone else returned
            with reading:
                for part, case, value in task.read(one_or_all, **attempt.inputs):
                    values[part, case] = {None: value} if alone else value
            return Evidence(values)
        ranks = [None] if alone else range(task.ranks)
        for rank, of_rank in zip(ranks, of_ranks, strict=True):
            for part_and_case, value in of_rank.items():
                values.setdefault(part_and_case, {})[rank] = value
    except Wrong as error:
        return Evidence({}, str(error))
    except Exception as error:
        # Only a value that the answer returned can fail here.
        return Evidence({}, f"{UNUSABLE} ({str(error)[:300]})")
    return Evidence(values)


def load(task: Task, answers: Any) -> Sequence:
    """Return the objects that an answer defines, in the order of the task's `names`."""
    objects = answers
    sources = {}
    if isinstance(answers, bytes):
        objects, sources = pickle.loads(answers)
    elif isinstance(answers, dict):
        sources = answers
    for name, text in sources.items():
        remember_source(name, text)
    if not isinstance(answers, dict):
        return objects
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for name, source in answers.items():
        exec(compile(source, name, "exec"), namespace)
    return [namespace[name] for name in task.names]


def probe(task: Task, answers: Sequence, inputs: dict) -> dict:
    """Return the values of one answer on this rank, by part and case.

    If the task forbids torch's collectives, everything must be sent by the wire.
    """
    evidence: dict = {}
    only_the_wire = set(COLLECTIVES) <= set(task.forbidden)
    past_the_wire = other_collectives(refuse_collective) if only_the_wire else nullcontext()
    refuse_the_courses_own(answers)
    with past_the_wire, refusing(task.forbidden) as replaced:
        refuse_copies(answers, replaced)
        for part, case, value in task.probe(*answers, **inputs):
            evidence[part, case] = value
    return evidence


def refuse_the_courses_own(answers: Sequence) -> None:
    """Raise Wrong if an answer cannot be called, or is a function of the course or of torch."""
    for answer in answers:
        if not callable(answer):
            raise Wrong(f"your answer is {answer!r:.40}, which cannot be called: define a function")
        # A partial has a `func`.
        function = inspect.unwrap(getattr(answer, "func", answer))
        module = getattr(function, "__globals__", {}).get("__name__") or function.__module__
        if str(module).startswith(OURS):
            name = getattr(function, "__name__", type(function).__name__)
            raise Wrong(
                f"your answer is {module.removeprefix('ddp_course.')}.{name}: write it yourself"
            )


def refuse_copies(answers: Sequence, replaced: Sequence) -> None:
    """Raise Wrong if an answer, or a function of its module, is a copy of a forbidden one.

    `replaced` has the forbidden functions with their codes. A copy is code of the same file, or of
    an executed text, that uses the same names.
    """
    for answer in answers:
        for thing in (answer, *getattr(answer, "__globals__", {}).values()):
            if not isinstance(thing, FunctionType):
                continue
            code = getattr(inspect.unwrap(thing), "__code__", None)
            for function, forbidden in replaced:
                is_copied = code and code.co_filename in (forbidden.co_filename, "<string>")
                if is_copied and code.co_names == forbidden.co_names:
                    raise Wrong(f"your code has a copy of {function.__name__}: write it yourself")


class Forbidden(NamedTuple):
    """A function that an answer must not call.

    `message` is for a learner who calls it, `depth` is the number of decorators' frames above it,
    and `original` is a copy of it.
    """

    message: str
    depth: int
    original: FunctionType


forbidden_now: dict[str, Forbidden] = {}
refused: list[str] = []  # the messages of refused calls, as an answer may catch the error
STUB = """
def stub(*args, **kwargs):
    from ddp_exercises.attempt import refuse_or_call
    return refuse_or_call({!r}, args, kwargs)
"""


@contextmanager
def refusing(forbidden: Sequence[str]) -> Iterator[list]:
    """Give forbidden functions other code within this block: it raises Wrong.

    So they are refused by whatever name and in whatever thread they are called, unless torch or the
    course calls. Yield (function, its code) for each. At the end, raise Wrong again if a call was
    refused.
    """
    changed = []
    for name in forbidden:
        # The colon says where the module ends, which saves a hundred searches of the disk.
        function = resolve_name(":".join(name.rsplit(".", 1)))
        depth = 1
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
            depth += 1
        called = name.removeprefix("ddp_course.")
        message = f"your code calls {called}: write it yourself, with what the task gives you"
        original = FunctionType(
            function.__code__, function.__globals__, None, function.__defaults__
        )
        original.__kwdefaults__ = function.__kwdefaults__
        forbidden_now[name] = Forbidden(message, depth, original)
        names: dict[str, Any] = {}
        exec(STUB.format(name), names)
        changed.append((function, function.__code__))
        function.__code__ = names["stub"].__code__
    refused.clear()
    try:
        yield changed
    finally:
        for function, code in changed:
            function.__code__ = code
    if refused:
        raise Wrong(refused[0])


def refuse_or_call(name: str, args: tuple, kwargs: dict) -> Any:
    """Call a forbidden function for torch and the course; raise Wrong for all other callers."""
    forbidden = forbidden_now[name]
    frame = sys._getframe(1 + forbidden.depth)
    if not str(frame.f_globals.get("__name__")).startswith(OURS):
        refused.append(forbidden.message)
        raise Wrong(forbidden.message)
    return forbidden.original(*args, **kwargs)


def refuse_collective(name: str) -> None:
    """Raise Wrong, as an answer calls torch's own collective, and note it, as it may be caught."""
    message = f"your code calls torch's own {name}: send with what the task gives you"
    refused.append(message)
    raise Wrong(message)
