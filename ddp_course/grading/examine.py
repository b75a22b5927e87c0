"""Put answers to work on ranks of their own, and bring back plain data.

The examiner (the kernel of a learner who checks, or a process of the grader's) draws inputs and launches four ranks.
Only there does an answer run. Functions that would be the answer raise there, and functions of torch or of the course
that an answer replaced are noticed. Each rank writes its evidence to a file, a line of JSON an item, so that one bad
answer costs the others nothing: the launch is repeated from the next item on.
"""

import builtins
import json
import linecache
import random
import re
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import import_module
from inspect import isclass, unwrap
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import CourseError, LaunchTimeout, RankError
from ..running.launching.launch import launch
from .plain import pack, unpack
from .tasks import CANNOT, RANKS, Part, Wrong, find

PATIENCE_SECONDS = 5.0  # a receive that waits longer waits for ever
GAVE_UP = re.compile("timed out waiting|timeout|connection closed by peer|connection reset by peer", re.IGNORECASE)
FIRST_ITEM_SECONDS, NEXT_ITEM_SECONDS = 12.0, 5.0
NOT_OURS = re.compile(r"site-packages|dist-packages|[/\\]ddp_course[/\\]|[/\\]lib[/\\]python|<frozen|<string>|<task>")


@dataclass
class Item:
    """One answer to one task: functions, or `cells` as [(name, source)], with the inputs for it."""

    number: str
    inputs: dict
    answers: tuple = ()
    cells: tuple = ()

    def load(self, names):
        """The functions or classes `names`, from the cells if the answer is source text."""
        if not self.cells:
            return self.answers
        namespace = {"__name__": "__main__"}
        for name, source in self.cells:
            linecache.cache[name] = (len(source), None, source.splitlines(True), name)
            try:
                exec(compile(source, name, "exec"), namespace)
            except Exception:
                if name == answer_cell(self.number):
                    raise  # a broken answer to another task is that task's affair
        missing = [name for name in names if name not in namespace]
        if missing:
            raise Wrong(f"the answer cell does not define {missing[0]}")
        return [namespace[name] for name in names]


def answer_cell(number):
    """The id of the answer cell of a task."""
    return f"answer-{number.replace('.', '-')}"


def draw(number, seed, hidden=False):
    """The inputs of a task for a seed."""
    return find(number).draw(random.Random(f"{seed} {number}"), hidden)


def examine(items, patience=PATIENCE_SECONDS):
    """Run all `items`; return for each its evidence, packed, or how it failed.

    Evidence is {"evidence": [of rank 0, of rank 1, …]}; a failure is {"failure": message for the learner}.
    """
    results, waiting = [], list(items)
    while waiting:
        with tempfile.TemporaryDirectory(prefix="ddp_course_") as folder:
            timeout = FIRST_ITEM_SECONDS + NEXT_ITEM_SECONDS * (len(waiting) - 1)
            try:
                launch(run_items, waiting, folder, patience, world_size=RANKS, device="cpu", timeout=timeout)
                failure = None
            except CourseError as error:
                failure = error
            done = read_evidence(folder)
        results += [{"evidence": evidence} for evidence in done[: len(waiting)]]
        waiting = waiting[len(done) :]
        if failure and waiting:
            results.append({"failure": explain(failure, find(waiting.pop(0).number))})
    return results


def read_evidence(folder):
    """What all ranks have written down, by item; items that some rank did not finish are left out."""
    by_rank = []
    for rank in range(RANKS):
        path = Path(folder) / f"rank{rank}"
        text = path.read_text() if path.exists() else ""
        by_rank.append([json.loads(line) for line in text.splitlines(True) if line.endswith("\n")])
    return [list(of_item) for of_item in zip(*by_rank)]  # noqa: B905 (the shortest counts)


def run_items(items, folder, patience):
    """One rank's part: run every item and write the evidence down, a line each."""
    global PATIENCE_SECONDS
    PATIENCE_SECONDS = patience
    torch.manual_seed(dist.get_rank())
    tasks = [find(item.number) for item in items]
    dist.barrier()  # nobody waits in an answer for a rank that is still loading
    with open(Path(folder) / f"rank{dist.get_rank()}", "w") as file:
        for task, item in zip(tasks, items, strict=True):
            evidence = run_item(task, item) if dist.get_rank() < task.ranks else None
            file.write(json.dumps(pack(evidence)) + "\n")
            file.flush()
            if task.ranks > 1:
                dist.barrier()


def run_item(task, item):
    """Load one answer and probe it, with the forbidden functions out of reach; notice what it replaced."""
    before = originals()
    with disarmed(task.forbidden):
        evidence = task.probe(*item.load(task.names), **item.inputs)
    replaced = restore(before)
    if replaced:
        raise Wrong(f"your code replaces {replaced[0]}; an answer leaves torch and the course as they are")
    return evidence


def worlds(*sizes):
    """Yield (size, group) for new groups of the first 2, 3, … ranks, to their members; all ranks must call it."""
    patience = timedelta(seconds=PATIENCE_SECONDS)
    groups = [dist.new_group(list(range(size)), timeout=patience) for size in sizes]
    for size, group in zip(sizes, groups, strict=True):
        if dist.get_rank() < size:
            yield size, group


def traffic_of(traffic):
    """What `wire.counting` counted on this rank, as plain data."""
    return {"bytes": traffic.bytes_sent, "messages": traffic.messages_sent, "received": traffic.bytes_received}


@contextmanager
def disarmed(names):
    """While the block runs, the functions with these dotted names raise Wrong, however they were imported."""
    kept = {}
    for name in names:
        function = function_named(name)
        message = f"your code calls {name.removeprefix('ddp_course.')}: write it yourself, with wire.send and wire.recv"
        namespace = {}
        raising = f"raise __import__('ddp_course.grading.tasks', fromlist=['Wrong']).Wrong({message!r})"
        exec(compile(f"def stop(*args, **kwargs): {raising}", "<task>", "exec"), namespace)
        kept[function] = function.__code__
        function.__code__ = namespace["stop"].__code__
    try:
        yield
    finally:
        for function, code in kept.items():
            function.__code__ = code


def function_named(name):
    """The innermost plain function behind a dotted name; of a class, its `__init__`."""
    module, _, attribute = name.rpartition(".")
    thing = getattr(import_module(module), attribute)
    return unwrap(thing.__init__ if isclass(thing) else thing)


def originals():
    """All functions and classes of the modules that an answer might be tempted to change, as (owner, name, value)."""
    ours = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "ddp_course" and module]
    owners = [builtins, dist, dist.distributed_c10d, torch.Tensor, torch.nn.Module, torch.nn.functional, *ours]
    return [(owner, name, value) for owner in owners for name, value in list(vars(owner).items()) if callable(value)]


def restore(before):
    """Put back what is no longer as it was; return the names of it."""
    replaced = []
    for owner, name, value in before:
        if vars(owner).get(name) is not value:
            replaced.append(f"{owner.__name__}.{name}")
            setattr(owner, name, value)
    return replaced


@dataclass(frozen=True)
class Verdict:
    """`right` only if all the task's judges said so, from evidence; a `message` for all else; `parts` by property."""

    right: bool
    message: str = ""
    parts: tuple = ()


def verdict(task, result, inputs):
    """The `Verdict` on one answer, from what `examine` brought back. Runs no code of the learner's."""
    try:
        if "evidence" not in result:
            raise Wrong(str(result.get("failure") or "the answer failed, and nothing says why"))
        evidence = [unpack(packed) for packed in result["evidence"]]
    except Exception as error:
        said = str(error) if isinstance(error, Wrong) else f"nothing that can be read came back: {str(error)[:300]}"
        return Verdict(False, said, tuple(Part(name, weight, said) for name, (weight, _) in task.parts.items()))
    odd = re.search(r"odd': '([^']*)", str(result))
    what = f"an object of type {odd[1]}" if odd else "something"
    parts = task.judged(evidence[0] if task.ranks == 1 else evidence, **inputs)
    parts = tuple(replace(part, message=part.message.replace(CANNOT, CANNOT.format(what))) for part in parts)
    wrong = [part.message for part in parts if part.message]
    return Verdict(not wrong, wrong[0] if wrong else "", parts)


def explain(error, task):
    """What became of a launch that failed, in words for the learner."""
    if isinstance(error, LaunchTimeout):
        return f"not finished in time: {task.hang if task.ranks > 1 else 'is there a loop that never ends?'}"
    if not isinstance(error, RankError):
        return f"the ranks could not be run: {error}"
    where = place(error.traceback)
    if error.type_name == "Wrong" and error.message:
        return error.message
    if error.type_name == "NotImplementedError":
        return f"not solved yet ({error.message})"
    if GAVE_UP.search(error.message):
        return f"the ranks wait for each other for ever{where}: {task.hang}"
    if error.type_name == "killed" and "SIGABRT" in error.message and task.ranks > 1:
        return "a message was longer than the tensor it was received into: do both sides mean the same chunk?"
    if "Pair is not connected" in error.message:
        return f"a rank sends to itself, or receives from itself{where}: the others are meant"
    if "modified by an inplace operation" in error.message:
        return f"weights changed between the forward and the backward pass{where}: step() comes after backward()"
    if error.type_name in ("killed", "exited", "ended"):
        return f"your code ended the process of rank {error.rank} ({error.type_name} {error.message})"
    return f"your code raised {error.type_name}: {error.message[:300]}{where}"


def place(traceback):
    """The last line of the learner's own in a traceback, in brackets."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s*(.*)', traceback)
    own = [(line, text) for file, line, text in frames if not NOT_OURS.search(file)]
    return f" (line {own[-1][0]} of your cell: {own[-1][1].strip()})" if own else ""


def examine_answers(order, answer):
    """The job of a sandbox: examine the answers of `order["items"]`, send the results as one line of JSON."""
    from .nbval_run import prepare_environment, warm_launcher

    prepare_environment(order["folder"])
    warm_launcher(close=[answer.fileno()])
    items = [
        Item(number, draw(number, order["seed"], order["hidden"]), cells=tuple(map(tuple, cells)))
        for number, cells in order["items"]
    ]
    answer.sendall(json.dumps({"results": examine(items)}).encode() + b"\n")
