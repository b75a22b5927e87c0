"""Decides how a launch ends from what the caller has heard so far, without any process.

STARTING ── a rank runs ──▶ RUNNING ── all have answered ──▶ LEAVING        (next_phase)
    └──────────────────────────┴──────────────┬──────────────────┘
                                         an `Ending`                        (decide)
"""

import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ..errors import Failure, LaunchError
from .protocol import Refused, Started

# torch may have to be imported from a cold disk; the launch's own time starts after that.
STARTING_SECONDS = 60.0
# After a failure other ranks have this long to report theirs; the earliest is named first.
GRACE_SECONDS = 0.25
# After a connection is lost, the system has this long to say which rank died, and how.
EXIT_CODE_SECONDS = 1.5
# All processes have this long to end after the last result.
ENDING_SECONDS = 5.0
SIGNAL_HINTS = {
    "SIGKILL": " (from outside, or by the system: then probably because memory ran out)",
    "SIGSEGV": " (segmentation fault)",
    "SIGABRT": " (a library gave up: gloo does where a message is longer than what receives it)",
}


class Stage(Enum):
    """What the caller waits for: the first rank, the answers, or the end of all processes."""

    STARTING = 1
    RUNNING = 2
    LEAVING = 3


@dataclass(frozen=True)
class Phase:
    """The stage of a launch, the time at which it began (in seconds), and what was asked for."""

    stage: Stage
    since: float
    world_size: int
    timeout: float


@dataclass(frozen=True)
class Returned:
    """A rank's function has returned.

    If the function trained a model and the rank exchanged no message, `model` is the sum of the
    model's weights; else it is None.
    """

    rank: int
    result: Any
    model: float | None = None


@dataclass(frozen=True)
class Raised:
    """A rank has raised an error, of which the caller heard at `heard` (seconds)."""

    failure: Failure
    heard: float


@dataclass(frozen=True)
class Ended:
    """A rank's process has ended, of which the caller heard at `heard` (seconds).

    `words` are the last words that the process wrote.
    """

    rank: int
    code: int
    words: str
    heard: float


@dataclass(frozen=True)
class Gone:
    """No process of the launch is left."""


Event = Started | Returned | Raised | Ended | Refused | Gone


@dataclass(frozen=True)
class Results:
    """All ranks have returned."""

    by_rank: dict[int, Returned]


@dataclass(frozen=True)
class Failures:
    """Ranks have failed; the culprit's failure is the first."""

    failures: list[Failure]


@dataclass(frozen=True)
class TimedOut:
    """Time was up before all ranks had answered."""


@dataclass(frozen=True)
class CutOff:
    """The processes were ended from outside."""


Ending = Results | Failures | Refused | TimedOut | CutOff


def next_phase(phase: Phase, events: Sequence[Event], now: float) -> Phase:
    """Return the phase of a launch now: the next one, or the same one if nothing has ended it."""
    if phase.stage is Stage.STARTING and pids_of(events):
        return replace(phase, stage=Stage.RUNNING, since=now)
    if phase.stage is Stage.RUNNING and len(results_of(events)) == phase.world_size:
        return replace(phase, stage=Stage.LEAVING, since=now)
    return phase


def decide(phase: Phase, events: Sequence[Event], now: float) -> Ending | None:
    """Return how the launch ends; None as long as that is open."""
    results = results_of(events)
    all_gone = any(isinstance(event, Gone) for event in events)
    for event in events:
        if isinstance(event, Refused):
            return event
        # This process has ended with an error before it could say that it had started.
        if isinstance(event, Ended) and event.code > 0 and event.rank not in pids_of(events):
            return Refused(LaunchError(f"the ranks could not be started\n{event.words}".strip()))
    if failed := failures_of(events):
        return decide_failure(phase, failed, results, all_gone, now)
    if len(results) == phase.world_size:
        late = phase.stage is Stage.LEAVING and now >= phase.since + ENDING_SECONDS
        return Results(results) if all_gone or late else None
    if all_gone:
        return CutOff()
    patience = phase.timeout
    if phase.stage is Stage.STARTING:
        patience += STARTING_SECONDS
    return TimedOut() if now >= phase.since + patience else None


def decide_failure(
    phase: Phase, failed: dict[int, Raised | Ended], results: dict, all_gone: bool, now: float
) -> Ending | None:
    """Return the ending after a failure, or None while other ranks may still name its cause."""
    deadline = min(event.heard for event in failed.values()) + GRACE_SECONDS
    failures = [failure_of(event) for event in failed.values()]
    consequences = [failure for failure in failures if failure.consequence]
    cause_known = len(consequences) < len(failures)
    all_answered = len(failed.keys() | results.keys()) == phase.world_size
    if not (all_answered or all_gone or now >= deadline):
        return None
    if not (cause_known or all_gone or now >= deadline + EXIT_CODE_SECONDS):
        return None
    if all_gone and not cause_known and phase.stage is not Stage.LEAVING:
        return CutOff()
    return Failures(sorted(failures, key=lambda failure: (failure.consequence, failure.time)))


def pids_of(events: Sequence[Event]) -> dict[int, int]:
    """Return the process ids of the ranks that have started, by rank."""
    return {event.rank: event.pid for event in events if isinstance(event, Started)}


def results_of(events: Sequence[Event]) -> dict[int, Returned]:
    """Return what ranks have returned, by rank."""
    return {event.rank: event for event in events if isinstance(event, Returned)}


def failures_of(events: Sequence[Event]) -> dict[int, Raised | Ended]:
    """Return the failure of each rank that has one.

    That is an error that the rank raised, or else the end of its process with a code other than 0
    or without a result.
    """
    results = results_of(events)
    failed: dict[int, Raised | Ended] = {}
    for event in events:
        if isinstance(event, Raised):
            failed[event.failure.rank] = event
        elif isinstance(event, Ended) and (event.code or event.rank not in results):
            failed.setdefault(event.rank, event)
    return failed


def failure_of(event: Raised | Ended) -> Failure:
    """Return what the caller is told of a failure."""
    if isinstance(event, Raised):
        return event.failure
    kind, how = exit_code_in_words(event.code)
    return Failure(event.rank, kind, how, event.words, event.heard, exit_code=event.code)


def exit_code_in_words(code: int) -> tuple[str, str]:
    """Return how a rank, an agent or the server has ended: (kind, message)."""
    if code >= 0:
        return "exited", f"with code {code}, without a result"
    name = f"signal {-code}"
    # Signals from 32 on have no names.
    with suppress(ValueError):
        name = signal.Signals(-code).name
    return "killed", f"by {name}{SIGNAL_HINTS.get(name, '')}"
