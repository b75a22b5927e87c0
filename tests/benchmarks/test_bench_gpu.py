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
from manyranks.devices import rank_device
from manyranks.errors import RankError

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
    assert gpu.raises_with(RankError, "killed: by SIGKILL", gpu.killed, "cpu")
    assert gpu.raises_with(RankError, "rank 1", gpu.out_of_memory, "cpu")
    assert not gpu.raises_with(RankError, "", gpu.total, "cpu"), "nothing failed"


def test_ranks_on_the_cpu_leave_cuda_alone(monkeypatch):
    assert gpu.no_context()
    monkeypatch.setattr(gpu, "cuda_after_training", lambda: dist.get_rank() == 1)
    assert not gpu.no_context()


def test_as_many_ranks_as_gpus(monkeypatch):
    monkeypatch.setattr(gpu, "usable_gpus", lambda: 5)
    assert gpu.world_sizes("cuda") == [1, 2, 4]
    assert gpu.world_sizes("cpu") == [2]


def test_the_report_names_the_device():
    part = gpu.on_device(lambda args: gpu.Part([{"a": 1}]))(CPU)
    assert part.also == {"device": "cpu", "GPUs": 0}
    assert rank_device() == torch.device("cpu")


def test_a_part_that_fails_does_not_cost_the_others():
    def fails(args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    part = gpu.on_device(fails)(CPU)
    assert part.rows == [
        {"ended by": "RuntimeError: CUDA error: an illegal memory access was encountered"}
    ]
    assert [promise.record()["kept"] for promise in part.promises] == [False]
    assert part.also["device"] == "cpu"


def report(GPUs, backend, left=True, kept=True):
    """Return a report as it would be of a machine with so many GPUs."""
    promises = [{"promise": "p", "kept": kept}]
    exact = [{"backend": "gloo", "world_size": 2, "distance": 0.0}]
    if backend == "NCCL":
        exact.append({"backend": "cpu:gloo,cuda:nccl", "world_size": 2, "distance": 0.0})
    checks = [
        {"check": "a rank that never comes", "backend": backend, "as it should be": True},
        {"check": gpu.NOTHING_LEFT, "backend": backend, "as it should be": left},
    ]
    parts = {
        "exactness": {"rows": exact, "promises": promises},
        "safety": {"rows": checks, "promises": promises},
        "steps": {"rows": [{"ours": 1.0}], "promises": promises, "GPUs": GPUs},
        "tests": {"rows": [], "promises": []},
    }
    return {"parts": parts}


def test_the_table_says_yes_no_or_why_not():
    def said(report):
        return {row["what"]: row["answer"] for row in gpu.answers(report)}

    two = said(report(2, "NCCL"))
    nccl = "all stages end like one device: a GPU for each rank, NCCL"
    assert two[nccl] == two["a rank that never comes (NCCL)"] == "yes"
    one = said(report(1, "gloo"))
    why = "not checked here, because NCCL wants a GPU for each of two ranks"
    assert one[nccl] == one["a rank that never comes (NCCL)"] == why
    assert one["a rank that never comes (gloo)"] == "yes"
    blind = said(report(1, "gloo", left=None, kept=False))
    assert "nvidia-smi" in blind[f"{gpu.NOTHING_LEFT} (gloo)"]
    assert blind["all stages end like one device: ranks on one device"] == "no"
    speed = "stage 6 takes as long and as much memory as torch's class"
    assert one[speed] == "yes"
    assert blind[speed] == "no"
    assert said(report(0, "gloo"))[speed] == "not checked here, because no GPU is here"
    assert two["the tests that are marked cuda"].startswith("not checked here")


@pytest.mark.slow
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
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "gpu.json").exists(), ended.stderr
    assert "Not looked at without a GPU: NCCL" in ended.stdout
    control = subprocess.run(
        [sys.executable, "-c", "import tqdm"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "No module named 'tqdm'" in control.stderr, "nothing was absent"
