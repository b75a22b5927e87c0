"""Exercise 11: checkpoints that survive, an exact resume, who was to blame, and other ranks.

The last task is a figure in words. A task's `draw`, `probe` and `read` are what
`ddp_exercises.tasks.Task` says.
"""

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

from ddp_exercises.diagnosis import kind_of, same
from ddp_exercises.errors import Wrong
from ddp_exercises.plain import ODD
from ddp_exercises.tasks import load_tasks, task

from .shared import (
    as_it_is,
    form_of_explanation,
    in_words,
    nothing,
    require,
    several,
    tensors,
)

EX1 = load_tasks(1)  # Exercise 1 makes the batches.
SYNCS = [name for name in ("fsync", "fdatasync") if hasattr(os, name)]  # macOS lacks fdatasync.


class Unwritable:
    """An object in the middle of a checkpoint that cannot be written, as if the disk were full."""

    def __reduce__(self):
        raise OSError(28, "No space left on device")


def content(path):
    """Return the bytes of a file as a tensor; None if there is no such file."""
    path = Path(path)
    return torch.tensor(list(path.read_bytes()), dtype=torch.uint8) if path.is_file() else None


def loaded(content):
    """Return what `torch.load` makes of the bytes of a file, or the name of its error."""
    if content is None:
        return "there is no such file"
    try:
        return torch.load(io.BytesIO(bytes(content.tolist())), weights_only=True)
    except Exception as error:
        return type(error).__name__


@contextmanager
def watching(path, namespace):
    """Note syncs, and each rename to `path`: what both files hold then, and where they are.

    They must be in the same folder. The function that is watched has its globals in `namespace`.
    """
    events = []
    watched = [str(path)]
    syncs = {name: getattr(os, name) for name in SYNCS}

    def synced(handle):
        events.append(("sync",))
        return syncs["fsync"](handle)

    def note_rename(event, arguments):
        if event == "os.rename" and os.path.abspath(arguments[1]) in watched:
            new, old = arguments[:2]
            same_folder = os.path.dirname(os.path.abspath(new)) == str(path.parent)
            events.append(("rename", content(new), content(old), same_folder))

    sys.addaudithook(note_rename)
    # A learner may write os.fsync, or fsync after `from os import fsync`.
    imported = {name: synced for name, value in namespace.items() if value in syncs.values()}
    in_os = mock.patch.multiple(os, **dict.fromkeys(syncs, synced))
    with in_os, mock.patch.dict(namespace, imported):
        yield events
    watched.clear()  # An audit hook cannot be removed, so it is silenced.


@task(
    "11.1",
    "save_checkpoint",
    {"saved": 1, "a full disk": 1, "in one step": 1},
    forbidden=(
        "ddp_course.checkpoint.save",
        "ddp_course.checkpoint.writing_to",
    ),
)
class SaveCheckpoint:
    """The old checkpoint or the new one, at any moment: written beside, synced, then renamed."""

    def draw(random):
        first = {"step": 1, "weights": tensors(random, 1, 30)[0]}
        second = {"step": 2, "weights": tensors(random, 1, 30)[0]}
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
        after_first, (after_second, files), events, (after_error, files_then, error) = returned
        yield "saved", "what torch.load finds", loaded(after_first)
        yield "saved", "what torch.load finds after a second one", loaded(after_second)
        yield "saved", "the files in the folder", sorted(files)
        full = "when the disk is full in the middle of writing"
        yield "a full disk", f"{full}, what torch.load finds", loaded(after_error)
        yield "a full disk", "the error", error
        yield "a full disk", f"{full}, the files in the folder", sorted(files_then)
        yield from one_step(events)


def one_step(events):
    """Yield evidence of the moment when the new checkpoint takes the old one's name."""
    kinds = [kind for kind, *_ in events]
    new = None
    old = None
    same_folder = None
    before_rename = []
    if "rename" in kinds:
        place = kinds.index("rename")
        _, new, old, same_folder = events[place]
        before_rename = kinds[:place]
    yield "in one step", "whether the finished file is put in place in one step", "rename" in kinds
    yield "in one step", "what the new file holds when it is put in place", loaded(new)
    yield "in one step", "what the old file holds until then", loaded(old)
    yield "in one step", "whether the temporary file lies beside the checkpoint", same_folder
    yield "in one step", "whether os.fsync is called", "sync" in kinds
    yield "in one step", "whether os.fsync comes before os.replace", "sync" in before_rename


def dropout_model(seed):
    """Return a net with dropout and buffers, and an optimizer with momentum."""
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
        yield "", "written", fault_of_writing(state)
        yield "", "captured", snapshot(model, optimizer)
        train(model, optimizer, batches[stop:])  # What was captured must not change by this.
        for number in (1, 2):
            again, fresh = dropout_model(seed + number)
            step = resume(state, again, fresh)
            yield "", f"resumed {number}", (step, *snapshot(again, fresh))
            train(again, fresh, batches[stop:])
            yield "", f"trained {number}", EX1.weights(again)

    def read(returned, seed, stop, batches):
        written, captured, first_state, first_weights, second_state, second_weights = returned
        yield "state", "what is captured, written to a file", written
        rest = batches[stop:]
        losses, *_ = continued(captured, rest)
        yield "twice", "the run that goes on after capture, its losses", losses
        yield from evidence_of_run(
            run="the resumed run",
            part_of_start="state",
            part_of_end="goes on exactly",
            state=first_state,
            trained=first_weights,
            batches=rest,
        )
        yield from evidence_of_run(
            run="the second run from the same checkpoint",
            part_of_start="twice",
            part_of_end="twice",
            state=second_state,
            trained=second_weights,
            batches=rest,
        )


def fault_of_writing(state):
    """Return in words that `torch.load` does not read what is captured and saved; "" if it does."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        return (
            f"torch.load(…, weights_only=True) does not read it ({type(error).__name__}): a checkpoint has"
            " states, the state_dict() of a model and not the model"
        )
    return ""


def evidence_of_run(run, part_of_start, part_of_end, state, trained, batches):
    """Yield evidence of a run that was resumed: the state in which it begins, and its losses.

    When it is `trained`, its weights are evidence too.
    """
    step, *states = state
    _, optimizer, _ = states
    entries = len(optimizer["state"])
    losses, weights, buffers = continued(states, batches)
    yield part_of_start, f"{run}, its weights at the start", weights
    yield part_of_start, f"{run}, its buffers", buffers
    yield part_of_start, f"{run}, the number of the next step", step
    yield part_of_start, f"{run}, entries in the optimizer's state", entries
    yield part_of_end, f"{run}, its losses", losses
    yield part_of_end, f"{run}, its weights at the end", trained


def snapshot(model, optimizer):
    """Return all that the next steps depend on: states of the model, the optimizer and chance."""
    of_model = copy.deepcopy(dict(model.state_dict()))
    of_optimizer = copy.deepcopy(dict(optimizer.state_dict()))
    return of_model, of_optimizer, torch.get_rng_state()


def continued(states, batches):
    """Return the losses of a run that begins with the states of a snapshot, and how it begins.

    It begins with its weights and its buffers. The states serve once: the optimizer goes on with
    their tensors themselves.
    """
    of_model, of_optimizer, of_chance = states
    with torch.random.fork_rng(devices=[]):
        model, optimizer = dropout_model(0)
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
        torch.set_rng_state(of_chance)
        weights = EX1.weights(model)
        buffers = torch.cat([buffer.double().reshape(-1) for buffer in model.buffers()])
        return train(model, optimizer, batches), weights, buffers


ROOTS = (
    "ValueError: shapes (3, 4) and (5,) do not match",
    "MemoryError: out of memory",
    "KeyError: 'labels'",
    "killed by SIGKILL",
)
CONSEQUENCES = (
    "RuntimeError: Connection closed by peer",
    "RuntimeError: Connection reset by peer",
    "DistBackendError: Broken pipe",
)
# A row is (culprit, ranks, whether the culprit's line is the last one).
CULPRITS = (
    (2, 4, True),
    (1, 3, False),
    (5, 12, True),
    (11, 12, False),
    (1, 6, True),
)


def log_of(random, culprit, ranks, is_last, earlier=CONSEQUENCES[0], start=None):
    """Return the lines in the order in which they reached the log, which is not the order in time.

    The consequence `earlier` has an earlier time than the culprit's failure; the others come later,
    and last of all another rank fails for a reason of its own.
    """
    start = random.uniform(10, 90) if start is None else start
    steps = []
    for rank in range(ranks):
        seconds = start + random.uniform(0, 1)
        steps.append(f"{seconds:.3f} rank {rank}: step {random.randrange(9)} done")
    others = random.sample([rank for rank in range(ranks) if rank != culprit], ranks - 1)
    failed = start + 2 + random.uniform(0, 0.49)
    line_of_culprit = f"{failed:.3f} rank {culprit}: {random.choice(ROOTS)}"
    errors = [f"{failed - 0.001:.3f} rank {others[0]}: {earlier}"]
    for number, rank in enumerate(others[1:], 1):
        seconds = failed + 0.01 * number
        errors.append(f"{seconds:.3f} rank {rank}: {random.choice(CONSEQUENCES)}")
    errors.append(f"{failed + 0.5:.3f} rank {others[-1]}: {random.choice(ROOTS)}")
    random.shuffle(errors)
    errors.insert(len(errors) if is_last else 0, line_of_culprit)
    return random.sample(steps, ranks) + errors


def time_of(line):
    """Return the seconds with which a line of a log begins."""
    return float(line.split()[0])


@task("11.3", "culprit", {"no consequence": 1, "by the time": 1})
class Culprit:
    """The rank whose failure came first, and was not a consequence."""

    def draw(random):
        closed, reset, broken = CONSEQUENCES
        logs = [
            log_of(random, culprit=3, ranks=5, is_last=True, earlier=closed),
            log_of(random, culprit=10, ranks=12, is_last=False, earlier=reset),
            log_of(random, culprit=4, ranks=7, is_last=False, earlier=broken),
        ]
        for number, log in enumerate(logs, 1):
            case = f"log {number} in the order of time, {len(log)} lines, the culprit"
            yield "no consequence", case, (sorted(log, key=time_of),)
        logs = [log_of(random, *row) for row in CULPRITS]
        # From this start the times pass 100: as texts, they are in another order.
        logs.append(log_of(random, culprit=3, ranks=5, is_last=True, start=97.505))
        for number, log in enumerate(logs, 1):
            lines = [line for line in log if not line.endswith(CONSEQUENCES)]
            case = f"log {number} without broken connections, {len(lines)} lines, the culprit"
            yield "by the time", case, (lines,)


def small_net(seed):
    """Return a net and an optimizer with momentum."""
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
    """A run in two or three parts is the same as one in one, but for a fault in line 10.

    It begins the rate's schedule anew.
    """

    def draw(random):
        stops = [random.randrange(4, 6), 7, 10]
        return {
            "seed": random.randrange(10**6),
            "batches": EX1.batches_of(random, count=10, size=6),
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
            weights = [parameter.detach().clone() for parameter in model.parameters()]
            if stop < len(batches):
                train(model, optimizer, batches[:1])  # `state` must not change by this.
        yield "", "parts", parts
        yield "", "end", weights

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
            yield patient, f"{patient}, the rank", fault_of_rank(rank, culprit)
            yield patient, f"{patient}, the line", fault_of_line(line, number, pieces)
            yield patient, f"{patient}, the kind", fault_of_kind(kind, number)


def fault_of_rank(rank, culprit):
    """Return in words that a rank is not the culprit (None stands for all ranks); "" if it is."""
    if rank == culprit:
        return ""
    if rank is None:
        return "not all of them"
    if type(rank) is not int:
        return f"a rank is a number, or None for all ranks, not {rank!r:.30}"
    if rank > 3:
        return f"not rank {rank}: there are at most four; the order is (rank, line, kind)"
    return f"not rank {rank}"


def fault_of_line(line, number, pieces):
    """Return in words that a line of a patient has none of the `pieces` at fault; else ""."""
    lines = (CLINIC / f"patient_{number:02}.py").read_text(encoding="utf-8").splitlines()
    text = "no line"
    if type(line) is int and 0 < line <= len(lines):
        text = lines[line - 1].strip()
    if any(piece in text for piece in pieces):
        return ""
    return f"not line {line}: {text}"


def fault_of_kind(kind, number):
    """Return in words that a patient's fault is of another kind; "" if it is of this one."""
    if kind == KINDS[number - 1]:
        return ""
    if kind in KINDS:
        return f'not "{kind}"'
    return f"{str(kind)[:30]!r} is none of {', '.join(KINDS)}"


JOIN_FAULTS = {
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
                state = {"step": step}
                for name, whole in wholes.items():
                    state[name] = whole.tensor_split(before)[rank].clone()
                saved.append(state)
            about = f"saved on {before} ranks, loaded on {after}"
            faults = {words: f"{about}: {cause}" for words, cause in JOIN_FAULTS.items()}
            for rank in range(after):
                try:
                    with in_words(faults):
                        state = reshard(saved, rank, after)
                except IndexError as error:
                    raise Wrong(
                        f"{about}, rank {rank}: {error}: `saved` has {before} parts; `split` takes the"
                        " length of a piece, and `chunk` may make fewer pieces than asked for: put all"
                        f" parts end to end, then cut for {after} ranks, whatever both numbers are"
                    ) from error
                yield "", f"{before} {after} {rank}", (state, memory_behind(state))

    def read(returned, wholes, step, changes):
        states = iter(returned)  # They come in the order in which the probe goes through `changes`.
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
                for name, whole in wholes.items():
                    if name not in state:
                        continue
                    chunk = state[name]
                    require(
                        isinstance(chunk, torch.Tensor),
                        f"{case}, {name}: a tensor was expected, not {kind_of(chunk)}",
                    )
                    length = len(whole.tensor_split(after)[rank])
                    require(
                        not is_old_part(chunk, whole, before) or length in (0, 1, 2, len(chunk)),
                        f"{case}, {name}: that is a part that was saved; the chunks have other borders"
                        f" now: put all parts end to end, then cut for {after} ranks, here {length}"
                        " elements",
                    )
                    yield part, f"{case}, {name}", chunk
                    extra += 4 * (len(memory[name]) - len(chunk))
                yield part, f"{case}, the step", state.get("step")
            yield "memory", f"{about}, bytes kept beyond the parts themselves", extra


def is_old_part(chunk, whole, before):
    """Return whether a tensor is one of the parts into which `before` ranks had cut the whole."""
    return any(same(chunk, part) for part in whole.tensor_split(before))


def memory_behind(state):
    """Return {name: all of the memory that a tensor keeps alive, as a tensor}."""
    wholes = {}
    if not isinstance(state, dict):
        return wholes
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            wholes[name] = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return wholes


@task("11.7", "explain_figure", {"text": 1, "ticks": 1})
class ExplainFigure:
    """A figure in the learner's own words, and which points the learner ticks; a teacher reads it."""

    draw = nothing
    probe = as_it_is
    read = form_of_explanation
