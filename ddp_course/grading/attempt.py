"""One answer at work on one rank: load it, put it to its task's probe, count what it sends past the wire.

Nothing here knows what is right.
"""

import linecache
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from inspect import isclass, unwrap
from typing import Any

import torch
import torch.distributed as dist

from ..errors import Wrong
from ..running import wire
from ..running.torch_inside import TorchDispatchMode
from .checks import Task, cell_of

SENDERS = ("torch.distributed.", "ddp_course.stage3", "ddp_course.stage4", "ddp_course.collectives")
COLLECTIVES = tuple(
    f"torch.distributed.{name}"
    for name in (
        "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_object", "gather",
        "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather_object",
        "broadcast_object_list", "all_reduce_coalesced", "all_gather_coalesced", "scatter_object_list",
    )
)  # fmt: skip
SERVER = tuple(
    f"ddp_course.stage3_paramserver.{name}"
    for name in ("average_on_server", "collect_and_return", "broadcast_parameters")
)
RING = tuple(
    f"ddp_course.stage4_ring.{name}"
    for name in ("ring_all_reduce", "whole_gradient_ring", "reduce_scatter", "allgather", "average_on_ring")
)
MESSAGE = "the message"  # in `stop`
_groups: dict[int, Any] = {}  # of the first 1, 2, … ranks


@dataclass
class Packed:
    """Answers that another process has pickled, and the source of the cells that they come from."""

    content: bytes


@dataclass
class Cells:
    """An answer as text: [(id, source)] of the cells to run."""

    cells: Sequence[tuple[str, str]]


def load(task: Task, answers: Any) -> Sequence:
    """What an answer cell defined, in order: functions as they are, `Packed`, or run from `Cells`."""
    if isinstance(answers, Packed):
        functions, sources = pickle.loads(answers.content)
        remember(sources)
        return functions
    if not isinstance(answers, Cells):
        return answers
    namespace: dict[str, Any] = {"__name__": "__main__"}
    remember(dict(answers.cells))
    for name, source in answers.cells:
        exec(compile(source, name, "exec"), namespace)
    missing = [name for name in task.names if name not in namespace]
    if missing:
        raise Wrong(f"the answer cell {cell_of(task.number)} does not define {missing[0]}")
    return [namespace[name] for name in task.names]


def remember(sources: dict[str, str]) -> None:
    """Let tracebacks show the lines of cells."""
    linecache.cache.update({name: (len(text), None, text.splitlines(True), name) for name, text in sources.items()})


def attempt(task: Task, answers: Sequence, inputs: dict) -> Any:
    """The evidence of one answer on this rank, with the task's forbidden functions out of reach."""
    with disarmed(task.forbidden), counted() as past:
        evidence = task.probe(*answers, **inputs)
    if set(COLLECTIVES) <= set(task.forbidden) and (told := past.told()):
        raise Wrong(told)
    return evidence


def make_groups(sizes: Iterable[int], patience: Any) -> None:
    """Groups of the first so many ranks, which last for the whole launch; all ranks call it."""
    for size in sizes:
        _groups[size] = dist.new_group(list(range(size)), timeout=patience)


def worlds(*sizes: int) -> Iterator[tuple[int, Any]]:
    """Yield (size, group) of the first 2, 3, … ranks to their members."""
    for size in sizes:
        if dist.get_rank() < size:
            yield size, _groups[size]


class PastTheWire(TorchDispatchMode):
    """Counts what this thread sends through torch itself, to be held against what the wire was told of."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.other, self.traffic = 0, "", wire.Traffic()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Note messages and collectives, and let everything happen."""
        name = function._schema.name
        if name == "c10d::send":
            self.sent += sum(one.nbytes for one in args[0])
        elif name.startswith(("c10d::", "_c10d_functional::")) and not name.endswith(
            ("recv_", "barrier", "wait_tensor")
        ):
            self.other = self.other or name
        return function(*args, **(kwargs or {}))

    def told(self) -> str:
        """What is wrong with the traffic, or ""."""
        if self.other:
            return f"your code calls torch's own {self.other}: send and receive with the wire's functions"
        if self.sent > self.traffic.bytes_sent:
            more = self.sent - self.traffic.bytes_sent
            return f"{more} bytes went past the wire's functions: all that travels goes through wire"
        return ""


@contextmanager
def counted() -> Iterator[PastTheWire]:
    """Count what the block sends, and what of it goes through the wire."""
    past = PastTheWire()
    with wire.observing(past.traffic.add), past:
        yield past


@contextmanager
def disarmed(names: Sequence[str]) -> Iterator[None]:
    """While the block runs, the functions with these dotted names raise Wrong, however they were imported."""
    kept = {}
    for name in names:
        try:
            function = function_named(name)
        except (ImportError, AttributeError):
            continue  # this version of torch has none
        sends = ", with wire.send and wire.recv" if name.startswith(SENDERS) else ""
        message = f"your code calls {name.removeprefix('ddp_course.')}: write it yourself{sends}"
        kept[function] = function.__code__
        words = tuple(message if one == MESSAGE else one for one in stop.__code__.co_consts)
        function.__code__ = stop.__code__.replace(co_consts=words)
    try:
        yield
    finally:
        for function, code in kept.items():
            function.__code__ = code


def stop(*args: Any, **kwargs: Any) -> None:
    """What a function does that is out of reach; its own globals are another module's."""
    raise __import__("ddp_course.errors", fromlist=["Wrong"]).Wrong("the message")


def function_named(name: str) -> Any:
    """The innermost plain function behind a dotted name; of a class, its `__init__`."""
    module, _, attribute = name.rpartition(".")
    thing = getattr(import_module(module), attribute)
    return unwrap(thing.__init__ if isclass(thing) else thing)


def tensors(random: Any, count: int, *shape: int, dtype: torch.dtype = torch.float32, whole: bool = False) -> list:
    """`count` tensors of `shape`, all different; whole numbers if sums are to be exact."""
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    if whole:
        return [torch.randint(-999, 999, shape, generator=generator).to(dtype) for _ in range(count)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]
