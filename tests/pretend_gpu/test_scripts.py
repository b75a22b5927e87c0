"""What runs outside of lessons, on pretended GPUs: scripts under torchrun, the doctor, a trace."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pretend_gpu
from pretend_gpu import build

pytestmark = pytest.mark.skipif(bool(build.why_not()), reason=str(build.why_not()))
ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")


def started(gpus, log, *words):
    """Run `python WORDS` with so many GPUs: the ended process, and findings."""
    done = subprocess.run(
        [sys.executable, *words],
        env=pretend_gpu.environment(gpus, log) | {"TMPDIR": str(log.parent)}, cwd=log.parent,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done, pretend_gpu.read(log)


def run(gpus, log, *words):
    """Run a script in which nothing may fail; return what was printed, and the findings."""
    done, findings = started(gpus, log, *words)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-3000:])
    return done.stdout, findings


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_short_script_runs_with_more_ranks_than_gpus_and_with_one_for_each(gpus, tmp_path):
    _, findings = run(gpus, tmp_path / "log", *TORCHRUN, "ddp_course.script", "runs", "ours")
    assert bool(findings.communicators) == (gpus == 2)
    assert not findings.foreign
    assert not findings.races


def test_a_training_that_goes_on_keeps_to_its_gpus_and_takes_leave_of_nccl(tmp_path):
    words = [*TORCHRUN, "ddp_course.train", "--problem", "synthetic", "--checkpoint", "runs"]
    run(2, tmp_path / "first", *words, "--every", "2", "--steps", "2")
    printed, findings = run(2, tmp_path / "log", *words, "--every", "2", "--steps", "4")
    assert "step 4/4" in printed
    assert "step 2/4" not in printed
    assert not findings.foreign
    assert not findings.races
    assert findings.communicators
    assert findings.farewells == 2


@pytest.mark.parametrize(
    "gpus, sum_on, cells",
    [
        (1, "cuda with gloo", "2 ranks share the GPU and talk through gloo"),
        (2, "cuda with NCCL", "2 ranks, a GPU each, with NCCL"),
    ],
)
def test_the_doctors_two_ranks_send_as_it_says(gpus, sum_on, cells, tmp_path):
    printed, findings = run(gpus, tmp_path / "log", "-m", "ddp_course.lab.cli", "doctor")
    assert f"their sum on {sum_on} is right" in printed
    assert cells in printed
    assert printed.count("Pretended GPU") == gpus
    assert bool(findings.communicators) == (gpus > 1)


@pytest.mark.parametrize("words", [["-m", "ddp_course.lab.cli"], [*TORCHRUN, "ddp_course.lab.cli"]])
def test_compare_chooses_a_problem_that_is_large_enough(words, tmp_path):
    options = ["compare", "--stages", "3", "--steps", "2", "--global-batch", "16", "--out", "out"]
    _, findings = run(2, tmp_path / "log", *words, *options)
    results = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert results["problem"] == "bytes"
    assert results["global_batch"] == 16
    assert results["parameters"] > 40_000
    assert max(stage["max_abs_diff_vs_single"] for stage in results["stages"]) < 1e-4
    assert findings.communicators
    assert not findings.foreign
    assert not findings.races


ON_THE_MASTER = """
import torch
from ddp_course.stage2_dataparallel import replicate

model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512)).to("cuda:0")
model(torch.ones(2, 512, device="cuda:0")).sum().backward()
before = torch.cuda.memory_allocated(0)
torch.cuda.reset_peak_memory_stats(0)
_, copy = replicate(model, ["cuda:0", "cuda:1"])
assert {tensor.device.index for tensor in copy.state_dict().values()} == {1}
print(torch.cuda.max_memory_allocated(0) - before)
"""


def test_a_replica_is_made_where_it_works_and_not_on_the_master(tmp_path):
    printed, _ = run(2, tmp_path / "log", "-c", ON_THE_MASTER)
    assert int(printed) < 512 * 512


def test_stage_2_is_trained_on_the_one_gpu_that_was_asked_for(tmp_path):
    words = ["-m", "ddp_course.train", "--problem", "synthetic", "--stage", "2", "--steps", "2"]
    printed, findings = run(2, tmp_path / "log", *words, "--device", "cuda:1")
    assert "step 2/2" in printed
    assert set(findings.peaks) == {1}


def test_stage_2_has_all_gpus_under_torchrun(tmp_path):
    options = ["compare", "--problem", "synthetic", "--stages", "2", "--steps", "2", "--out", "out"]
    _, findings = run(2, tmp_path / "log", *TORCHRUN, "ddp_course.lab.cli", *options)
    assert any("GPU is 0 opened a context on GPU 1" in line for line in findings.foreign)
    assert not findings.races


def test_the_capstone_shards_over_ranks_on_the_processor_beside_a_gpu(tmp_path):
    script = [*TORCHRUN[:-1], str(ROOT / "exercises" / "15_capstone.py"), "runs"]
    options = ["--wrap", "fully_shard", "--device", "cpu", "--steps", "2"]
    printed, findings = run(1, tmp_path / "log", *script, *options)
    assert '"world_size": 2' in printed
    assert "processor" in printed
    assert not findings.communicators
    assert not findings.peaks


CLIPPED = """
import torch
from ddp_course import launch, stage9_tensor
from manyranks.devices import rank_device


def clip():
    layers = [torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)]
    model = stage9_tensor.parallelize(torch.nn.Sequential(*layers).to(rank_device()))
    model(torch.ones(2, 8, device=rank_device())).sum().backward()
    return stage9_tensor.clip_grad_norm_(model, 0.1).device.type


if __name__ == "__main__":
    print(launch(clip, world_size=2))
"""


def test_the_norm_of_a_split_model_stays_on_its_gpu(tmp_path):
    (tmp_path / "clipped.py").write_text(CLIPPED)
    printed, findings = run(2, tmp_path / "log", "clipped.py")
    assert printed.strip() == "['cuda', 'cuda']"
    assert not [place for place in findings.syncs if "clip" in place]


PARTS = [
    "exactness",
    *(pytest.param(name, marks=pytest.mark.weekly) for name in ("scaling", "all_reduce", "trace")),
]


@pytest.mark.parametrize("part", PARTS)
def test_make_gpu_runs(part, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    words = ["-m", "benchmarks", "gpu", "--small", "--repeats", "1", "--only", part, "--out", "out"]
    done, _ = started(2, tmp_path / "log", *words)
    report = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert done.returncode in (0, 1), done.stderr[-2000:]  # A promise about speed may be broken.
    rows = report["parts"][part]["rows"]
    assert rows, rows
    assert not any("ended by" in row or "left out" in row for row in rows), rows
    for promise in report["parts"][part]["promises"]:
        assert promise["kept"] or "efficiency" in promise["promise"], promise


OWN_TRACE = """
from ddp_course.lab import show, traces

if __name__ == "__main__":
    figure = show.own_trace("trace.json")
    [step] = traces.read("trace.json")
    assert [reduced.numbers for reduced in step.reduced] and step.seconds_in("compute") > 0
    print(figure.message)
"""


def test_a_step_on_these_gpus_is_recorded_and_drawn(tmp_path):
    (tmp_path / "own.py").write_text(OWN_TRACE)
    printed, findings = run(2, tmp_path / "log", "own.py")
    assert "% of it hidden under the backward pass" in printed
    assert findings.communicators
    assert not findings.foreign
    assert not findings.races
