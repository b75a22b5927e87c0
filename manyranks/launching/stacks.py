"""Says what each rank was doing when time ran out, in the terms of the program."""

import re
import sys
import time
import traceback
from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

from .. import flight_recorder, linux, own_code
from ..errors import RankState

# The groups of this pattern are the file, the line and the function of a frame.
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
# Linux has no entry for a process that has ended; other systems have none for any process.
UNKNOWN = "ended" if sys.platform == "linux" else "waiting"
# The keys are Linux's letters for a process's state; "" is for a process that Linux does not know.
STATUS = {
    "T": "stopped by a signal (SIGSTOP) and never continued",
    "R": "running",
    "Z": "ended",
    "": UNKNOWN,
}
POINT_TO_POINT = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}
# The paths of the files of torch's collectives, and of code that programs have not called
# themselves, end like this.
TORCH = "/torch/distributed/distributed_c10d.py"
LIBRARY = ("/torch/distributed/c10d_logger.py", "/threading.py", "/concurrent/futures/thread.py")


class Frame(NamedTuple):
    """A line that a thread is in, and the name of the function around it."""

    file: str
    line: int
    function: str


class Traces(NamedTuple):
    """What shows from outside what ranks do, each by rank.

    These are the states of their processes in words, the stacks that faulthandler wrote, and the
    calls of the flight recorder.
    """

    statuses: dict[int, str]
    dumps: dict[int, str]
    calls: dict[int, list[flight_recorder.Call]]


class Missing(NamedTuple):
    """A collective in words, the ranks that wait in it, and those that have not entered it."""

    collective: str
    waiting: list
    absent: list


def describe_ranks(
    world_size: int, finished: Container[int], traces: Traces
) -> tuple[list[RankState], str]:
    """Return the RankState of every rank, and a sentence about those that hold up the others.

    Ranks hold up the others if they did not enter the collective that the others wait in; their
    states come first. The `finished` ranks have returned.
    """
    states = []
    torch_calls = {}
    for rank in range(world_size):
        dump = traces.dumps.get(rank, "")
        torch_calls[rank] = entered_in_torch(dump)
        status = traces.statuses.get(rank, "not started yet")
        if rank in finished:
            status = "finished, waiting for the others"
        collective = last_collective(traces.calls.get(rank, []), torch_calls[rank])
        states.append(RankState(rank, status, collective, as_traceback(dump)))
    missing = missing_from_ours(traces.calls) or missing_from_torchs(torch_calls)
    if missing is None:
        return states, ""
    culprits = enumerate_ranks(missing.absent, "has", "have")
    waiting = enumerate_ranks(missing.waiting, "waits", "wait")
    cause = f"{culprits} not entered {missing.collective}, in which {waiting}"
    return sorted(states, key=lambda state: state.rank not in missing.absent), cause


def entered_in_torch(dump: str) -> str:
    """Return the public function of torch.distributed that a rank is in; "" if it is in none."""
    for frames in parse(dump):
        for frame in frames:
            if frame.file.endswith(TORCH) and not frame.function.startswith("_"):
                return frame.function
    return ""


def last_collective(calls: list, torch_call: str) -> str:
    """Return the collective that a rank is in, or entered last, in words."""
    call = calls[-1] if calls else None
    if call is not None and not call.end:
        return f"{call} (inside for {time.monotonic() - call.begin:.1f} s)"
    if torch_call:
        return f"torch.distributed.{torch_call} (inside)"
    return f"{call} (returned)" if call else ""


def missing_from_ours(calls: dict) -> Missing | None:
    """Return which ranks are absent from a collective, by the flight recorder; None if none is.

    When rank 0 waits for rank 1, and rank 1 waits elsewhere for rank 2, rank 2 is the culprit.
    """
    # A rank is still in its last call if that call has no end.
    current_calls = {rank: own[-1] for rank, own in calls.items() if own and not own[-1].end}
    all_wait = None  # the oldest call whose absent ranks all wait in another call
    for call in sorted(current_calls.values(), key=lambda call: call.begin):
        absent = [rank for rank in call.members if not has_reached(calls.get(rank, []), call)]
        waiting = []
        for rank, other in sorted(current_calls.items()):
            if other.group == call.group and other.sequence == call.sequence:
                waiting.append(rank)
        culprits = [rank for rank in absent if rank not in current_calls]
        if culprits:
            return Missing(str(call), waiting, culprits)
        if absent and all_wait is None:
            all_wait = Missing(str(call), waiting, absent)
    return all_wait


def has_reached(own_calls: list, call: flight_recorder.Call) -> bool:
    """Return whether a rank that has entered `own_calls` has entered `call`, or one after it."""
    return any(own.group == call.group and own.sequence >= call.sequence for own in own_calls)


def missing_from_torchs(torch_calls: dict) -> Missing | None:
    """Return which ranks are absent from a collective of torch, by the function each rank is in.

    Return None if no rank is absent, or if the waiting ranks are in several collectives.
    """
    waiting = [rank for rank, name in torch_calls.items() if name]
    absent = [rank for rank, name in torch_calls.items() if not name]
    names = {torch_calls[rank] for rank in waiting} - POINT_TO_POINT
    if not absent or len(names) != 1:
        return None
    return Missing(f"torch.distributed.{names.pop()}", waiting, absent)


def enumerate_ranks(ranks: list, singular: str, plural: str) -> str:
    """Return ranks in words with a verb, such as "rank 2 has" or "ranks 0 and 1 have"."""
    *others, last = ranks
    if not others:
        return f"rank {last} {singular}"
    return f"ranks {', '.join(map(str, others))} and {last} {plural}"


def status_of(pid: int) -> str:
    """Return the state of a process in words, as far as the system tells."""
    stat = linux.read(Path(f"/proc/{pid}/stat"))
    # The letter for the state follows the name, which is in parentheses.
    _, _, state = stat.rpartition(") ")
    return STATUS.get(state[:1], "waiting")


def parse(dump: str) -> list[list[Frame]]:
    """Return the threads of a dump that run the caller's code, the main one first.

    The most recent frame of each thread is the last, as in a traceback. Frames of the launcher and
    of what called it, of the starts of threads, and of torch's logger of collectives are left out.
    """
    threads: list[list[Frame]] = []
    _, *parts = dump.split("(most recent call first):")
    for part in parts:
        frames: list[Frame] = []
        for file, line, function in FRAME.findall(part):
            if file in own_code.CALLING:
                break
            if not file.endswith(LIBRARY):
                frames.insert(0, Frame(file, int(line), function))
        if frames:
            # faulthandler writes the main thread last.
            threads.insert(0, frames)
    return threads


def as_traceback(dump: str) -> str:
    """Return the frames of a dump as Python's tracebacks show them, with the lines of source."""
    frames = []
    for thread in parse(dump):
        frames += [(*frame, None) for frame in thread]
    return "".join(traceback.format_list(frames)).rstrip()
