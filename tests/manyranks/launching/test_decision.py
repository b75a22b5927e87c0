"""How launches end, decided from what the caller hears, without any process.

Every fault of launch_faults.yaml is reported as three ranks would, and so is what comes from
outside.
"""

import re

import pytest
from launch_faults import FAULTS

from manyranks.errors import Failure, LaunchError, RankError
from manyranks.launching.decision import (
    ENDING_SECONDS,
    EXIT_CODE_SECONDS,
    GRACE_SECONDS,
    STARTING_SECONDS,
    CutOff,
    Ended,
    Gone,
    Phase,
    Raised,
    Results,
    Returned,
    Stage,
    TimedOut,
    decide,
    next_phase,
)
from manyranks.launching.protocol import Refused, Started

UP = [Started(rank, 100 + rank) for rank in range(3)]
WAIT = GRACE_SECONDS + EXIT_CODE_SECONDS


def raises(kind, message="", rank=2, at=1.0, traceback="", consequence=False):
    return Raised(Failure(rank, kind, message, traceback, at, consequence), at)


def loses_its_peer(rank, at=1.1):
    return raises("DistNetworkError", "Connection closed by peer", rank, at, consequence=True)


def play(events, timeout=60.0):
    """Hear these events, and look at the clock now and then; return the ending, and when it came.

    Each event is (seconds, event).
    """
    phase = Phase(Stage.STARTING, 0.0, 3, timeout)
    heard = []
    waiting = sorted(events, key=lambda each: each[0])
    now = 0.0
    while now < 200:
        while waiting and waiting[0][0] <= now:
            heard.append(waiting.pop(0)[1])
        if ending := decide(phase, heard, now):
            return ending, now
        phase = next_phase(phase, heard, now)
        now = round(now + 0.05, 2)
    raise AssertionError("nothing was decided")


def up(*events):
    return [(0.0, event) for event in UP] + list(events)


PEERS = [(1.1, loses_its_peer(0)), (1.1, loses_its_peer(1))]
SHAPES = "collective number 1 is ring_all_reduce of float32 [5, 3] on rank 2, but [4, 3] on rank 1"
TYPES = "collective number 1 is ring_all_reduce of float32 [8] on rank 1, but int32 [8] on rank 2"
NUMPY = 'File "<cell>", line 4, in fault\n    numpy.zeros(3)[7]'
BREAKPOINT = "breakpoint() cannot be used in a rank: nobody can type there: after join()"
TWICE = "launch has brought the process group up already"
UNREADABLE = "its result cannot be read here: EOFError: Ran out of input"
SEGMENT = 'File "<cell>", line 4, in fault\n    ctypes.string_at(0)'
REPORTED = {  # The caller hears this of the culprit, rank 2, in each fault.
    "exception": raises("IndexError", "index 7 is out of bounds", traceback=NUMPY),
    "killed in forward": Ended(2, -9, "", 1.0),
    "killed in all-reduce": Ended(2, -9, "", 1.4),
    "os._exit": Ended(2, 3, "", 1.0),
    "sys.exit": raises("SystemExit", "sys.exit was called with 5"),
    "segmentation fault": Ended(2, -11, SEGMENT, 1.0),
    "out of memory": raises("MemoryError", "Unable to allocate 64.0 MiB"),
    "unpicklable result": raises("TypeError", "the result is a generator, which cannot be sent"),
    "a connection of the learner's own": raises("ConnectionResetError", "the data base is gone"),
    "left the process group": raises("ValueError", "left"),
    "a report that something else wrote over": raises("TypeError", UNREADABLE),
    "a child that the rank forked returns": raises("ValueError", "parent"),
    "breakpoint": raises("LaunchError", BREAKPOINT),
    "a second process group": raises("ValueError", TWICE),
    "mismatched shapes": raises("MismatchError", SHAPES),
    "mismatched shapes that fit": raises("MismatchError", SHAPES),
    "mismatched types": raises("MismatchError", TYPES),
}
TIMED_OUT = {fault.name for fault in FAULTS if fault.error == "LaunchTimeout"}
IN_ALL = "exceptions in all ranks"
IN_TEARDOWN = "killed in teardown"


def test_the_table_of_faults_is_complete():
    assert {fault.name for fault in FAULTS} == {*REPORTED, *TIMED_OUT, IN_ALL, IN_TEARDOWN}


def matches(ending, name):
    fault = next(fault for fault in FAULTS if fault.name == name)
    message = str(RankError(ending.failures, 3))
    return re.search(fault.pattern.replace("{culprit}", "2"), message)


@pytest.mark.parametrize("name", REPORTED)
def test_the_culprit_is_named_first(name):
    """The other ranks lose their connections, before the cause is heard or after."""
    event = REPORTED[name]
    ending, now = play(up((1.2, event), *PEERS))
    assert matches(ending, name)
    assert now <= 1.1 + WAIT
    ending, now = play(up((1.0, event)))
    assert matches(ending, name)
    assert now <= 1.45 + GRACE_SECONDS


@pytest.mark.parametrize("name", sorted(TIMED_OUT))
def test_ranks_that_do_not_answer_run_out_of_time(name):
    """Nothing is heard of a culprit but, if it has returned, its result."""
    returned = [(1.0, Returned(2, None))] if "returned" in name else []
    ending, now = play(up(*returned), timeout=5.0)
    assert ending == TimedOut()
    assert now == pytest.approx(5.0, abs=0.1)


def test_exceptions_in_all_ranks_are_sorted_by_time():
    late = [(1.15, raises("KeyError", str(rank), rank, 1.15)) for rank in (0, 1)]
    ending, now = play(
        up(*late, (1.2, raises("ValueError", "the first", traceback="raise ValueError")))
    )
    assert matches(ending, IN_ALL)
    assert now == 1.2


def test_a_rank_that_is_killed_after_all_have_answered_has_failed():
    returned = [(1.0, Returned(rank, rank)) for rank in range(3)]
    ending, _ = play(up(*returned, (1.2, Ended(2, -9, "", 1.2)), (1.3, Gone())))
    assert matches(ending, IN_TEARDOWN)


def test_results_are_there_when_all_processes_are_gone_or_do_not_go():
    returned = [(1.0, Returned(rank, rank)) for rank in range(3)]
    exited = [(1.1, Ended(rank, 0, "", 1.1)) for rank in range(3)]
    ending, now = play(up(*returned, *exited, (1.2, Gone())))
    assert isinstance(ending, Results)
    assert now == 1.2
    assert [ending.by_rank[rank].result for rank in range(3)] == [0, 1, 2]
    ending, now = play(up(*returned))
    assert isinstance(ending, Results)
    assert now == pytest.approx(1.0 + ENDING_SECONDS, abs=0.1)


@pytest.mark.parametrize("events", [up(), [], up((1.0, loses_its_peer(0)))])
def test_processes_that_are_gone_without_a_cause_were_cut_off(events):
    assert play([*events, (2.0, Gone())]) == (CutOff(), 2.0)


def test_ranks_that_all_end_by_themselves_have_failed():
    ends = [(1.0, Ended(rank, 0, "", 1.0)) for rank in range(3)]
    ending, now = play(up(*ends, (1.0, Gone())))
    assert [failure.type_name for failure in ending.failures] == ["exited"] * 3
    assert now == 1.0


def test_broken_connections_alone_are_told_after_a_while():
    ending, now = play(up((1.0, loses_its_peer(0, 1.0))))
    assert ending.failures[0].consequence
    assert now == pytest.approx(1.0 + WAIT, abs=0.1)


def test_what_cannot_begin_is_refused():
    error = LaunchError("no loopback")
    assert play([(0.5, Refused(error))]) == (Refused(error), 0.5)
    ending, _ = play([(0.0, UP[0]), (0.5, Ended(1, 1, "no torch", 0.5))])
    assert str(ending.error) == "the ranks could not be started\nno torch"
    ending, now = play([], timeout=1.0)
    assert ending == TimedOut()
    assert now == pytest.approx(STARTING_SECONDS + 1, abs=0.1)


def test_the_failures_that_followed_are_told_after_the_first():
    failures = [Failure(2, "ValueError", "the first"), Failure(0, "KeyError", "0")]
    first, *others = str(RankError(failures, 3)).splitlines()
    assert first == "rank 2: ValueError: the first (of 3 ranks)"
    assert others == ["", "After that:", "  rank 0: KeyError: 0"]
