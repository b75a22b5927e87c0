"""The benchmark of GPUs where there is none: its checks can fail, and it says so in one line."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import gpu
from ddp_course.errors import RankError
from ddp_course.running.devices import rank_device

CPU = argparse.Namespace(device="cpu", repeats=1)
BARE = """
import sys
from importlib.machinery import PathFinder

ABSENT = {"tabulate", "tqdm", "psutil", "cloudpickle", "sklearn", "scipy", "simpy", "matplotlib",
          "IPython", "ipywidgets", "nbformat", "pytest"}

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
"""


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


def test_a_part_that_fails_does_not_cost_the_others():
    def fails(args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    part = gpu.on_device(fails)(CPU)
    assert part.rows == [
        {"ended by": "RuntimeError: CUDA error: an illegal memory access was encountered"}
    ]
    assert [promise.record()["kept"] for promise in part.promises] == [False] and part.also[
        "device"
    ] == "cpu"


def test_it_needs_torch_numpy_and_the_package_only(tmp_path):
    """All processes, the ranks too, are without what a borrowed machine may not have."""
    (tmp_path / "sitecustomize.py").write_text(BARE)
    command = [sys.executable, "-m", "benchmarks", "gpu", "--only", "exactness", "--device", "cpu"]
    ended = subprocess.run(
        [*command, "--repeats", "1", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(gpu.__file__).parents[1]}"},
    )
    assert ended.returncode == 0 and (tmp_path / "gpu.json").exists(), ended.stderr
    assert "Not looked at without a GPU: NCCL" in ended.stdout
    assert (
        "No module named 'tqdm'"
        in subprocess.run(
            [sys.executable, "-c", "import tqdm"],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        ).stderr
    ), "nothing was absent"
