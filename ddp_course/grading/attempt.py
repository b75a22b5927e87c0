"""One answer at work on one rank: load it, refuse what its task forbids, put it to the task's probe, count its traffic.

Nothing here knows what is right.
"""

import dis
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from inspect import isclass, isfunction, ismodule, unwrap
from pathlib import Path
from pkgutil import resolve_name
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import Wrong
from ..running import wire
from ..running.torch_inside import TorchDispatchMode
from ..stage4_ring import ring_all_reduce
from .checks import Task, cell_of, find
from .guard import enter
from .plain import pack, same, unpack

SENDERS = ("torch.distributed.", "ddp_course.stage3", "ddp_course.stage4", "ddp_course.collectives")
COLLECTIVES = tuple(
    f"torch.distributed.{name}"
    for name, thing in vars(dist).items()
    if name.startswith(("all_", "broadcast", "gather", "reduce", "scatter")) and type(thing) is FunctionType
)
SERVER = tuple(
    f"ddp_course.stage3_paramserver.{name}"
    for name in ("average_on_server", "collect_and_return", "broadcast_parameters")
)
RING = tuple(
    f"ddp_course.stage4_ring.{name}"
    for name in ("ring_all_reduce", "whole_gradient_ring", "reduce_scatter", "allgather", "average_on_ring")
)
BETWEEN = ("POP_TOP", "SWAP", "ROT_TWO", "PUSH_NULL", "CACHE")  # may stand between a name and what becomes of it
_groups: dict[int, Any] = {}  # {size: the group of so many first ranks}, which lasts for the whole launch


@dataclass
class Attempt:
    """One answer to one task, and the inputs for it.

    `answers` are functions, or what another process has pickled (with the source of their cells), or {id: source} of
    cells to run. One that is wanted `if_wrong` is made if the second of a launch has other evidence than the first.
    """

    number: str
    inputs: dict
    answers: Any
    if_wrong: bool = False


class Evidence(NamedTuple):
    """What an attempt left: `values` are {part: {case: value}}, or a `failure` says why there are none."""

    values: dict | None
    failure: str = ""


def make_attempts(attempts: Sequence[Attempt], folder: str, patience: float, work: str) -> None:
    """One rank's part: make every attempt and write its evidence down, in a file called by its place and the rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    torch.set_num_threads(1)  # probes are small: more threads would wait for each other
    tasks = [find(attempt.number) for attempt in attempts]
    if ranks > 1:
        for size in range(1, ranks + 1):
            _groups[size] = dist.new_group(list(range(size)), timeout=timedelta(seconds=patience))
    with python_alone_prints():
        if work:
            enter(work)
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (a submission's floods, until the rank ends)
        for place, (task, attempt) in enumerate(zip(tasks, attempts, strict=True)):
            answers = load(task, attempt.answers)
            refuse(answers, task.forbidden)
            if ranks > 1:
                dist.barrier()  # nobody waits in an answer for a rank that is still loading
            if attempt.if_wrong and enough(attempts, place, folder):
                return
            file = Path(folder, f"{place}-{rank}")
            file.with_suffix(".part").write_bytes(pack(probed(task, answers, attempt.inputs)))
            file.with_suffix(".part").rename(file)


def files_of(folder: str, place: int, task: Task) -> list[Path]:
    """Where all ranks write the evidence of an attempt."""
    return [Path(folder, f"{place}-{rank}") for rank in range(task.ranks)]


def enough(attempts: Sequence[Attempt], place: int, folder: str) -> bool:
    """Whether nothing more is to be tried: the second attempt has the first one's evidence, or that of the last one."""
    task = find(attempts[0].number)

    def values(place: int) -> dict:
        """What an attempt has left, once all ranks have made it."""
        content = [file.read_bytes() for file in files_of(folder, place, task)]
        return assembled(attempts[place], content).values or {}

    repeated = any(attempt.if_wrong for attempt in attempts[:2])
    if repeated or place == 3:  # the attempt before place 3 did nothing, which is no diagnosis
        return False
    if place == 2:
        return all(same(values(1).get(part), values(0).get(part), task.bound) for part in task.parts)
    return same(values(1), values(place - 1))


def assembled(attempt: Attempt, content: Sequence[bytes]) -> Evidence:
    """The evidence of all ranks as {part: {case: value}}: with several ranks, a value is {rank: value}."""
    values: dict = {}
    try:
        by_rank = list(map(unpack, content))
        for rank, parts in enumerate(by_rank):
            for part, cases in parts.items():
                for case, value in cases.items():
                    values.setdefault(part, {}).setdefault(case, {})[rank] = value
    except Exception as error:  # only what the answer returned can be odd here
        return Evidence(None, f"your answer returned something that cannot be compared ({str(error)[:300]})")
    return Evidence(by_rank[0] if find(attempt.number).ranks == 1 else values)


@contextmanager
def python_alone_prints() -> Iterator[None]:
    """Keep gloo's last words, as it ends a process ("terminate called …"), from a learner, who gets a message."""
    kept, silent, stderr = os.dup(2), os.open(os.devnull, os.O_WRONLY), sys.stderr
    os.dup2(silent, 2)
    with os.fdopen(kept, "w", buffering=1, encoding="utf-8", errors="backslashreplace") as sys.stderr:
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(silent)
            sys.stderr = stderr


def load(task: Task, answers: Any) -> Sequence:
    """What an answer cell defined, in order."""
    if not isinstance(answers, bytes | dict):
        return answers
    functions, sources = pickle.loads(answers) if isinstance(answers, bytes) else ((), answers)
    for name, text in sources.items():  # tracebacks show the lines of cells
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    if functions:
        return functions
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for name, source in answers.items():
        exec(compile(source, name, "exec"), namespace)
    missing = [name for name in task.names if name not in namespace]
    if missing:
        raise Wrong(f"the answer cell {cell_of(task.number)} does not define {missing[0]}")
    return [namespace[name] for name in task.names]


def probed(task: Task, answers: Sequence, inputs: dict) -> dict:
    """The evidence of one answer on this rank; where torch's collectives are forbidden, all has to go by the wire."""
    past, forbidden = PastTheWire(), set(COLLECTIVES) <= set(task.forbidden)
    with wire.observing(past.traffic.add), past if forbidden else nullcontext():
        evidence: dict = {}
        for part, case, value in task.probe(*answers, **inputs):
            evidence.setdefault(part, {})[case] = value
    if forbidden and (message := past.message()):
        raise Wrong(message)
    return evidence


def refuse(answers: Sequence, forbidden: Sequence[str]) -> None:
    """Raise Wrong if an answer, or a function of the learner's that it uses, names one of the forbidden functions."""
    names = {}
    for name in forbidden:
        with suppress(ImportError, AttributeError):  # this version of torch has none
            names[id(resolve_name(name))] = name
    waiting, seen, own = list(answers), set(), set(map(id, answers))
    while waiting:
        thing = waiting.pop()
        if id(thing) in names:
            name = names[id(thing)]
            sends = ", with wire.send and wire.recv" if name.startswith(SENDERS) else ""
            raise Wrong(f"your code calls {name.removeprefix('ddp_course.')}: write it yourself{sends}")
        if id(thing) not in seen and (id(thing) in own or getattr(thing, "__module__", "") == "__main__"):
            seen.add(id(thing))
            functions = vars(thing).values() if isclass(thing) else [unwrap(thing)] if callable(thing) else []
            waiting += [named for function in functions if isfunction(function) for named in named_in(function)]


def named_in(function: Any) -> Iterator[Any]:
    """What the code of a function names: globals, attributes of modules and classes, and imports inside it."""
    code = function.__code__
    cells = {name: cell.cell_contents for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)}
    waiting = [code]
    while waiting:
        code, space = waiting.pop(), {**function.__globals__, **cells}
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        thing = module = None
        for step in dis.get_instructions(code):
            name = step.argval
            if step.opname.startswith("STORE_"):
                space[name] = thing
            elif step.opname == "IMPORT_NAME":
                thing, module = sys.modules.get(name.partition(".")[0]), sys.modules.get(name)
            elif step.opname == "IMPORT_FROM":
                thing = getattr(module, name, module)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                thing = getattr(thing, name, None) if ismodule(thing) or isclass(thing) else None
            elif step.opname not in BETWEEN:
                thing = space.get(name) if step.opname.startswith("LOAD_") and isinstance(name, str) else None
            yield thing


def worlds(*sizes: int) -> Iterator[tuple[int, Any]]:
    """Yield (size, group) of the first 2, 3, … ranks to their members."""
    for size in sizes:
        if dist.get_rank() < size:
            yield size, _groups[size]


def noted_ring(group: Any) -> tuple[Callable, list]:
    """The ring all-reduce in a group, and a list of (dtype, elements) of the tensors that it is called with."""
    calls: list = []

    def all_reduce(tensor: torch.Tensor, group: Any = group) -> torch.Tensor:
        calls.append((str(tensor.dtype).removeprefix("torch."), tensor.numel()))
        return ring_all_reduce(tensor, group)

    return all_reduce, calls


class PastTheWire(TorchDispatchMode):
    """Counts what this thread sends through torch itself, to be held against what the wire was told of."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.other, self.traffic = 0, "", wire.Traffic()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Note messages and collectives, and let everything happen."""
        name = function._schema.name
        if name == "c10d::send":
            self.sent += sum(tensor.nbytes for tensor in args[0])
        elif name.startswith(("c10d::", "_c10d_functional::")) and not name.endswith(
            ("recv_", "barrier", "wait_tensor")
        ):
            self.other = self.other or name
        return function(*args, **(kwargs or {}))

    def message(self) -> str:
        """What is wrong with the traffic, or ""."""
        if self.other:
            return f"your code calls torch's own {self.other}: send and receive with the wire's functions"
        more = self.sent - self.traffic.bytes_sent
        return f"{more} bytes went past the wire's functions: all that travels goes through wire" if more > 0 else ""


def tensors(random: Any, count: int, *shape: int, dtype: torch.dtype = torch.float32, whole: bool = False) -> list:
    """`count` tensors of `shape`, all different; whole numbers if sums are to be exact."""
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    if whole:
        return [torch.randint(-999, 999, shape, generator=generator).to(dtype) for _ in range(count)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]
