"""The training script: every stage, and runs that are stopped, killed and resumed."""

import os
import signal
import subprocess
import sys
import time
from itertools import product

import psutil
import pytest
import torch
from processes import still_running

from ddp_course import checkpoint, launch
from manyranks.errors import RankError
from manyranks.joining.join import first_node, from_slurm, tasks_on_node

MODEL = ["--problem", "synthetic", "--parameters", "260000", "--dtype", "float64"]
SYNTHETIC = [*MODEL, "--steps", "6", "--global-batch", "24", "--lr", "0.01"]
BYTES = ["--problem", "bytes", "--parameters", "30000", "--dropout", "0.2", "--global-batch", "8"]

WORLD_SIZES = [2, pytest.param(4, marks=pytest.mark.slow)]


def run(arguments, **changes):
    """Return what the script does in one rank, without what is printed.

    `changes` replace functions of it.
    """
    from ddp_course import train

    torch.set_num_threads(1)  # the same bits as under torchrun, which gives each rank one thread
    train.say = lambda text: None
    for name, function in changes.items():
        setattr(train, name, function)
    result = train.run(train.parse(arguments))
    assert not torch.backends.cudnn.allow_tf32, "on a GPU convolutions would round to 10 bits"
    return result


def each_stage(stages, options):
    return {stage: run(["--stage", stage, *options]) for stage in stages}


def apart(one, other):
    """Return the greatest difference between two results' weights and losses."""
    weights = [
        (one["model"][name] - tensor).abs().max().item() for name, tensor in other["model"].items()
    ]
    return max(*weights, *(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True)))


@pytest.fixture(scope="module")
def alone():
    return launch(each_stage, ["1", "2"], [*SYNTHETIC, "--every", "4"], world_size=1)[0]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_stage_trains_the_same_model(alone, world_size):
    assert apart(alone["1"], alone["2"]) < 1e-11
    stages = ["3", "4w", "4", "5", "6", "7o", "7", "9", "torch"]
    if world_size == 2:
        stages.append("8")
    for rank in launch(each_stage, stages, SYNTHETIC, world_size=world_size):
        assert {stage for stage in stages if apart(rank[stage], alone["1"]) > 1e-11} == set()


@pytest.mark.parametrize(
    "options", [("--stage", "8", "--pipeline", "2"), ("--stage", "9", "--tensor", "2")]
)
def test_split_models_side_by_side(options):
    expected = launch(run, [*SYNTHETIC, "--stage", "1"], world_size=1)[0]
    for rank in launch(run, [*SYNTHETIC, *options], world_size=4):
        assert apart(rank, expected) < 1e-11


def stopped_and_resumed(cases, folder, options):
    """Train half way with one stage and go on with another; and never stop at all.

    It does so for each (stage, next stage).
    """
    results = {}
    for number, (first, then) in enumerate(cases):
        saving = [*options, "--checkpoint", f"{folder}/{number}", "--every", "2"]
        run([*saving, "--stage", first, "--steps", "4"])
        resumed, again = (run([*saving, "--stage", then, "--steps", "7"]) for _ in range(2))
        results[first, then] = (
            resumed,
            run([*options, "--every", "2", "--steps", "7", "--stage", then]),
            again,
        )
    return results


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_stopped_run_goes_on_to_the_last_bit(tmp_path, world_size):
    stages = ["4w", "7o", "7", "9", "torch"]
    if world_size == 2:
        stages.append("8")
    cases = [(stage, stage) for stage in stages]
    ranks = launch(stopped_and_resumed, cases, str(tmp_path), BYTES, world_size=world_size)
    for case in cases:
        resumed, whole, again = ranks[0][case]
        assert resumed["resumed"] == 4
        assert again["resumed"] == 7
        assert apart(resumed, whole) == apart(again, whole) == 0, case
    for number, case in enumerate(cases):
        newest = checkpoint.load(tmp_path / str(number))
        assert newest["step"] == 7
        assert newest["world_size"] == len(newest["random"]) == world_size
        assert all(
            torch.equal(newest["model"][name], tensor)
            for name, tensor in ranks[0][case][1]["model"].items()
        )


REAL = {
    "bytes": BYTES,
    "digits": ["--problem", "digits", "--dropout", "0.3", "--global-batch", "24"],
}


def each_real_case(steps, folder):
    """Return {case: result} of stages 3 to 6 on both real problems up to `steps`.

    They go on from the checkpoints in `folder`.
    """
    results = {}
    for stage, problem in product(("3", "4", "5", "6"), REAL):
        place = [
            "--checkpoint",
            f"{folder}/{stage}-{problem}",
            "--every",
            "1",
            "--steps",
            str(steps),
        ]
        results[stage, problem] = run([*REAL[problem], "--stage", stage, *place])
    return results


def stopped_twice(folder, world_size):
    """Stop before stage 6 rebuilds its buckets, and after; return rank 0's results.

    Each leg has new processes.
    """
    for steps in (1, 3):
        launch(each_real_case, steps, f"{folder}/stopped", world_size=world_size)
    return launch(each_real_case, 6, f"{folder}/stopped", world_size=world_size)[0]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_stages_3_to_6_go_on_to_the_last_bit_on_real_problems(tmp_path, world_size):
    resumed = stopped_twice(tmp_path, world_size)
    whole = launch(each_real_case, 6, f"{tmp_path}/whole", world_size=world_size)[0]
    assert len(resumed) == 8
    assert {result["resumed"] for result in resumed.values()} == {3}
    assert {case for case, result in resumed.items() if apart(result, whole[case])} == set()


def test_a_run_goes_on_sharded_unsharded_and_split(tmp_path):
    cases = [("6", "7"), ("7", "3"), ("7o", "8"), ("8", "7o"), ("9", "6"), ("6", "9")]
    options = [*MODEL, "--global-batch", "24", "--lr", "0.01"]
    for rank in launch(stopped_and_resumed, cases, str(tmp_path), options, world_size=2):
        for case, (resumed, whole, _) in rank.items():
            assert apart(resumed, whole) < 1e-11, case


def test_another_world_size_goes_on_with_the_same_batches(tmp_path):
    options = [*SYNTHETIC, "--stage", "7", "--checkpoint", str(tmp_path), "--every", "2"]
    said = []

    def half():
        return run([*options, "--steps", "4"])

    def rest():
        return run(options, say=said.append), said

    launch(half, world_size=2)
    whole = launch(run, [*options[:-4]], world_size=3)[0]
    for resumed, lines in launch(rest, world_size=3):
        assert apart(resumed, whole) < 1e-12
        assert resumed["resumed"] == 4
        assert "was written by 2 ranks, this run has 3" in lines[0]


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    options = [*SYNTHETIC, "--stage", "4", "--checkpoint", str(tmp_path)]
    launch(run, options, world_size=1)
    before = sorted(file.read_bytes() for file in tmp_path.glob("*.pt"))
    with pytest.raises(
        RankError, match=r"CheckpointError: .*--seed 0 .now 5., --lr 0.01 .now 0.5."
    ):
        launch(run, [*options, "--seed", "5", "--lr", "0.5"], world_size=1)
    with pytest.raises(RankError, match="is at step 6, beyond --steps 4"):
        launch(run, [*options, "--steps", "4"], world_size=1)
    assert sorted(file.read_bytes() for file in tmp_path.glob("*.pt")) == before
    for file in tmp_path.glob("*.pt"):
        file.write_bytes(b"broken")
    with pytest.raises(RankError, match="are damaged"):
        launch(run, options, world_size=2)
    for foreign in ({"model": {}, "step": 3}, [1, 2], 3.0):
        checkpoint.save(tmp_path, foreign)
        with pytest.raises(RankError, match="is not one of this script"):
            launch(run, options, world_size=2)


def test_a_folder_that_cannot_be_written_is_found_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    began = tmp_path / "began"

    def notice(*rest):
        began.write_text("")

    with pytest.raises(
        RankError, match=r'no checkpoint could be written to ".*/file/run": Not a directory'
    ):
        launch(
            lambda: run(
                [*SYNTHETIC, "--checkpoint", f"{tmp_path}/file/run"],
                train_to_next_checkpoint=notice,
            ),
            world_size=2,
        )
    assert not began.exists()


def script(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--problem digits --parameters 5", '"parameters" cannot be chosen for digits'),
        ("--problem synthetic --dropout 0.1", '"dropout" cannot be chosen for synthetic'),
        ("--problem digits --dropout nan", "dropout is nan"),
        ("--problem digits --dropout 2", "dropout is 2.0"),
        ("--problem synthetic --parameters 99999999999", "is out of range"),
        ("--problem digits --pipeline 3 --stage 8", "cannot form a mesh"),
    ],
)
def test_bad_options_are_refused(arguments, message):
    with pytest.raises(RankError, match=message):
        launch(run, arguments.split(), world_size=1)


def test_the_script_alone(tmp_path):
    run_dir = str(tmp_path / "run")
    options = [*SYNTHETIC, "--stage", "6", "--checkpoint", run_dir]
    first = script("-m", "ddp_course.train", *options)
    assert first.returncode == 0, first.stderr
    assert "step 6/6  loss" in first.stdout, first.stderr
    again = script("-m", "ddp_course.train", *options)
    assert again.returncode == 0
    assert f"the run in {run_dir} is finished: 6 steps" in again.stdout
    wrong = script("-m", "ddp_course.train", *options, "--seed", "3")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("ddp_course.train: the checkpoint in")
    bad = script("-m", "ddp_course.train", "--problem", "synthetic", "--dropout", "2")
    assert bad.returncode == 2
    assert "dropout is 2.0" in bad.stderr
    expected = launch(run, options[:-2], world_size=1)[0]
    loaded = checkpoint.load(run_dir)
    assert loaded["losses"] == expected["losses"]
    assert all(
        torch.equal(loaded["model"][name], tensor) for name, tensor in expected["model"].items()
    )


def ranks_of(agent):
    """Return the processes that train, among the descendants of a torchrun, oldest first."""
    found = [
        process
        for process in psutil.Process(agent.pid).children(recursive=True)
        if "RANK" in process.environ()
    ]
    return sorted(found, key=lambda process: int(process.environ()["RANK"]))


@pytest.mark.skipif(
    sys.platform != "linux", reason="the system kills them on Linux; a thread does elsewhere"
)
@pytest.mark.parametrize(
    "program, seconds",
    [("ddp_course.script runs", 0), ("ddp_course.train --steps 100000", 6)],
    ids=["while they import", "in training"],
)
def test_ranks_end_when_their_torchrun_is_killed(tmp_path, program, seconds):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}  # A killed torchrun cannot tidy up.
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [*torchrun, "-m", *program.split()]
    job = subprocess.Popen(command, env=environ, cwd=tmp_path, **quiet)
    ranks = []
    while len(ranks) < 2:
        assert job.poll() is None, "torchrun ended"
        ranks = psutil.Process(job.pid).children()
    time.sleep(seconds)
    job.kill()
    job.wait()
    alive = still_running([rank.pid for rank in ranks])
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    assert not alive


def test_under_torchrun_a_killed_rank_costs_the_steps_since_the_last_checkpoint(tmp_path):
    options = [*BYTES, "--steps", "300", "--every", "10", "--stage", "6"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--max-restarts=3", "--standalone", "--monitor-interval=0.1"]
    command += ["-m", "ddp_course.train", *options, "--checkpoint", str(tmp_path)]
    # torchrun leaves folders behind in TMPDIR.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with open(tmp_path / "log", "w") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        for kill in range(2):
            wait_for(lambda: checkpoint.checkpoints(tmp_path), agent)
            newest = checkpoint.checkpoints(tmp_path)[0]
            wait_for(lambda newest=newest: checkpoint.checkpoints(tmp_path)[0] > newest, agent)
            ranks_of(agent)[kill].send_signal(signal.SIGKILL)
        assert agent.wait(600) == 0, (tmp_path / "log").read_text()
    finally:
        agent.terminate()  # torchrun ends its ranks, too.
        agent.wait(60)
    expected = launch(run, options, world_size=2)[0]
    loaded = checkpoint.load(tmp_path)
    assert loaded["losses"] == expected["losses"]
    assert loaded["step"] == 300
    for name, tensor in expected["model"].items():
        assert torch.equal(loaded["model"][name], tensor), name


def wait_for(condition, agent, seconds=600):
    end = time.monotonic() + seconds
    while not condition():
        assert agent.poll() is None, f"torchrun ended early, with code {agent.returncode}"
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def test_the_ranks_of_a_slurm_job():
    task = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
    }
    task |= {
        "SLURM_STEP_NODELIST": "gpu[03-07]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1(x2)",
        "SLURM_JOB_ID": "1234567",
    }
    joined = from_slurm(task)
    assert joined["RANK"] == "5"
    assert joined["WORLD_SIZE"] == "8"
    assert joined["LOCAL_RANK"] == "1"
    assert joined["LOCAL_WORLD_SIZE"] == "2"
    assert joined["MASTER_ADDR"] == "gpu03"
    assert joined["MASTER_PORT"] == "24567"
    assert from_slurm(task | {"MASTER_ADDR": "head", "MASTER_PORT": "7"})["MASTER_ADDR"] == "head"
    # The batch script itself is no rank.
    assert from_slurm({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("node1", "node1"),
        ("a[3,5],b", "a3"),
        ("a[003-12]", "a003"),
        ("gpu-1,gpu-2", "gpu-1"),
        ("r[1-2]n", "r1n"),
    ],
)
def test_the_first_node_of_a_list(nodes, first):
    assert first_node(nodes) == first


def test_tasks_on_each_node():
    assert [tasks_on_node("2(x3),1", node) for node in range(4)] == [2, 2, 2, 1]
