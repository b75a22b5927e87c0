"""Several hosts: virtual ones, and what `deploy/` would start on real ones.

This machine must allow the virtual ones.
"""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from ddp_course import checkpoint
from manyranks import launch, links
from manyranks.hosts import virtual_hosts

DEPLOY = Path(__file__).parents[1] / "deploy"
CLUSTERS = DEPLOY.parent / "docs" / "CLUSTERS.md"
MODEL = [
    "--problem=synthetic",
    "--parameters=66000",
    "--dtype=float64",
    "--lr=0.01",
    "--global-batch=24",
]
needs_hosts = pytest.mark.skipif(
    links.available()["hosts"] is not None, reason=f"no virtual hosts: {links.available()['hosts']}"
)


def run(arguments):
    from ddp_course import train

    torch.set_num_threads(1)
    train.say = lambda text: None
    return train.run(train.parse(arguments))


def expected(options, world_size):
    return launch(run, options, world_size=world_size)[0]


def assert_same_run(folder, result, tolerance=0.0):
    """Assert that the newest checkpoint in `folder` has the result's losses and weights."""
    state = checkpoint.load(folder)
    assert len(state["losses"]) == len(result["losses"])
    assert (
        max(abs(a - b) for a, b in zip(state["losses"], result["losses"], strict=True)) <= tolerance
    )
    for name, tensor in result["model"].items():
        assert (state["model"][name] - tensor).abs().max() <= tolerance


def finished(folder, command, seconds=900, **environment):
    """Return what the command prints.

    `folder` takes the log folders that torchrun leaves behind.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_hosts
def test_two_agents_on_two_hosts_train_as_one_machine_does(tmp_path):
    options = [*MODEL, "--stage", "4", "--steps", "5"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    torchrun += [
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=host0:29400",
        "-m",
        "ddp_course.train",
        *options,
    ]
    finished(
        tmp_path,
        [
            sys.executable,
            "-m",
            "manyranks.hosts.on_hosts",
            "--",
            *torchrun,
            "--checkpoint",
            str(tmp_path),
        ],
    )
    assert checkpoint.load(tmp_path)["world_size"] == 4
    assert_same_run(tmp_path, expected(options, 4))


@needs_hosts
def test_an_elastic_job_outlives_a_host_and_takes_in_another(tmp_path):
    options = [*MODEL, "--stage", "4", "--steps", "300"]
    script = [
        sys.executable,
        str(Path(__file__).parents[1] / "exercises/clinic/elastic.py"),
        str(tmp_path),
        *options,
    ]
    lines = finished(tmp_path, script).splitlines()
    assert [line.split(" at ")[0] for line in lines] == [
        *(f"world size {k}" for k in (2, 1, 2)),
        "codes [0, 0]",
    ]
    assert_same_run(tmp_path / "run", expected(options, 1), tolerance=1e-10)


@needs_hosts
def test_a_command_that_fails_on_a_host_is_reported():
    command = [sys.executable, "-m", "manyranks.hosts.on_hosts", "--hosts", "2", "--"]
    failed = subprocess.run(
        [*command, "sh", "-c", "hostname; exit {host}3"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert failed.returncode == 13
    assert sorted(failed.stdout.split()) == ["host0", "host1"]
    missing = subprocess.run([*command, "no-such-program"], capture_output=True, text=True)
    assert missing.returncode == 2
    assert "No such file or directory: 'no-such-program'" in missing.stderr


@needs_hosts
def test_a_host_finds_the_programs_beside_its_python(tmp_path):
    """A notebook opened as .venv/bin/jupyter has none of them on its search path."""
    command = [
        sys.executable,
        "-m",
        "manyranks.hosts.on_hosts",
        "--hosts",
        "1",
        "--",
        "torchrun",
        "--help",
    ]
    assert "--nproc-per-node" in finished(tmp_path, command, PATH="/usr/sbin:/usr/bin:/sbin:/bin")


CELL = """
import time
while len(ipyparallel.Client().ids) < 3:
    time.sleep(0.1)

def train():
    import torch, torch.distributed as dist
    total = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(total)
    return socket.gethostname(), os.environ["LOCAL_RANK"], total.item()

print([run(train), run(train)])
"""


@needs_hosts
def test_the_recipe_for_several_machines_from_a_cell_is_as_the_page_says(tmp_path):
    """There are two hosts, with one rank and with two; the group serves a second call, too."""
    pytest.importorskip("ipyparallel")
    page = CLUSTERS.read_text()
    controller, engine = re.findall("^    (ip.*)$", page, re.MULTILINE)
    recipe = page.partition("```python\n")[2].partition("```")[0]
    assert len([line for line in [controller, engine, *recipe.splitlines()] if line]) <= 25
    (tmp_path / "cell.py").write_text(recipe + CELL)
    file = tmp_path / "profile_default" / "security" / "ipcontroller-engine.json"
    controller = controller.replace("192.168.1.10", virtual_hosts.address(0))
    engine = f"until test -s {file}; do sleep 0.1; done; exec ipengine --file={file}"
    (tmp_path / "host0").write_text(
        f"{controller} & a=$!; ({engine}) & b=$!; {sys.executable} {tmp_path}/cell.py; code=$?\n"
        f"touch {tmp_path}/end; kill $a $b; exit $code"
    )
    (tmp_path / "host1").write_text(
        f"({engine}) & a=$!; ({engine}) & b=$!; until test -e {tmp_path}/end; do sleep 0.1; done\n"
        "kill $a $b"
    )
    hosts = [sys.executable, "-m", "manyranks.hosts.on_hosts", "--hosts=2", "--"]
    printed = finished(
        tmp_path, [*hosts, "sh", f"{tmp_path}/host{{host}}"], IPYTHONDIR=str(tmp_path)
    )
    places = [("host0", "0", 111.0), ("host1", "0", 111.0), ("host1", "1", 111.0)]
    assert repr([places, places]) in printed


def test_compare_trains_on_the_ranks_of_torchrun(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    compare = [
        "-m",
        "ddp_course.lab.cli",
        "compare",
        *MODEL,
        "--stages=1,4,7",
        "--steps=4",
        f"--out={tmp_path}/results",
    ]
    printed = finished(tmp_path, [*torchrun, *compare])
    assert printed.count("fully sharded") == 1
    results = json.loads((tmp_path / "results" / "compare.json").read_text())
    assert results["world_size"] == 2
    assert results["steps"] == 4
    assert results["backend"] == "gloo"
    assert results["emulated_device"] is None
    assert results["link"] is None
    single, ring, sharded = results["stages"]
    assert ring["bytes_sent_max"] == results["gradient_bytes"]  # 2 (K-1)/K p
    # Sharded ranks send 3 (K-1)/K p.
    assert sharded["bytes_sent_max"] == pytest.approx(1.5 * ring["bytes_sent_max"], rel=0.1)
    for entry in (ring, sharded):
        assert len(entry["timeline"]) >= 2
        assert 0 < entry["max_abs_diff_vs_single"] < 1e-12
        assert entry["loss"] == pytest.approx(single["loss"], abs=1e-12)
        assert len(set(entry["loss"])) == 4
    assert (tmp_path / "results" / "compare.png").read_bytes().startswith(b"\x89PNG")


def programs(folder, **scripts):
    """Write programs into `folder`; returns a PATH that begins with it."""
    for name, text in scripts.items():
        file = folder / name
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IEXEC)
    return os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])


SRUN = """#!/bin/bash
# Stands in for Slurm: runs the command as $SLURM_NTASKS tasks on this machine.
while [[ $1 == --* ]]; do shift; done
pids=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=$SLURM_NTASKS \\
        SLURM_STEP_NODELIST=localhost SLURM_STEP_TASKS_PER_NODE=$SLURM_NTASKS "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
"""
SCONTROL = """#!/bin/bash
[[ "$*" == "show hostnames localhost" ]] && printf 'localhost\\nlocalhost\\n'
"""


@pytest.mark.parametrize("file", ["slurm.sbatch", "slurm-tasks.sbatch"])
def test_the_slurm_scripts(tmp_path, file):
    path = programs(tmp_path, srun=SRUN, scontrol=SCONTROL)
    options = [*MODEL, "--stage", "6", "--steps", "3"]
    job = {
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": str(os.getpid()),
    }
    job |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NAME": "ddp-course", "SLURM_NTASKS": "2"}
    finished(tmp_path, ["bash", str(DEPLOY / file), *options], PATH=path, RANKS_PER_NODE="1", **job)
    assert_same_run(tmp_path / "runs" / job["SLURM_JOB_ID"], expected(options, 2))


@pytest.mark.parametrize("code, restarts, queued", [(1, 0, True), (1, 3, False), (2, 0, False)])
def test_a_job_with_a_failed_rank_is_queued_again(tmp_path, code, restarts, queued):
    note = tmp_path / "queued"
    path = programs(
        tmp_path, srun=f"#!/bin/bash\nexit {code}\n", scontrol=f"#!/bin/bash\necho $* > {note}\n"
    )
    job = {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path)}
    job["SLURM_RESTART_COUNT"] = str(restarts)
    ended = subprocess.run(["bash", DEPLOY / "slurm-tasks.sbatch"], env={**os.environ, **job})
    assert ended.returncode == code
    assert note.exists() == queued
    assert not queued or note.read_text() == "requeue 7\n"


def test_the_kubernetes_job(tmp_path):
    job = yaml.safe_load((DEPLOY / "pytorchjob.yaml").read_text())
    assert job["apiVersion"] == "kubeflow.org/v1"
    assert job["kind"] == "PyTorchJob"
    policy = job["spec"]["elasticPolicy"]
    workers = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    [container] = workers["template"]["spec"]["containers"]
    assert container["name"] == "pytorch", "the operator looks for this name"
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    environment |= {  # The operator adds these.
        "PET_NNODES": f"{policy['minReplicas']}:1",
        "PET_NPROC_PER_NODE": str(policy["nProcPerNode"]),
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ENDPOINT": "localhost:0",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PATH": programs(tmp_path),
    }
    mount = container["volumeMounts"][0]["mountPath"]
    arguments = [word.replace(mount, str(tmp_path)) for word in container["args"]]
    options = [*MODEL, "--steps", "3"]
    finished(tmp_path, [*container["command"], *arguments, *options], **environment)
    assert_same_run(tmp_path / "first", expected([*options, "--stage", "6"], 2))
