"""Who is waited for, when time runs out: from the flight recorder's calls, and from stacks."""

import signal
import subprocess
import sys
import time

import pytest

from manyranks import own_code
from manyranks.flight_recorder import Call, marks
from manyranks.launching.stacks import missing_from_ours, missing_from_torchs, parse, status_of

ALL = (0, 1, 2)
PAIR = (0, 1)


def call(sequence, members=ALL, begin=0.0, end=0.0):
    return Call(0, len(members), sequence, begin, end, marks(tuple(members)), b"all")


@pytest.mark.parametrize(
    "calls, missed",
    [
        (  # A rank is a call behind.
            {0: [call(1, end=1.0), call(2)], 1: [call(1, end=1.0)], 2: [call(1, end=1.0), call(2)]},
            ("all, call 2", [0, 2], [1]),
        ),
        ({0: [call(1)], 2: [call(1)]}, ("all, call 1", [0, 2], [1])),  # Rank 1 never entered any.
        # Only members of the group count.
        ({0: [call(1, PAIR)], 1: []}, ("all, call 1", [0], [1])),
        # Rank 0 waits for rank 1 in a pair, which waits for rank 2 in the whole group
        ({0: [call(1, PAIR, begin=1)], 1: [call(1, begin=2)], 2: []}, ("all, call 1", [1], [2])),
        ({rank: [call(1)] for rank in ALL}, None),
        ({rank: [call(1, end=1.0)] for rank in ALL}, None),
        ({}, None),
    ],
)
def test_the_rank_that_the_others_wait_for_is_missed(calls, missed):
    assert missing_from_ours(calls) == missed


@pytest.mark.parametrize(
    "entered, missed",
    [
        ({0: "barrier", 1: ""}, ("torch.distributed.barrier", [0], [1])),
        ({0: "barrier", 1: "broadcast", 2: ""}, None),
        ({0: "barrier", 1: "barrier"}, None),
        ({0: "", 1: ""}, None),
        ({0: "recv", 1: ""}, None),
    ],
)
def test_torchs_own_are_named_only_when_that_is_sure(entered, missed):
    assert missing_from_torchs(entered) == missed


DUMP = f"""Thread 0x1 (most recent call first):
  File "/usr/lib/python3/threading.py", line 1 in wait
  File "/home/ann/train.py", line 3 in worker

Thread 0x2 (most recent call first):
  File "/usr/lib/python3/threading.py", line 1 in wait

Current thread 0x3 (most recent call first):
  File "/site-packages/torch/distributed/c10d_logger.py", line 9 in wrapper
  File "/home/ann/train.py", line 7 in step
  File "/home/ann/train.py", line 9 in main
  File "{own_code.LIBRARY.folder}/launching/rank.py", line 5 in call
  File "{own_code.LIBRARY.folder}/launching/agent.py", line 8 in be_rank
"""


def test_of_a_dump_the_callers_own_frames_are_kept_and_its_main_thread_comes_first():
    main = [("/home/ann/train.py", 9, "main"), ("/home/ann/train.py", 7, "step")]
    assert parse(DUMP) == [main, [("/home/ann/train.py", 3, "worker")]]


def status_in_time(pid, status):
    """Return the state of a process once it is `status`, or its state after half a minute."""
    deadline = time.monotonic() + 60
    while not status_of(pid).startswith(status) and time.monotonic() < deadline:
        time.sleep(0.01)
    return status_of(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell nothing")
def test_the_state_of_a_process_is_told_in_words():
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert status_in_time(process.pid, "waiting") == "waiting"
            process.send_signal(signal.SIGSTOP)
            stopped = "stopped by a signal (SIGSTOP) and never continued"
            assert status_in_time(process.pid, stopped) == stopped
        finally:
            process.kill()
    assert status_of(process.pid) == "ended"
