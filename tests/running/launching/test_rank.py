"""What a rank does on a GPU, as far as it can be seen without one."""

import os
import pickle

import pytest
import torch
import torch.distributed as dist

from ddp_course.running.files import open_memory
from ddp_course.running.launching import rank


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
        rank.pack(
            "result", {"tensor": torch.arange(3.0).as_subclass(Posing), "number": 1}, file.fileno()
        )
        kind, result = pickle.loads(os.pread(file.fileno(), 1 << 16, 0))
    assert kind == "result" and result["number"] == 1
    assert type(result["tensor"]) is torch.Tensor and result["tensor"].tolist() == [0, 1, 2]
