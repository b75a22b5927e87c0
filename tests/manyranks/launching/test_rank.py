"""What a rank does on a GPU, as far as it can be seen without one; what it says of odd errors."""

import multiprocessing
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from manyranks import Device, launch
from manyranks.errors import LaunchError, RankError
from manyranks.launching import rank, server_handle, setting
from manyranks.launching.decision import Returned
from manyranks.memory import open_memory


class Posing(torch.Tensor):
    """A tensor that poses as a GPU's."""

    is_cuda = True

    def detach(self):
        return self

    def cpu(self):
        return self.as_subclass(torch.Tensor).clone()


@pytest.mark.parametrize(
    "error, consequence",
    [
        (
            dist.DistBackendError(
                "NCCL error: invalid usage. Duplicate GPU detected : rank 0 and rank 1"
            ),
            False,
        ),
        (dist.DistBackendError("NCCL error: unhandled cuda error: out of memory"), False),
        (
            dist.DistBackendError("ncclRemoteError: A call failed possibly due to a network error"),
            True,
        ),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), True),
        (dist.DistBackendError("store->get('0') got error: Connection reset by peer"), True),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), True),
        (RuntimeError("NCCL is a library"), False),
    ],
)
def test_what_nccl_says_of_itself_is_a_cause_and_what_it_says_of_others_is_not(error, consequence):
    assert rank.is_broken_connection(error, str(error)) == consequence


def test_results_on_a_gpu_arrive_on_the_cpu():
    with open_memory("answer") as file:
        returned = {"tensor": torch.arange(3.0).as_subclass(Posing), "number": 1}
        rank.pack(Returned(0, returned), file.fileno())
        result = pickle.loads(os.pread(file.fileno(), 1 << 16, 0)).result
    assert result["number"] == 1
    assert type(result["tensor"]) is torch.Tensor
    assert result["tensor"].tolist() == [0, 1, 2]


def closes_its_output():
    sys.stdout.close()
    return 1


class Speechless(Exception):
    def __str__(self):
        raise KeyboardInterrupt


class Interrupting:
    def __reduce__(self):
        raise KeyboardInterrupt


def raise_it(error):
    raise error()


def test_a_rank_may_close_its_output():
    assert launch(closes_its_output, world_size=2) == [1, 1]


@pytest.mark.parametrize(
    "function, arguments, words",
    [
        (
            raise_it,
            [Speechless],
            r"Speechless: \(its message cannot be shown: __str__ raised Keyb",
        ),
        (Interrupting, [], r"is a Interrupting, which cannot be sent to the caller \(KeyboardInt"),
    ],
)
def test_the_cause_is_told_even_if_it_cannot_speak(function, arguments, words):
    with pytest.raises(RankError, match=words):
        launch(function, *arguments, world_size=2)


@pytest.mark.parametrize("words", ["Resource temporarily unavailable", "can't start new thread"])
def test_a_user_without_processes_is_told_of_the_limit(words):
    assert "see `ulimit -u`: launch fewer" in rank.failure_of(0, RuntimeError(words)).message


def no_process(*arguments, **settings):
    raise BlockingIOError(11, "Resource temporarily unavailable")


def test_a_user_who_can_start_no_server_is_told_of_the_limit(monkeypatch):
    server_handle.use_server(None)
    monkeypatch.setattr(subprocess, "Popen", no_process)
    with pytest.raises(LaunchError, match="see `ulimit -u`: launch fewer ranks"):
        launch(no_process, world_size=1)


def test_a_server_that_can_start_no_agent_says_why(monkeypatch):
    server = server_handle.Server()
    server.complaints.write(b"BlockingIOError: [Errno 11] Resource temporarily unavailable")
    server.complaints.flush()
    server.process.kill()
    assert "see `ulimit -u`: launch fewer ranks" in server.how_it_ended(60.0)
    server.close()


@pytest.mark.parametrize("allowed, threads", [("1", 1), ("0", 1), ("64", 4), ("", 4)])
def test_a_rank_takes_its_share_of_the_cores_and_no_more_than_the_environment_allows(
    allowed, threads, monkeypatch
):
    monkeypatch.setattr(setting, "usable_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", allowed)
    assert launch(torch.get_num_threads, world_size=2) == [threads, threads]


def test_a_rank_may_spawn_a_process_of_its_own():
    """Python would run the parent's main module in it, which begins with the server's words."""
    assert launch(exit_code_of_a_spawned_process, world_size=1) == [0]


def exit_code_of_a_spawned_process():
    sys.argv[:] = ["script.py"]
    process = multiprocessing.get_context("spawn").Process(target=os.getpid)
    process.start()
    process.join(300)
    return process.exitcode


def test_what_an_emulated_device_does_below_the_programs_line_is_not_in_a_traceback():
    with Device("1GFLOP/s").emulate(sleep=False), pytest.raises(RuntimeError) as caught:
        torch.ones(37).add_(torch.ones(38))
    told = rank.failure_of(0, caught.value).traceback
    assert "add_(torch.ones(38))" in told
    assert told.count("  File ") == 1
    assert told.endswith("at non-singleton dimension 0\n")
