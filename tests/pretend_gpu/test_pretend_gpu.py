"""Pretended GPUs find planted mistakes and mutants of waits, and are silent on right code.

The mutants are of the course's own waits.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pretend_gpu
from pretend_gpu import build

HOME = Path(__file__).parent
ROOT = HOME.parents[1]
pytestmark = pytest.mark.skipif(bool(build.why_not()), reason=str(build.why_not()))
# Each mistake, and how it must show: by a kind of finding, or in the words of an error.
MISTAKES = {
    "missing_wait": "race",
    "too_early": "race",
    "not_awaited": "race",
    "freed_early": "race",
    "other_device": "Expected all tensors to be on the same device",
    "other_collective": "NCCL would hang here",
    "new_thread": "context",
    "item_in_the_loop": "waits",
}
THREAD = "communication.py"
MUTANTS = {  # stage, a file of the course, a line, what stands there instead, and how it must show
    "the thread does not wait for the gradient": (
        "5", THREAD, "                ready.wait()", "                pass", "race",
    ),
    "the thread waits for another stream": (
        "5", THREAD, "torch.cuda.current_stream(device).record_event()",
        "torch.cuda.Stream(device).record_event()", "race",
    ),
    "nobody waits for the thread's stream": (
        "5", THREAD, "                finished.wait()", "                pass", "race",
    ),
    "the thread stays on GPU 0": (
        "5", THREAD, "torch.cuda.set_device(stream.device)", "pass", "context",
    ),
    "the ranks stay on GPU 0": (
        "4", "../manyranks/devices/placement.py", "        torch.cuda.set_device(device)\n", "\n",
        "context",
    ),
    "nobody waits for the backend": (
        "6", "stage6_ddp/bucket_sums.py", "            work.wait()", "            pass", "race",
    ),
    "nobody waits for a hook's future": (
        "6", "stage6_ddp/bucket_sums.py", "future.wait()", "future.value()", "race",
    ),
    "the ring does not wait for its messages": (
        "4", "wire.py", "                work.wait()\n        except",
        "                pass\n        except", "race",
    ),
    "a pipeline does not wait for an activation": (
        "8", "stage8_pipeline/transfers.py", "            transfer.wait()\n        sent",
        "            pass\n        sent", "race",
    ),
    "nobody holds a message's memory until it has been sent": (
        "7", "stage7_sharded/flat.py",
        "return message if communication.is_queued(message.device) else None", "return None",
        "race",
    ),
    "a block's memory is taken when the thread gets there": (
        "7", "stage7_sharded/fsdp.py",
        "block.make_room()\n            block.gathering = self.start("
        '"gather", block, block.gather)',
        'late = lambda: (__import__("time").sleep(0.02), block.make_room())\n'
        "            block.gathering = self.start("
        '"gather", block, lambda group: late() and block.gather(group))',
        "race",
    ),
    "the plan of the buckets is read number by number": (
        "6", "stage6_ddp/reducer.py", "numbers = plan.tolist()",
        "numbers = [number.item() for number in plan]", "waits",
    ),
}  # fmt: skip
RULES = {  # how each breach of a rule of NCCL shows in the words of an error
    "a lonely message": "not all ranks came to communicator 0/0-1",
    "a lonely batch": "not all ranks came to communicator 0/all",
    "one after the other": "did not end",
    "one thread": "two threads use one NCCL communicator",
}
ALWAYS = {"nobody waits for the backend", "missing_wait", "a lonely batch"}


def run(script, *arguments, log, course=ROOT, gpus=2):
    """Run a script on pretended GPUs with the course in `course`: what it printed, and findings."""
    environment = pretend_gpu.environment(gpus, log, patience=15)
    # This course comes first, before any that the environment names.
    environment["PYTHONPATH"] = str(course) + os.pathsep + environment["PYTHONPATH"]
    done = subprocess.run(
        [sys.executable, str(HOME / script), *arguments],
        env=environment, cwd=course, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done, pretend_gpu.read(log)


def copy_packages(folder):
    """Copy the library and the course into a folder.

    The library's server imports what lies beside it before all else, so a mutant of the course
    needs a library of its own.
    """
    for package in ("manyranks", "ddp_course"):
        shutil.copytree(ROOT / package, folder / package)


def kinds_of(findings):
    """Return the kinds of findings. That a run fails is none: it may have failed for any reason."""
    kinds = {
        "race": findings.races,
        "context": findings.foreign,
        "communicator": findings.late,
        "waits": findings.syncs.total() >= 40,
    }
    return {kind for kind, those in kinds.items() if those}


def marked(names):
    """Return the parameters of a test: one is for make test-rest, and all others for the week."""
    parameters = []
    for name in names:
        mark = pytest.mark.slow if name in ALWAYS else pytest.mark.weekly
        parameters.append(pytest.param(name, marks=mark))
    return parameters


def test_the_stages_train_with_nccl_as_one_device_does_and_nothing_is_found(tmp_path):
    done, findings = run("train_all.py", log=tmp_path / "log")
    assert done.returncode == 0, done.stderr[-2000:]
    assert not kinds_of(findings) - {"waits"}, findings
    assert findings.communicators >= 2
    assert set(findings.peaks) == {0, 1}
    plans = [count for place, count in findings.syncs.items() if "(rebuild)" in place]
    assert sum(plans) == 6, "stage 6's plan is read once for each of 2 ranks and 3 wrappers"


SHARDED = """
import torch
from ddp_course import launch
from manyranks.devices import rank_device
from ddp_course.stage7_sharded import FullyShardedDataParallel

WIDTH = 256


def peak_in_blocks():
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(12)]
    parallel = FullyShardedDataParallel(torch.nn.Sequential(*layers).to(rank_device()))
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        parallel.zero_grad()
        parallel(torch.ones(1, WIDTH, device=rank_device())).sum().backward()
    return torch.cuda.max_memory_allocated() / (4 * WIDTH**2)


if __name__ == "__main__":
    print(max(launch(peak_in_blocks, world_size=2)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("line, instead", [("", ""), ("len(self.reducing) > 1", "False")])
def test_a_sharded_model_has_few_blocks_and_gradients_whole_at_a_time(line, instead, tmp_path):
    """Of 12 blocks a rank keeps half, and half of the gradients; the control keeps all of them."""
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    copy_packages(tmp_path)
    path = tmp_path / "ddp_course" / "stage7_sharded" / "fsdp.py"
    path.write_text(path.read_text().replace(line, instead) if line else path.read_text())
    done, findings = run(script, log=tmp_path / "log", course=tmp_path)
    assert done.returncode == 0, (done.stderr[-2000:], findings.races)
    assert not findings.races, (done.stderr[-2000:], findings.races)
    assert (float(done.stdout) < 23) == (not line), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_that_sends_is_right_with_nccl_and_a_step_does_not_wait_for_each_part(ranks, tmp_path):
    done, findings = run("send_all.py", str(ranks), log=tmp_path / "log", gpus=ranks)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not kinds_of(findings) - {"waits"}, findings
    assert findings.communicators > 10


@pytest.mark.parametrize("rule", marked(RULES))
def test_nccls_rules_bite(rule, tmp_path):
    done, _ = run("send_all.py", "2", rule, log=tmp_path / "log")
    assert done.returncode, done.stderr[-2000:]
    assert RULES[rule] in done.stderr, done.stderr[-2000:]


@pytest.mark.parametrize("mutant", marked(MUTANTS))
def test_a_wait_that_is_missing_in_the_course_is_found(mutant, tmp_path):
    stage, file, line, instead, shows = MUTANTS[mutant]
    copy_packages(tmp_path)
    path = tmp_path / "ddp_course" / file
    assert path.read_text().count(line) == 1, line
    path.write_text(path.read_text().replace(line, instead))
    done, findings = run("train_all.py", stage, log=tmp_path / "log", course=tmp_path)
    assert shows in kinds_of(findings), (done.stderr[-2000:], findings)


@pytest.mark.parametrize("mistake", marked(MISTAKES))
def test_a_planted_mistake_is_found_and_the_right_way_is_silent(mistake, tmp_path):
    done, findings = run("mistakes.py", mistake, "right", log=tmp_path / "right")
    assert done.returncode == 0, (done.stderr[-2000:], findings)
    assert not kinds_of(findings), (done.stderr[-2000:], findings)
    assert not findings.syncs, findings.syncs
    done, findings = run("mistakes.py", mistake, "wrong", log=tmp_path / "wrong")
    shows = MISTAKES[mistake]
    assert shows in kinds_of(findings) or (done.returncode != 0 and shows in done.stderr), (
        done.stderr[-2000:],
        findings,
    )
