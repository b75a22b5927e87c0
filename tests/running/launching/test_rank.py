"""What a rank does on a GPU, as far as it can be seen without one."""

import pickle

import pytest
import torch
import torch.distributed as dist

from ddp_course.running import flight_recorder
from ddp_course.running.launching import rank, stacks


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
        (dist.DistBackendError("NCCL error: invalid usage. Duplicate GPU detected : rank 0 and rank 1"), False),
        (dist.DistBackendError("NCCL error: unhandled cuda error: out of memory"), False),
        (dist.DistBackendError("ncclRemoteError: A call failed possibly due to a network error"), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), True),
        (dist.DistBackendError("store->get('0') got error: Connection reset by peer"), True),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), True),
        (RuntimeError("NCCL is a library"), False),
    ],
)
def test_what_nccl_says_of_itself_is_a_cause_and_what_it_says_of_others_is_not(error, consequence):
    assert rank.is_broken_connection(error, str(error)) == consequence


def test_results_on_a_gpu_arrive_on_the_cpu():
    packed = rank.pack_result({"tensor": torch.arange(3.0).as_subclass(Posing), "number": 1})
    kind, result = pickle.loads(packed)
    assert kind == "result" and result["number"] == 1
    assert type(result["tensor"]) is torch.Tensor and result["tensor"].tolist() == [0, 1, 2]


def test_a_collective_on_a_gpu_was_launched_not_finished():
    words = b"ring_all_reduce of float32 [3]"
    calls = [flight_recorder.Call(sequence=3, begin=1.0, end=end, words=words) for end in (2.0, -2.0)]
    texts = [stacks.last_collective([call], "", 5.0) for call in calls]
    assert [text.rpartition(" ")[2] for text in texts] == ["(finished)", "(launched)"]
    assert flight_recorder.on_gpu([torch.ones(1), torch.ones(1).as_subclass(Posing)])
    assert not flight_recorder.on_gpu(torch.ones(1))
