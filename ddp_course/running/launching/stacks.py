"""What each rank was doing when time ran out, in the learner's terms."""

import re
import sys
import time
import traceback
from itertools import takewhile
from pathlib import Path

from ...errors import RankState
from .. import flight_recorder, linux

# Its groups are file, line, function.
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
# Linux has no entry for a process that has ended; other systems tell nothing of any.
UNKNOWN = "ended" if sys.platform == "linux" else "waiting"
# The keys are Linux's letters for a process's state; "" is for a process that Linux does not know.
STATUS = {
    "T": "stopped by a signal (SIGSTOP) and never continued",
    "R": "running",
    "Z": "ended",
    "": UNKNOWN,
}
LAUNCHER = ("/launching/rank.py", "/launching/cell.py")
POINT_TO_POINT = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}
TORCH = "/torch/distributed/distributed_c10d.py"
LIBRARY = ("/torch/distributed/c10d_logger.py", "/threading.py", "/concurrent/futures/thread.py")


def describe_ranks(
    world_size: int, results: dict, statuses: dict, dumps: dict, calls: dict
) -> tuple[list, str]:
    """Return the RankState of every rank, and a sentence about the collective that the first of
    them did not enter.

    The dicts are by rank: results of finished ranks, states of processes in words (""
    before the start), stacks that faulthandler wrote, and collectives.
    """
    states = []
    entered = {}
    for rank in range(world_size):
        dump = dumps.get(rank, "")
        calls_of_torch = [
            name for frames in parse(dump) for file, _, name in frames if file.endswith(TORCH)
        ]
        entered[rank] = next((name for name in calls_of_torch if not name.startswith("_")), "")
        status = (
            "finished, waiting for the others"
            if rank in results
            else statuses.get(rank) or "not started yet"
        )
        collective = last_collective(calls.get(rank, []), entered[rank])
        states.append(RankState(rank, status, collective, as_traceback(dump)))
    missing = missing_from_ours(calls) or missing_from_torchs(entered)
    if missing is None:
        return states, ""
    name, inside, absent = missing
    waiting = enumerate_ranks(inside, "waits", "wait")
    cause = f"{enumerate_ranks(absent, 'has', 'have')} not entered {name}, in which {waiting}"
    return sorted(states, key=lambda state: state.rank not in absent), cause


def last_collective(calls: list, torch_call: str) -> str:
    """Return the collective that a rank is in, or entered last, in words."""
    call = calls[-1] if calls else None
    if call is not None and not call.end:
        return f"{call} (inside for {time.monotonic() - call.begin:.1f} s)"
    if torch_call:
        return f"torch.distributed.{torch_call} (inside)"
    return f"{call} (returned)" if call else ""


def missing_from_ours(calls: dict) -> tuple | None:
    """Return (collective, ranks inside, absent ranks) by the flight recorder; None if no rank is
    absent.

    When rank 0 waits for rank 1, and rank 1 waits elsewhere for rank 2, rank 2 is the culprit.
    """
    inside = {rank: own[-1] for rank, own in calls.items() if own and not own[-1].end}
    missing = None
    for call in sorted(inside.values(), key=lambda call: call.begin):
        absent = [rank for rank in call.members if not has_reached(calls.get(rank, []), call)]
        same = (call.group, call.sequence)
        present = [
            rank for rank, other in sorted(inside.items()) if (other.group, other.sequence) == same
        ]
        idle = [rank for rank in absent if rank not in inside]
        if idle:
            return str(call), present, idle
        if absent and missing is None:
            missing = (str(call), present, absent)
    return missing


def has_reached(own: list, call: flight_recorder.Call) -> bool:
    """Return whether a rank with these calls of its `own` has entered `call`."""
    return any(each.group == call.group and each.sequence >= call.sequence for each in own)


def missing_from_torchs(entered: dict) -> tuple | None:
    """Return the same by the stacks, for torch's own collectives; None unless all waiting ranks are
    in the same one.
    """
    inside = [rank for rank, name in entered.items() if name]
    absent = [rank for rank, name in entered.items() if not name]
    names = {entered[rank] for rank in inside} - POINT_TO_POINT
    return (
        (f"torch.distributed.{names.pop()}", inside, absent) if absent and len(names) == 1 else None
    )


def enumerate_ranks(ranks: list, singular: str, plural: str) -> str:
    """Return ranks in words with a verb, such as "rank 2 has" or "ranks 0 and 1 have"."""
    *others, last = ranks
    return (
        f"ranks {', '.join(map(str, others))} and {last} {plural}"
        if others
        else f"rank {last} {singular}"
    )


def status_of(pid: int) -> str:
    """Return the state of a process in words, as far as the system tells."""
    # The letter for the state follows the name, which is in parentheses.
    stat = linux.read(Path(f"/proc/{pid}/stat"))
    return STATUS.get(stat.rpartition(") ")[2][:1], "waiting")


def parse(dump: str) -> list:
    """Return the threads of a dump that run the caller's code, the main one first, as lists of
    (file, line, function).

    The most recent frame is the last, as in a traceback; frames of the launcher and of thread
    start-up are left out.
    """
    threads = []
    for part in dump.split("(most recent call first):")[1:]:
        own = takewhile(lambda frame: not frame[0].endswith(LAUNCHER), FRAME.findall(part))
        frames = [
            (file, int(line), function)
            for file, line, function in own
            if not file.endswith(LIBRARY)
        ]
        if frames:
            threads.append(frames[::-1])
    return threads[::-1]


def as_traceback(dump: str) -> str:
    """Return the frames of a dump as in Python tracebacks, with the source lines where they are
    known.
    """
    return "".join(
        traceback.format_list([(*frame, None) for frames in parse(dump) for frame in frames])
    ).rstrip()
