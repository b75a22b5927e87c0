"""Exercise 11: checkpoints that survive, a resume that is exact, and who was to blame."""

import os
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

from . import require, task
from .diagnose import check_line, compare_numbers, same, tensors
from .exercise01 import loss_of, weights

FILES = ("errno", "glob", "load", "open", "os", "pathlib", "pickle", "shutil", "tempfile", "uuid")
CHECKPOINT = tuple(f"ddp_course.running.checkpoint.{name}" for name in ("save", "load"))


class Unwritable:
    """Something in the middle of a checkpoint that cannot be written: the disk is full."""

    def __reduce__(self):
        raise OSError(28, "No space left on device")


def contents(path):
    """What `torch.load` finds, or how it fails."""
    try:
        return torch.load(path, weights_only=False)
    except Exception as error:
        return f"{type(error).__name__}"


@task("11.1", "save_checkpoint", imports=FILES)
class SaveCheckpoint:
    """The old checkpoint or the new one, at any moment."""

    def draw(random, hidden):
        """Two states to save, one after the other."""
        first, second = ({"step": step, "weights": tensors(random, 1, 30)[0]} for step in (1, 2))
        return {"first": first, "second": second}

    def probe(save_checkpoint, first, second):
        """What the file holds at each moment, the order of sync and replace, and what a full disk does."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "checkpoint.pt"
            save_checkpoint(first, path)
            evidence = {"written": contents(path)}
            seen, events = [], []
            replaces = {name: getattr(os, name) for name in ("replace", "rename")}

            def noted(name):
                def replace(source, *args, **kwargs):
                    events.append(name)
                    seen.append((contents(source), os.path.dirname(os.path.abspath(source)) == folder))
                    return replaces[name](source, *args, **kwargs)

                return replace

            syncs = [name for name in ("fsync", "fdatasync") if hasattr(os, name)]

            def synced(sync):
                return lambda handle: (events.append("fsync"), sync(handle))[1]

            with (
                patch.object(os, "replace", noted("replace")),
                patch.object(os, "rename", noted("rename")),
                patch.multiple(os, **{name: synced(getattr(os, name)) for name in syncs}),
            ):
                save_checkpoint(second, path)
            evidence |= {"events": events, "seen": seen, "second": contents(path)}
            evidence["files"] = sorted(os.listdir(folder))
            try:
                save_checkpoint({**first, "rest": [Unwritable()]}, path)
                evidence["raised"] = False
            except OSError:
                evidence["raised"] = True
            return {**evidence, "after": contents(path), "left": sorted(os.listdir(folder))}

    def judge_saved(evidence, first, second):
        """What was saved is found, under its name alone."""
        for name, state in (("written", first), ("second", second)):
            found = evidence[name]
            good = (
                isinstance(found, dict)
                and found.get("step") == state["step"]
                and same(found["weights"], state["weights"])
            )
            require(
                good,
                f"torch.load does not find what was saved, but {found if isinstance(found, str) else 'another state'}",
            )
        require(evidence["files"] == ["checkpoint.pt"], f"files are left behind: {evidence['files']}")

    def judge_full(evidence, first, second):
        """A full disk costs nothing old, leaves nothing behind, and is not kept quiet."""
        after = evidence["after"]
        kept = isinstance(after, dict) and after.get("step") == second["step"]
        require(
            kept,
            "when the disk is full in the middle of writing, the old checkpoint is lost: write to another file, then os.replace",
        )
        require(evidence["raised"], "when the disk is full nobody is told: let the error out")
        require(evidence["left"] == ["checkpoint.pt"], f"when writing fails a file is left behind: {evidence['left']}")

    def judge_order(evidence, first, second):
        """Written beside, synced, then replaced."""
        renames = [event for event in evidence["events"] if event != "fsync"]
        require(renames, "the file is not replaced in one step: os.replace puts the finished file in place")
        whole, beside = evidence["seen"][0]
        require(isinstance(whole, dict), "when the file is put in place it is not complete yet: close it first")
        require(
            beside, "the temporary file is in another folder, perhaps on another disk: make it beside the checkpoint"
        )
        require(
            "fsync" in evidence["events"], "is it on the disk? Without os.fsync a power cut may leave an empty file"
        )
        first_rename = evidence["events"].index(renames[0])
        require(
            "fsync" in evidence["events"][:first_rename],
            "os.fsync comes before os.replace, or the name may reach the disk before the data",
        )

    parts = {"saved": (1, judge_saved), "a full disk": (1, judge_full), "in one step": (1, judge_order)}


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
        loss = loss_of(model, inputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@task("11.2", ("capture", "resume"), imports=("load", "pickle"))
class ExactResume:
    """Stop, start again, and nobody can tell."""

    def draw(random, hidden):
        """A seed, eight batches, and the step to stop at."""
        inputs = tensors(random, 8, 6, 5, dtype=torch.float64)
        batches = [(one, torch.tensor([random.randrange(3) for _ in range(6)])) for one in inputs]
        return {"seed": random.randrange(10**6), "batches": batches, "stop": random.randrange(3, 6)}

    def probe(capture, resume, seed, batches, stop):
        """The original run to its end, and two runs resumed from what was captured."""
        model, optimizer = dropout_model(seed)
        train(model, optimizer, batches[:stop])
        state = capture(model, optimizer, stop)
        original = train(model, optimizer, batches[stop:])
        runs = []
        for attempt in range(2):
            again, fresh = dropout_model(seed + 1 + attempt)
            step = resume(state, again, fresh)
            buffers = torch.cat([b.double().reshape(-1) for b in again.buffers()])
            start = {"weights": weights(again), "buffers": buffers, "momenta": len(fresh.state), "step": step}
            runs.append({**start, "losses": train(again, fresh, batches[stop:]), "end": weights(again)})
        return {"original": original, "end": weights(model), "runs": runs}

    def judge_state(evidence, seed, batches, stop):
        """Weights, buffers, momentum and the step are those that were captured."""
        check_start("the resumed run", evidence["runs"][0], evidence["end"], until(seed, batches, stop), stop)

    def judge_course(evidence, seed, batches, stop):
        """The resumed run goes on exactly, its random numbers too."""
        check_course("the resumed run", evidence["runs"][0], until(seed, batches, stop)["losses"])

    def judge_twice(evidence, seed, batches, stop):
        """Capturing only looks, and what was captured serves a second time."""
        captured = until(seed, batches, stop)
        untouched = all(abs(a - b) < 1e-9 for a, b in zip(evidence["original"], captured["losses"], strict=True))
        require(untouched, "capture changes the run that goes on: it must only look")
        again = "the second run from the same checkpoint"
        check_start(again, evidence["runs"][1], evidence["end"], captured, stop)
        check_course(again, evidence["runs"][1], captured["losses"])

    parts = {"state": (1, judge_state), "goes on exactly": (1, judge_course), "twice": (1, judge_twice)}


def until(seed, batches, stop):
    """Weights and buffers after `stop` steps, and the losses of those that follow."""
    model, optimizer = dropout_model(seed)
    train(model, optimizer, batches[:stop])
    buffers = torch.cat([b.double().reshape(-1) for b in model.buffers()])
    return {"weights": weights(model), "buffers": buffers, "losses": train(model, optimizer, batches[stop:])}


def check_start(name, run, end, captured, stop):
    """A run begins with what was captured."""
    later = same(run["weights"], end, 1e-9)
    aliased = "the captured tensors went on changing (aliasing); copy them"
    require(not later, f"{name} starts with the weights of the end: {aliased}")
    right = same(run["weights"], captured["weights"], 1e-12)
    require(right, f"{name} starts with other weights than were captured")
    right = same(run["buffers"], captured["buffers"], 1e-12)
    require(right, f"{name} has other buffers (running means): use state_dict, not only parameters")
    step = run["step"]
    require(type(step) is int, f"{name}: resume returns {step!r}; the number of the next step was expected")
    require(step == stop, f"{name} goes on at step {step}; {stop} steps were done, so the next one is number {stop}")
    require(run["momenta"], f"{name} has lost the optimizer's state: its momentum starts from nothing")


def check_course(name, run, expected):
    """A run's losses are those of the run that was never stopped."""
    first = abs(run["losses"][0] - expected[0]) < 1e-9
    require(first, f"{name} draws other dropout masks: save and restore the random generator too")
    equal = all(abs(a - b) < 1e-9 for a, b in zip(run["losses"], expected, strict=True))
    cause = "the optimizer's state is not what was captured (aliasing?)"
    require(equal, f"{name} drifts away from the second step on: {cause}")


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


def log_of(random, culprit, size, late, start=None):
    """Lines in the order in which they reached the log, which is not the order in time."""
    start = random.uniform(10, 90) if start is None else start
    lines = [f"{start + random.uniform(0, 1):.3f} rank {rank}: step {random.randrange(9)} done" for rank in range(size)]
    ranks = random.sample([rank for rank in range(size) if rank != culprit], size - 1)
    failed = start + 2 + random.uniform(0, 0.49)
    early = f"{failed - 0.001:.3f} rank {ranks[0]}: RuntimeError: Connection closed by peer"
    errors = [f"{failed:.3f} rank {culprit}: {random.choice(ROOTS)}", early]
    errors += [f"{failed + 0.01 * (n + 1):.3f} rank {rank}: {random.choice(AFTER)}" for n, rank in enumerate(ranks[1:])]
    errors.append(f"{failed + 0.5:.3f} rank {ranks[-1]}: {random.choice(ROOTS)}")
    rest = errors[1:]
    random.shuffle(rest)
    rest.insert(len(rest) if late else 0, errors[0])
    return random.sample(lines, size) + rest


@task("11.3", "culprit")
class Culprit:
    """The rank whose failure came first, and was not a consequence."""

    def draw(random, hidden):
        """Logs of 3 to 12 ranks with a known culprit, its line early or late; in one, if `hidden`, second 100 passes."""
        logs = [log_of(random, *of) for of in ((2, 4, 1), (1, 3, 0), (5, 12, 1), (11, 12, 0), (1, 6, 1))]
        in_order = [sorted(log_of(random, *of), key=seconds_of) for of in ((3, 5, 1), (10, 12, 0))]
        causes = [[line for line in log_of(random, *of) if not any(one in line for one in AFTER)] for of in LATE]
        return {"logs": logs + [log_of(random, 3, 5, 1, start=97.505)] * hidden, "in_order": in_order, "causes": causes}

    def probe(culprit, logs, in_order, causes):
        """The rank that is blamed in each log."""
        return {name: [culprit(list(log)) for log in of] for name, of in
                {"logs": logs, "in_order": in_order, "causes": causes}.items()}  # fmt: skip

    def judge_cause(evidence, logs, in_order, causes):
        """No broken connection, in logs whose lines are in the order of time."""
        check_blamed(evidence["in_order"], in_order)

    def judge_time(evidence, logs, in_order, causes):
        """The earliest, in logs without a broken connection; and if those are found, in logs with all of it."""
        check_blamed(evidence["causes"], causes)
        if evidence["in_order"] == [true_culprit(log) for log in in_order]:
            check_blamed(evidence["logs"], logs)

    parts = {"no consequence": (1, judge_cause), "by the time": (1, judge_time)}


def rank_of(line):
    """The rank that a line of a log is about."""
    return int(line.split()[2].rstrip(":"))


def seconds_of(line):
    """The time that a line of a log begins with."""
    return float(line.split()[0])


def failures_of(log):
    """The lines about failures, of all kinds, and those that are no consequence of another."""
    failures = [line for line in log if not line.endswith("done")]
    return failures, [line for line in failures if not any(after in line for after in AFTER)]


def true_culprit(log):
    """The rank whose failure came first, and was not a consequence."""
    return rank_of(min(failures_of(log)[1], key=seconds_of))


def check_blamed(evidence, logs):
    """The earliest failure that is not a broken connection."""
    failures, causes = zip(*map(failures_of, logs), strict=True)
    faults = {
        "a broken connection is a consequence of another rank's failure": [
            rank_of(min(log, key=seconds_of)) for log in failures
        ],
        "that is the first failure in the file; lines arrive late, so go by the time": [
            rank_of(log[0]) for log in failures
        ],
        "that is the first cause in the file; lines arrive late, so go by the time": [
            rank_of(log[0]) for log in causes
        ],
        "times are numbers: as text, 100.1 comes before 99.9": [rank_of(min(log)) for log in causes],
        "that is the last one; which was first?": [rank_of(max(log, key=seconds_of)) for log in failures],
        "that is the first line of all; only failures count": [rank_of(log[0]) for log in logs],
        "that is the lowest rank that failed": [min(map(rank_of, log)) for log in failures],
        "that is the line's number": [
            log.index(min(cause, key=seconds_of)) for log, cause in zip(logs, causes, strict=True)
        ],
    }
    about = [f"a log of {len(log)} lines" for log in logs]
    compare_numbers(evidence, [true_culprit(log) for log in logs], about, faults, "as the culprit")


RUN_LINES = {
    4: "the weights are those of the stop: right",
    5: "momentum is restored: right. But is everything that an optimizer works with in its state?",
    6: "the run goes on at the step where it stopped: right",
    8: "steps are counted over the whole run: right. Who else counts?",
    9: "the batch is that of the step: right",
    16: "what is saved is enough to mend this",
    17: "a copy is right, or the state would go on changing",
}


def small_net(seed):
    """A net and an optimizer with momentum."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8)


def scheduled(model, optimizer, batches, peak, steps, begins=(0,)):
    """The losses of a run that was never stopped, or whose schedule begins anew at some steps."""
    losses = []
    for step in range(steps):
        since = step - max(begin for begin in begins if begin <= step)
        optimizer.param_groups[0]["lr"] = peak * (1 - since / len(batches))
        losses += train(model, optimizer, batches[step : step + 1])
    return losses


@task("11.4", ("the_bug", "mended_run"))
class FindTheBugInTheRun:
    """A run in two or three parts is the same as one in one."""

    def draw(random, hidden):
        """A seed, ten batches, a peak rate, and where to stop (twice if `hidden`)."""
        inputs = tensors(random, 10, 6, 5, dtype=torch.float64)
        batches = [(one, torch.tensor([random.randrange(3) for _ in range(6)])) for one in inputs]
        stops = [random.randrange(4, 6), *([7] if hidden else []), 10]
        return {"seed": random.randrange(10**6), "batches": batches, "peak": 0.5, "stops": stops}

    def probe(the_bug, mended_run, seed, batches, peak, stops):
        """The line that is named, the losses of a run in one and of one in parts, and the weights at the end."""
        whole, _ = mended_run(*small_net(seed), list(batches), peak, None, len(batches))
        state, parts = None, []
        for number, stop in enumerate(stops):
            model, optimizer = small_net(seed + number)
            losses, state = mended_run(model, optimizer, list(batches), peak, state, stop)
            parts.append(list(losses))
        return {"line": the_bug(), "whole": list(whole), "parts": parts, "weights": weights(model)}

    def judge_line(evidence, seed, batches, peak, stops):
        """Line 10 begins the rate's schedule anew after a restart."""
        check_line(evidence["line"], 10, RUN_LINES)

    def judge_run(evidence, seed, batches, peak, stops):
        """The losses of all parts, one after the other, and the weights at the end."""
        model, optimizer = small_net(seed)
        expected = scheduled(model, optimizer, batches, peak, len(batches))
        anew = scheduled(*small_net(seed), batches, peak, len(batches), begins=(0, *stops[:-1]))
        require(
            len(evidence["whole"]) == len(batches),
            f"a run in one has {len(evidence['whole'])} losses; {len(batches)} were expected",
        )
        require(level(evidence["whole"], expected), "a run that was never stopped has changed, which was right before")
        found = [loss for part in evidence["parts"] for loss in part]
        counts = [len(part) for part in evidence["parts"]]
        about = f"stopped after {', '.join(map(str, stops[:-1]))} of {len(batches)} steps"
        require(len(found) == len(batches), f"{about}: the parts have {counts} losses, not {len(batches)} in all")
        require(
            not level(found, anew), f"{about}: the rate is at its peak again after the restart, as if it were step 0"
        )
        wrong = next(
            (step for step in range(len(found)) if not level(found[step : step + 1], expected[step : step + 1])), None
        )
        said = f"{about}: from step {wrong} on the loss is another one than without a stop"
        require(wrong is None, said)
        require(
            same(evidence["weights"], weights(model), 1e-9),
            f"{about}: the weights at the end are others than without a stop",
        )

    parts = {"the line": (1, judge_line), "mended": (1, judge_run)}


def level(found, expected):
    """Whether two rows of numbers are the same to rounding."""
    return all(type(a) is float and abs(a - b) <= 1e-9 for a, b in zip(found, expected, strict=True))
