"""One answer at work on one rank: load it, put it to its task's probe, notice what it replaced.

Nothing here knows what is right: no judge, no reference, no seed. It runs beside code that nobody vouches for.
"""

import builtins
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from importlib import import_module
from inspect import isclass, unwrap
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ..errors import Wrong

PATIENCE_SECONDS = 5.0  # a receive that waits longer waits for ever
TOO_LONG = "a message was longer than the tensor it was received into: do both sides mean the same chunk and dtype?"
SENDERS = ("torch.distributed.", "ddp_course.stage3", "ddp_course.stage4", "ddp_course.collectives")
MESSAGE = "the message"  # in `stop`
PACKAGE = __package__.split(".")[0]
patience_seconds: ContextVar[float] = ContextVar("patience_seconds", default=PATIENCE_SECONDS)


def answer_cell(number: str) -> str:
    """The id of the answer cell of a task, such as "answer-4-2"."""
    return f"answer-{number.replace('.', '-')}"


def load(number: str, names: Sequence[str], cells: Sequence[tuple[str, str]]) -> list:
    """What the answer to task `number` defines as `names`; `cells` are (id, source), as the notebook has them."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for name, source in cells:
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        try:
            exec(compile(source, name, "exec"), namespace)
        except Exception:
            if name == answer_cell(number):
                raise  # a broken answer to another task is that task's affair
    missing = [name for name in names if name not in namespace]
    if missing:
        raise Wrong(f"the answer cell does not define {missing[0]}")
    return [namespace[name] for name in names]


def run_probe(
    probe: Callable,
    answers: Callable[[], Sequence],
    inputs: dict,
    forbidden: Sequence[str],
    prepare: Callable | None = None,
    ready: Callable[[], None] = lambda: None,
) -> Any:
    """What `probe(*answers(), **inputs)` returns, with the `forbidden` functions out of reach.

    What `prepare(**inputs)` returns, a dict, are inputs too. It is called, and `ready` after it, before there are
    answers.
    """
    made = prepare(**inputs) if prepare else {}
    ready()
    before = originals()
    with disarmed(forbidden):
        evidence = probe(*answers(), **inputs, **made)
    replaced = restore(before)
    if replaced:
        raise Wrong(f"your code replaces {replaced[0]}; an answer leaves torch and the course as they are")
    return evidence


def own_share(inputs: dict, private: Sequence[str], rank: int) -> dict:
    """The inputs as one rank may see them: of a `private` one, which has an item a rank, its own item alone."""
    return {name: own_items(value, rank) if name in private else value for name, value in inputs.items()}


def own_items(value: Any, rank: int) -> Any:
    """A list with an item a rank, None for all ranks but one; a dict of such lists."""
    if isinstance(value, dict):
        return {key: own_items(item, rank) for key, item in value.items()}
    return [item if peer == rank else None for peer, item in enumerate(value)]


def worlds(*sizes: int) -> Iterator[tuple[int, Any]]:
    """Yield (size, group) for new groups of the first 2, 3, … ranks, to their members; all ranks must call it."""
    patience = timedelta(seconds=patience_seconds.get())
    groups = [dist.new_group(list(range(size)), timeout=patience) for size in sizes]
    for size, group in zip(sizes, groups, strict=True):
        if dist.get_rank() < size:
            yield size, group


def traffic_of(traffic: Any) -> dict:
    """What `wire.counting` counted on this rank, as plain data."""
    return {"bytes": traffic.bytes_sent, "messages": traffic.messages_sent, "received": traffic.bytes_received}


@contextmanager
def disarmed(names: Sequence[str]) -> Iterator[None]:
    """While the block runs, the functions with these dotted names raise Wrong, however they were imported."""
    kept = {}
    for name in names:
        try:
            function = function_named(name)
        except ImportError:
            continue  # it is not for this task, and cannot be called
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


def originals() -> list[tuple[Any, str, Any]]:
    """All functions and classes of the modules that an answer might be tempted to change, as (owner, name, value)."""
    owners = [builtins, dist, dist.distributed_c10d, torch.Tensor, torch.nn.Module, torch.nn.functional]
    owners += modules_below(sys.modules[PACKAGE])
    return [(owner, name, value) for owner in owners for name, value in list(vars(owner).items()) if callable(value)]


def modules_below(package: ModuleType) -> list[ModuleType]:
    """A package and all of it that has been loaded: an import leaves its name in the package above.

    Who went through thousands of `sys.modules` would count a reference to each, and in a forked process every page that
    is written to is copied first.
    """
    parts = [sys.modules.get(f"{package.__name__}.{name}") for name in list(vars(package))]
    return [package, *(one for part in parts if part for one in modules_below(part))]


def restore(before: list[tuple[Any, str, Any]]) -> list[str]:
    """Put back what is no longer as it was; return the names of it."""
    replaced = []
    for owner, name, value in before:
        if vars(owner).get(name) is not value:
            replaced.append(f"{owner.__name__}.{name}")
            setattr(owner, name, value)
    return replaced
