"""The benchmark of GPUs where there is none: its checks can fail, and it says so in one line."""

import argparse

import pytest
import torch
import torch.distributed as dist

from ddp_course.commands.bench import gpu
from ddp_course.errors import RankError
from ddp_course.running.devices import rank_device

CPU = argparse.Namespace(device="cpu", repeats=1)


def test_without_a_gpu_it_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(gpu, "usable_gpus", lambda: 0)
    for part in gpu.BENCHMARK.parts.values():
        with pytest.raises(ValueError, match="no GPU here that CUDA can use; --device cpu"):
            part(argparse.Namespace(device="cuda", repeats=1))


def test_failures_are_told_and_silence_is_noticed():
    assert gpu.told(RankError, "killed: by SIGKILL", gpu.killed, "cpu")
    assert gpu.told(RankError, "rank 1", gpu.out_of_memory, "cpu")
    assert not gpu.told(RankError, "", gpu.total, "cpu"), "nothing failed"


def test_ranks_on_the_cpu_leave_cuda_alone(monkeypatch):
    assert gpu.no_context()
    monkeypatch.setattr(gpu, "cuda_after_training", lambda: dist.get_rank() == 1)
    assert not gpu.no_context()


def test_as_many_ranks_as_gpus(monkeypatch):
    monkeypatch.setattr(gpu, "usable_gpus", lambda: 5)
    assert gpu.world_sizes("cuda") == [1, 2, 4] and gpu.world_sizes("cpu") == [2]


def test_the_report_names_the_device():
    part = gpu.on_device(lambda args: gpu.Part([{"a": 1}]))(CPU)
    assert part.also == {"device": "cpu", "GPUs": 0} and rank_device() == torch.device("cpu")
