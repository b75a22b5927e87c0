"""Exercise 11: checkpoints that survive, a resume that is exact, and who was to blame."""

import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ddp_course.grading.attempt import tensors
from ddp_course.grading.checks import load_tasks, require, task

EX1 = load_tasks(1)  # exercise 1 makes the batches


class Unwritable:
    """Something in the middle of a checkpoint that cannot be written: the disk is full."""

    def __reduce__(self):
        raise OSError(28, "No space left on device")


def step_in(path):
    """Which step's checkpoint `torch.load` finds whole, or how it fails."""
    try:
        state = torch.load(path, weights_only=False)
        return state["step"] if len(state["weights"]) == 30 else "a part of a checkpoint"
    except Exception as error:
        return type(error).__name__


@task("11.1", "save_checkpoint", {"saved": 1, "a full disk": 1, "in one step": 1})
class SaveCheckpoint:
    """The old checkpoint or the new one, at any moment: written beside, synced, then put in place."""

    def draw(random, hidden):
        first, second = ({"step": step, "weights": tensors(random, 1, 30)[0]} for step in (1, 2))
        return {"first": first, "second": second}

    def probe(save_checkpoint, first, second):
        """What the file holds at each moment, the order of sync and replace, and what a full disk does."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "checkpoint.pt"
            save_checkpoint(first, path)
            saved = {"what torch.load finds": loaded(path)}
            with watching(path, save_checkpoint.__globals__) as events:
                save_checkpoint(second, path)
            saved["what torch.load finds after a second one"] = loaded(path)
            saved["the files in the folder"] = sorted(os.listdir(folder))
            full = {
                "when the disk is full in the middle of writing, the step that is found": None,
                "the error": "hidden",
            }
            try:
                save_checkpoint({**first, "rest": [Unwritable()]}, path)
            except OSError:
                full["the error"] = "let out"
            full["when the disk is full in the middle of writing, the step that is found"] = step_in(path)
            full["the files in the folder when writing fails"] = sorted(os.listdir(folder))
        return {"saved": saved, "a full disk": full, "in one step": one_step(events)}


def loaded(path):
    """What `torch.load` finds; how it fails, if it does."""
    try:
        return torch.load(path, weights_only=False)
    except Exception as error:
        return type(error).__name__


class watching:
    """Notes syncs, and each time a file takes another's name: what both hold then, and whether it lay beside."""

    def __init__(self, path, names):
        self.path, self.names, self.events = path, names, []

    def __enter__(self):
        self.real = {name: getattr(os, name) for name in ("fsync", "fdatasync") if hasattr(os, name)}
        self.own = {name: value for name, value in self.names.items() if value in self.real.values()}
        for name, sync in self.real.items():
            setattr(os, name, lambda handle, sync=sync: (self.events.append(("sync",)), sync(handle))[1])
        self.names.update(dict.fromkeys(self.own, os.fsync))
        sys.addaudithook(lambda event, values: self.renamed(*values[:2]) if event == "os.rename" else None)
        return self.events

    def renamed(self, source, target):
        """An audit hook stays for good, so it looks away when the watch is over."""
        if self.path and os.path.abspath(target) == str(self.path):
            beside = os.path.dirname(os.path.abspath(source)) == str(self.path.parent)
            self.events.append(("rename", step_in(source), step_in(self.path), beside))

    def __exit__(self, *_):
        self.path = None
        for name, sync in self.real.items():
            setattr(os, name, sync)
        self.names.update(self.own)


def one_step(events):
    """What holds at the moment when the new checkpoint takes the old one's name."""
    kinds = [event[0] for event in events]
    renames = [event for event in events if event[0] == "rename"]
    _, new, old, beside = renames[0] if renames else ("", None, None, None)
    return {
        "the finished file is put in place in one step": bool(renames),
        "the step in the new file when it is put in place": new,
        "the step in the old file until then": old,
        "the temporary file lies beside the checkpoint": beside,
        "os.fsync is called": "sync" in kinds,
        "os.fsync comes before os.replace": bool(renames) and "sync" in kinds[: kinds.index("rename")],
    }


def dropout_model(seed):
    """A net with dropout and buffers, and an optimizer with momentum."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, batches):
    """Some steps; the loss of each."""
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
    """Stop, start again, and nobody can tell."""

    def draw(random, hidden):
        return {
            "seed": random.randrange(10**6),
            "batches": EX1.batches_of(random, 8, 6),
            "stop": random.randrange(3, 6),
        }

    def probe(capture, resume, seed, batches, stop):
        """The original run to its end, and two runs resumed from what was captured."""
        model, optimizer = dropout_model(seed)
        train(model, optimizer, batches[:stop])
        state = capture(model, optimizer, stop)
        untouched = {"the run that goes on after capture, its losses": train(model, optimizer, batches[stop:])}
        runs = []
        for attempt, name in enumerate(("the resumed run", "the second run from the same checkpoint")):
            again, fresh = dropout_model(seed + 1 + attempt)
            step = resume(state, again, fresh)
            buffers = torch.cat([buffer.double().reshape(-1) for buffer in again.buffers()])
            begin = {f"{name}, its weights at the start": EX1.weights(again), f"{name}, its buffers": buffers,
                     f"{name}, the number of the next step": step,
                     f"{name}, entries in the optimizer's state": len(fresh.state)}  # fmt: skip
            runs.append((begin, {f"{name}, its losses": train(again, fresh, batches[stop:])}))
        (begin, losses), (begin_again, losses_again) = runs
        return {"state": begin, "goes on exactly": losses, "twice": untouched | begin_again | losses_again}


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
LATE = ((2, 4, 1), (11, 12, 1), (1, 6, 1))  # culprit, ranks, and that its line comes last


def log_of(random, culprit, size, late, after=AFTER[0], start=None):
    """Lines in the order in which they reached the log, which is not the order in time; `after` comes too early."""
    start = random.uniform(10, 90) if start is None else start
    lines = [f"{start + random.uniform(0, 1):.3f} rank {rank}: step {random.randrange(9)} done" for rank in range(size)]
    ranks = random.sample([rank for rank in range(size) if rank != culprit], size - 1)
    failed = start + 2 + random.uniform(0, 0.49)
    early = f"{failed - 0.001:.3f} rank {ranks[0]}: {after}"
    errors = [f"{failed:.3f} rank {culprit}: {random.choice(ROOTS)}", early]
    errors += [f"{failed + 0.01 * (n + 1):.3f} rank {rank}: {random.choice(AFTER)}" for n, rank in enumerate(ranks[1:])]
    errors.append(f"{failed + 0.5:.3f} rank {ranks[-1]}: {random.choice(ROOTS)}")
    rest = errors[1:]
    random.shuffle(rest)
    rest.insert(len(rest) if late else 0, errors[0])
    return random.sample(lines, size) + rest


@task("11.3", "culprit", {"no consequence": 1, "by the time": 1})
class Culprit:
    """The rank whose failure came first, and was not a consequence."""

    def draw(random, hidden):
        shuffled = [log_of(random, *of) for of in ((2, 4, 1), (1, 3, 0), (5, 12, 1), (11, 12, 0), (1, 6, 1))]
        shuffled += [log_of(random, 3, 5, 1, start=97.505)] * hidden
        in_order = [(3, 5, 1, AFTER[0]), (10, 12, 0, AFTER[1]), (4, 7, 0, AFTER[2])]
        in_order = [sorted(log_of(random, *of), key=seconds_of) for of in in_order]
        causes = [[line for line in log_of(random, *of) if not any(sign in line for sign in AFTER)] for of in LATE]
        return {"shuffled": shuffled, "in_order": in_order, "causes": causes}

    def probe(culprit, shuffled, in_order, causes):
        """The rank that is blamed in each log. Who falls for consequences is asked for the time without them."""
        kinds = {"in the order of time": in_order, "without broken connections": causes, "shuffled": shuffled}
        blamed = {kind: [culprit(list(log)) for log in logs] for kind, logs in kinds.items()}
        if blamed["in the order of time"] != [true_culprit(log) for log in in_order]:
            blamed["shuffled"] = [true_culprit(log) for log in shuffled]
        rows = {kind: {f"log {n} {kind}, {len(log)} lines, the culprit": rank for n, (log, rank) in
                       enumerate(zip(kinds[kind], ranks, strict=True), 1)} for kind, ranks in blamed.items()}  # fmt: skip
        in_time = rows.pop("in the order of time")
        return {"no consequence": in_time, "by the time": rows["without broken connections"] | rows["shuffled"]}


def seconds_of(line):
    """The time that a line of a log begins with."""
    return float(line.split()[0])


def true_culprit(log):
    """The rank whose failure came first, and was not a consequence."""
    causes = [line for line in log if not line.endswith("done") and not any(after in line for after in AFTER)]
    return int(min(causes, key=seconds_of).split()[2].rstrip(":"))


def small_net(seed):
    """A net and an optimizer with momentum."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8)


@task("11.4", ("the_bug", "mended_run"), {"the line": 1, "mended": 1}, bound=1e-9)
class FindTheBugInTheRun:
    """A run in two or three parts is the same as one in one: line 10 begins the rate's schedule anew."""

    def draw(random, hidden):
        stops = [random.randrange(4, 6), *([7] if hidden else []), 10]
        return {"seed": random.randrange(10**6), "batches": EX1.batches_of(random, 10, 6), "peak": 0.5, "stops": stops}

    def probe(the_bug, mended_run, seed, batches, peak, stops):
        """The line that is named, the losses of a run in one and of one in parts, and the weights at the end."""
        whole, _ = mended_run(*small_net(seed), list(batches), peak, None, len(batches))
        state, parts = None, []
        for number, stop in enumerate(stops):
            model, optimizer = small_net(seed + number)
            losses, state = mended_run(model, optimizer, list(batches), peak, state, stop)
            parts.append(list(losses))
        about = f"stopped after {', '.join(map(str, stops[:-1]))} of {len(batches)} steps"
        mended = {"the losses of a run that is never stopped": list(whole),
                  f"{about}, how many losses the parts have": [len(part) for part in parts],
                  f"{about}, the losses": [loss for part in parts for loss in part],
                  f"{about}, the weights at the end": EX1.weights(model)}  # fmt: skip
        return {"the line": {"the faulty line": the_bug()}, "mended": mended}


CLINIC = Path(__file__).resolve().parents[1] / "clinic"
KINDS = ("skips", "order", "shape", "alone", "uneven", "straggler", "NaN", "same GPU", "port", "loads alone")
CAUSES = {  # of each patient: the rank, and a piece of each line that may be named
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
}


@task("11.5", "diagnoses", {f"patient {number}": 0.5 for number in CAUSES})
class Clinic:
    """Rank, line and kind of ten faults."""

    def draw(random, hidden):
        return {}

    def probe(diagnoses):
        """What holds of each diagnosis, in words."""
        named = diagnoses()
        require(isinstance(named, dict), "a dictionary was expected: {number: (rank, line, kind)}")
        for number, (culprit, pieces) in CAUSES.items():
            patient, diagnosis = f"patient {number}", named.get(number)
            if diagnosis is None:
                yield patient, f"{patient}, the rank", "nothing is said"
                continue
            row = isinstance(diagnosis, list | tuple) and len(diagnosis) == 3
            require(row, f"{patient}: a row of three was expected: (rank, line, kind)")
            rank, line, kind = diagnosis
            lines = (CLINIC / f"patient_{number:02}.py").read_text(encoding="utf-8").splitlines()
            text = lines[line - 1].strip() if type(line) is int and 0 < line <= len(lines) else "no line"
            at_fault, known = (
                any(piece in text for piece in pieces),
                f"{str(kind)[:30]!r} is none of {', '.join(KINDS)}",
            )
            wrong_kind = f'not "{kind}"' if kind in KINDS else known
            yield patient, f"{patient}, the rank", "that is it" if rank == culprit else f"not rank {rank}"
            yield patient, f"{patient}, the line", "that is it" if at_fault else f"not line {line}: {text}"
            yield patient, f"{patient}, the kind", "that is it" if kind == KINDS[number - 1] else wrong_kind
