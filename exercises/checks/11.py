"""Exercise 11: checkpoints that survive, a resume that is exact, who was to blame, other ranks."""

import copy
import io
import os
import sys
import tempfile
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ddp_course.checking.diagnosis import kind_of, same
from ddp_course.checking.plain import ODD
from ddp_course.checking.tasks import load_tasks, task
from ddp_course.errors import Wrong

from .shared import in_words, require, several, tensors

EX1 = load_tasks(1)  # Exercise 1 makes the batches.


SYNCS = [name for name in ("fsync", "fdatasync") if hasattr(os, name)]


class Unwritable:
    """An object in the middle of a checkpoint that cannot be written, as if the disk were full."""

    def __reduce__(self):
        raise OSError(28, "No space left on device")


def content(path):
    """The bytes of a file as a tensor; None if there is no such file."""
    path = Path(path)
    return torch.tensor(list(path.read_bytes()), dtype=torch.uint8) if path.is_file() else None


def loaded(content):
    """What `torch.load` makes of the bytes of a file, or the name of the error that it raises."""
    if content is None:
        return "there is no such file"
    try:
        return torch.load(io.BytesIO(bytes(content.tolist())), weights_only=True)
    except Exception as error:
        return type(error).__name__


@contextmanager
def watching(path, names):
    """Note syncs, and each rename to `path`: what both files hold then, and whether they are in the
    same folder.
    """
    events = []
    watched = [str(path)]
    syncs = {name: getattr(os, name) for name in SYNCS}

    def synced(handle):
        events.append(("sync",))
        return syncs["fsync"](handle)

    def renamed(event, values):
        if event == "os.rename" and os.path.abspath(values[1]) in watched:
            beside = os.path.dirname(os.path.abspath(values[0])) == str(path.parent)
            events.append(("rename", content(values[0]), content(path), beside))

    sys.addaudithook(renamed)
    own = {name: synced for name, value in names.items() if value in syncs.values()}
    with mock.patch.multiple(os, **dict.fromkeys(syncs, synced)), mock.patch.dict(names, own):
        yield events
    watched.clear()  # An audit hook cannot be removed, so it is silenced.


@task("11.1", "save_checkpoint", {"saved": 1, "a full disk": 1, "in one step": 1})
class SaveCheckpoint:
    """The old checkpoint or the new one, at any moment: written beside, synced, then put in
    place.
    """

    def draw(random):
        first, second = ({"step": step, "weights": tensors(random, 1, 30)[0]} for step in (1, 2))
        return {"first": first, "second": second}

    def probe(save_checkpoint, first, second):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "checkpoint.pt"
            save_checkpoint(first, path)
            yield "", "first", content(path)
            with watching(path, save_checkpoint.__globals__) as events:
                save_checkpoint(second, path)
            yield "", "second", (content(path), os.listdir(folder))
            yield "", "events", events
            try:
                save_checkpoint({**first, "rest": [Unwritable()]}, path)
                error = "hidden"
            except OSError:
                error = "let out"
            yield "", "full", (content(path), os.listdir(folder), error)

    def read(returned, first, second):
        saved, (again, files), events, (left, files_left, error) = returned
        yield "saved", "what torch.load finds", loaded(saved)
        yield "saved", "what torch.load finds after a second one", loaded(again)
        yield "saved", "the files in the folder", sorted(files)
        full = "when the disk is full in the middle of writing"
        yield "a full disk", f"{full}, what torch.load finds", loaded(left)
        yield "a full disk", "the error", error
        yield "a full disk", f"{full}, the files in the folder", sorted(files_left)
        yield from one_step(events)


def one_step(events):
    """What holds at the moment when the new checkpoint takes the old one's name."""
    kinds = [event[0] for event in events]
    renames = [event for event in events if event[0] == "rename"]
    _, new, old, beside = renames[0] if renames else ("", None, None, None)
    before = kinds[: kinds.index("rename")] if "rename" in kinds else []
    yield "in one step", "the finished file is put in place in one step", "rename" in kinds
    yield "in one step", "what the new file holds when it is put in place", loaded(new)
    yield "in one step", "what the old file holds until then", loaded(old)
    yield "in one step", "the temporary file lies beside the checkpoint", beside
    yield "in one step", "os.fsync is called", "sync" in kinds
    yield "in one step", "os.fsync comes before os.replace", "sync" in before


def dropout_model(seed):
    """A net with dropout and buffers, and an optimizer with momentum."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3)
    ).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, batches):
    """Train on all `batches`; return the loss of each step."""
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@task("11.2", ("capture", "resume"), {"state": 1, "goes on exactly": 1, "twice": 1}, bound=1e-9)
class ExactResume:
    """A run that stops and starts again is the same as one that does not stop."""

    def draw(random):
        seed = random.randrange(10**6)
        stop = random.randrange(3, 6)
        return {"seed": seed, "stop": stop, "batches": EX1.batches_of(random, 8, 6)}

    def probe(capture, resume, seed, stop, batches):
        model, optimizer = dropout_model(seed)
        train(model, optimizer, batches[:stop])
        state = capture(model, optimizer, stop)
        yield "", "captured", snapshot(model, optimizer)
        train(model, optimizer, batches[stop:])  # What was captured must not change by this.
        for number in (1, 2):
            again, fresh = dropout_model(seed + number)
            step = resume(state, again, fresh)
            yield "", f"resumed {number}", (step, *snapshot(again, fresh))
            train(again, fresh, batches[stop:])
            yield "", f"trained {number}", EX1.weights(again)

    def read(returned, seed, stop, batches):
        captured, *resumed = returned
        on = "the run that goes on after capture, its losses"
        yield "twice", on, goes_on(captured, batches[stop:])[0]
        names = ("the resumed run", "the second run from the same checkpoint")
        parts = (("state", "goes on exactly"), ("twice", "twice"))
        for name, (part, later), run in zip(names, parts, (resumed[:2], resumed[2:]), strict=True):
            (step, model, optimizer, chance), trained = run
            losses, weights, buffers = goes_on((model, optimizer, chance), batches[stop:])
            yield part, f"{name}, its weights at the start", weights
            yield part, f"{name}, its buffers", buffers
            yield part, f"{name}, the number of the next step", step
            yield part, f"{name}, entries in the optimizer's state", len(optimizer["state"])
            yield later, f"{name}, its losses", losses
            yield later, f"{name}, its weights at the end", trained


def snapshot(model, optimizer):
    """All that the next steps depend on: states of the model, the optimizer and chance."""
    states = [dict(thing.state_dict()) for thing in (model, optimizer)]
    return (*copy.deepcopy(states), torch.get_rng_state())


def goes_on(states, batches):
    """The losses of a run that begins with the states of a snapshot; its weights and its buffers at
    the start.
    """
    with torch.random.fork_rng(devices=[]):
        model, optimizer = dropout_model(0)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        torch.set_rng_state(states[2])
        weights = EX1.weights(model)
        buffers = torch.cat([buffer.double().reshape(-1) for buffer in model.buffers()])
        return train(model, optimizer, batches), weights, buffers


ROOTS = (
    "ValueError: shapes (3, 4) and (5,) do not match",
    "MemoryError: out of memory",
    "KeyError: 'labels'",
    "killed by SIGKILL",
)
AFTER = (
    "RuntimeError: Connection closed by peer",
    "RuntimeError: Connection reset by peer",
    "DistBackendError: Broken pipe",
)
CONSEQUENCES = ((3, 5, 1, AFTER[0]), (10, 12, 0, AFTER[1]), (4, 7, 0, AFTER[2]))
# A row is (culprit, ranks, 1 if its line is last).
LATE = (
    (2, 4, 1),
    (1, 3, 0),
    (5, 12, 1),
    (11, 12, 0),
    (1, 6, 1),
)


def log_of(random, culprit, size, late, after=AFTER[0], start=None):
    """Lines in the order in which they reached the log, which is not the order in time; `after` has
    an earlier time.
    """
    start = random.uniform(10, 90) if start is None else start
    lines = [
        f"{start + random.uniform(0, 1):.3f} rank {rank}: step {random.randrange(9)} done"
        for rank in range(size)
    ]
    ranks = random.sample([rank for rank in range(size) if rank != culprit], size - 1)
    failed = start + 2 + random.uniform(0, 0.49)
    early = f"{failed - 0.001:.3f} rank {ranks[0]}: {after}"
    errors = [f"{failed:.3f} rank {culprit}: {random.choice(ROOTS)}", early]
    errors += [
        f"{failed + 0.01 * (n + 1):.3f} rank {rank}: {random.choice(AFTER)}"
        for n, rank in enumerate(ranks[1:])
    ]
    errors.append(f"{failed + 0.5:.3f} rank {ranks[-1]}: {random.choice(ROOTS)}")
    rest = errors[1:]
    random.shuffle(rest)
    rest.insert(len(rest) if late else 0, errors[0])
    return random.sample(lines, size) + rest


@task("11.3", "culprit", {"no consequence": 1, "by the time": 1})
class Culprit:
    """The rank whose failure came first, and was not a consequence."""

    def draw(random):
        for number, settings in enumerate(CONSEQUENCES, 1):
            log = sorted(log_of(random, *settings), key=lambda line: float(line.split()[0]))
            yield (
                "no consequence",
                f"log {number} in the order of time, {len(log)} lines, the culprit",
                (log,),
            )
        logs = [log_of(random, *settings) for settings in LATE]
        logs.append(log_of(random, 3, 5, 1, start=97.505))
        for number, log in enumerate(logs, 1):
            log = [line for line in log if not line.endswith(AFTER)]
            yield (
                "by the time",
                f"log {number} without broken connections, {len(log)} lines, the culprit",
                (log,),
            )


def small_net(seed):
    """A net and an optimizer with momentum."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8)


@task(
    "11.4",
    ("the_bug", "mended_run"),
    {"the line": 1, "mended": 1},
    secret=("the line",),
    bound=1e-9,
)
class FindTheBugInTheRun:
    """A run in two or three parts is the same as one in one: line 10 begins the rate's schedule
    anew.
    """

    def draw(random):
        stops = [random.randrange(4, 6), 7, 10]
        return {
            "seed": random.randrange(10**6),
            "batches": EX1.batches_of(random, 10, 6),
            "peak": 0.5,
            "stops": stops,
        }

    def probe(the_bug, mended_run, seed, batches, peak, stops):
        yield "", "line", the_bug()
        whole, _ = mended_run(*small_net(seed), list(batches), peak, None, len(batches))
        yield "", "whole", list(whole)
        state = None
        parts = []
        for number, stop in enumerate(stops):
            model, optimizer = small_net(seed + number)
            losses, state = mended_run(model, optimizer, list(batches), peak, state, stop)
            parts.append(list(losses))
            kept = [parameter.detach().clone() for parameter in model.parameters()]
            if stop < len(batches):
                train(model, optimizer, batches[:1])  # What was left must not change by this.
        yield "", "parts", parts
        yield "", "end", kept

    def read(returned, seed, batches, peak, stops):
        line, whole, parts, end = returned
        yield "the line", "the faulty line", line
        about = f"stopped after {', '.join(map(str, stops[:-1]))} of {len(batches)} steps"
        yield "mended", "the losses of a run that is never stopped", whole
        yield "mended", f"{about}, how many losses the parts have", [len(part) for part in parts]
        yield "mended", f"{about}, the losses", list(chain.from_iterable(parts))
        weights = torch.cat([parameter.reshape(-1) for parameter in end])
        yield "mended", f"{about}, the weights at the end", weights


CLINIC = Path(__file__).resolve().parents[1] / "clinic"
KINDS = (
    "skips",
    "order",
    "shape",
    "alone",
    "uneven",
    "straggler",
    "NaN",
    "same GPU",
    "port",
    "loads alone",
    "ready twice",
)
CAUSES = {  # Each patient has a rank, or None for all, and a piece of each line that may be named.
    1: (2, ("if most < 8", "all_reduce(most")),
    2: (1, ("if rank != 1", "all_reduce(totals")),
    3: (2, ("range(rank, 1436, 3)", "all_gather(")),
    4: (0, ("if rank == 0:", "parallel(digits", "all_reduce(right")),
    5: (2, ("40 * (rank == 2)",)),
    6: (2, ("400 if rank == 2",)),
    7: (0, ("inputs.amax(", "digits.inputs[1000] = 0.0")),
    8: (1, ("rank // 2",)),
    9: (0, ("TCPStore(", "HTTPServer((")),
    10: (0, ("if rank == 0 and", "load_state_dict(")),
    11: (None, ("use_reentrant=True", "find_unused_parameters=True")),
}


@task("11.5", "diagnoses", {f"patient {number}": 0.5 for number in CAUSES})
class Clinic:
    """Rank, line and kind of eleven faults."""

    def draw(random):
        return {}

    def probe(diagnoses):
        yield "", "all", diagnoses()

    def read(returned):
        (named,) = returned
        require(isinstance(named, dict), "a dictionary was expected: {number: (rank, line, kind)}")
        require(0 not in named, "patients are numbered from 1 to 11, as their files are")
        for number, (culprit, pieces) in CAUSES.items():
            patient = f"patient {number}"
            diagnosis = named.get(number)
            if diagnosis is None:
                yield patient, f"{patient}, the rank", "nothing is said"
                continue
            three = f"{patient}: a row of three was expected: (rank, line, kind)"
            rank, line, kind = several(diagnosis, 3, three)
            lines = (CLINIC / f"patient_{number:02}.py").read_text(encoding="utf-8").splitlines()
            text = (
                lines[line - 1].strip()
                if type(line) is int and 0 < line <= len(lines)
                else "no line"
            )
            at_fault = any(piece in text for piece in pieces)
            wrong_kind = (
                f'not "{kind}"'
                if kind in KINDS
                else f"{str(kind)[:30]!r} is none of {', '.join(KINDS)}"
            )
            wrong_rank = "not all of them" if rank is None else f"not rank {rank}"
            if rank is not None and type(rank) is not int:
                wrong_rank = f"a rank is a number, or None for all ranks, not {rank!r:.30}"
            elif rank is not None and rank > 3:
                wrong_rank += ": there are at most four; the order is (rank, line, kind)"
            of_rank = "" if rank == culprit else wrong_rank
            of_line = "" if at_fault else f"not line {line}: {text}"
            of_kind = "" if kind == KINDS[number - 1] else wrong_kind
            yield patient, f"{patient}, the rank", of_rank
            yield patient, f"{patient}, the line", of_line
            yield patient, f"{patient}, the kind", of_kind


JOINED = {
    "expected Tensor": "torch.cat joins tensors, and the number of the step is none: it stays as it is",
    "split_size": "`split` takes the length of a piece, and with fewer elements than ranks yours is 0:"
    " `tensor_split` takes the number of pieces",
    "non-empty list": "no old part is left for a new rank: put all parts end to end, then cut",
}


@task("11.6", "reshard", {"fewer ranks": 1, "more ranks": 1, "memory": 1}, bound=0)
class Reshard:
    """Chunks of all old ranks end to end, cut anew for the new ones."""

    def draw(random):
        lengths = {"weights": 21, "momentum": 21, "bias": 3}
        wholes = {name: tensors(random, 1, n)[0] for name, n in lengths.items()}
        changes = [(4, 2), (3, 2), (4, 1), (2, 3), (2, 5)]
        return {"wholes": wholes, "step": random.randrange(1, 99), "changes": changes}

    def probe(reshard, wholes, step, changes):
        for before, after in changes:
            saved = []
            for rank in range(before):
                part = {name: w.tensor_split(before)[rank].clone() for name, w in wholes.items()}
                saved.append({"step": step, **part})
            about = f"saved on {before} ranks, loaded on {after}"
            for rank in range(after):
                try:
                    with in_words({words: f"{about}: {cause}" for words, cause in JOINED.items()}):
                        state = reshard(saved, rank, after)
                except IndexError as error:
                    raise Wrong(
                        f"{about}, rank {rank}: {error}: `saved` has {before} parts; `split` takes the"
                        " length of a piece, and `chunk` may make fewer pieces than asked for: put all"
                        f" parts end to end, then cut for {after} ranks, whatever both numbers are"
                    ) from error
                yield "", f"{before} {after} {rank}", (state, memory_behind(state))

    def read(returned, wholes, step, changes):
        states = iter(returned)
        for before, after in changes:
            about = f"saved on {before} ranks, loaded on {after}"
            part = "fewer ranks" if after < before else "more ranks"
            extra = 0
            for rank in range(after):
                state, memory = next(states)
                is_dict = isinstance(state, dict) and ODD not in state
                require(is_dict, f"{about}: a dict was expected, not {kind_of(state)}")
                case = f"{about}, rank {rank}"
                yield part, f"{case}, the names", sorted(state)
                for name in (name for name in wholes if name in state):
                    require(
                        isinstance(state[name], torch.Tensor),
                        f"{case}, {name}: a tensor was expected, not {kind_of(state[name])}",
                    )
                    old = wholes[name].tensor_split(before)
                    new = len(wholes[name].tensor_split(after)[rank])
                    was_there = any(same(state[name], piece) for piece in old)
                    require(
                        not was_there or new <= 2 or new == len(state[name]),
                        f"{case}, {name}: that is a part that was saved; the chunks have other borders"
                        f" now: put all parts end to end, then cut for {after} ranks, here {new}"
                        " elements",
                    )
                    yield part, f"{case}, {name}", state[name]
                    extra += 4 * (len(memory[name]) - len(state[name]))
                yield part, f"{case}, the step", state.get("step")
            yield "memory", f"{about}, bytes kept beyond the parts themselves", extra


def memory_behind(state):
    """{name: all of the memory that a tensor keeps alive, as a tensor}."""
    wholes = {}
    if not isinstance(state, dict):
        return wholes
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            wholes[name] = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return wholes
