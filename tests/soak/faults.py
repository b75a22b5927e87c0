"""Train under torchrun while a rank is killed every few seconds: the run must end with the bits of one without faults.

    python tests/soak/faults.py --minutes 30

Every fault is one of: SIGKILL, SIGSEGV, SIGTERM of a random rank. torchrun starts all ranks again from the newest
checkpoint. Should the run end early, the next one starts, with another seed.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from ddp_course import launch
from ddp_course.running import checkpoint

FAULTS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
OPTIONS = ["--problem", "bytes", "--parameters", "30000", "--dropout", "0.2", "--global-batch", "24", "--stage", "6"]


def unharmed(options, world_size):
    """The result of the same run without faults."""

    def run():
        from ddp_course import train

        torch.set_num_threads(1)  # as torchrun does
        train.say = lambda text: None
        return train.run(train.parse(options))

    return launch(run, world_size=world_size, timeout=3600)[0]


def ranks_of(agent):
    """The processes that train, by rank."""
    ranks = {}
    for process in psutil.Process(agent.pid).children(recursive=True):
        try:
            ranks[int(process.environ()["RANK"])] = process
        except (KeyError, psutil.Error):
            continue  # a helper process, or one that has just ended
    return ranks


def run_with_faults(options, world_size, every, end, chance, folder):
    """Run torchrun, with a fault every `every` seconds until `end`, at least one; returns how many."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    command += ["--max-restarts=100000", "--monitor-interval=0.1", "-m", "ddp_course.train", *options]
    faults, environment = 0, {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder}
    with open(Path(folder, "log"), "a") as log:
        agent = subprocess.Popen([*command, "--checkpoint", f"{folder}/run"], stdout=log, stderr=log, env=environment)
        due = time.monotonic() + every
        try:
            while agent.poll() is None:
                now = time.monotonic()
                ranks = ranks_of(agent) if now >= due and (now < end or not faults) else {}
                if len(ranks) == world_size and checkpoint.checkpoints(f"{folder}/run"):
                    chance.choice(list(ranks.values())).send_signal(chance.choice(FAULTS))
                    faults += 1
                    due = time.monotonic() + every * chance.uniform(0.5, 1.5)
                time.sleep(0.05)
        finally:
            agent.terminate()  # nothing happens if it has ended
            agent.wait()
    if agent.returncode:
        raise AssertionError(Path(folder, "log").read_text()[-5000:])
    return faults


def soak(minutes, every=20.0, world_size=2, steps=20_000, seed=0):
    """Runs with faults for so many minutes; returns (runs, faults), raises AssertionError if a bit differs."""
    chance, runs, faults = random.Random(seed), 0, 0
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        options = [*OPTIONS, "--steps", str(steps), "--every", "10", "--seed", str(runs)]
        with tempfile.TemporaryDirectory() as folder:
            faults += run_with_faults(options, world_size, every, end, chance, folder)
            state = checkpoint.load(f"{folder}/run")
        expected = unharmed(options, world_size)
        assert state["losses"] == expected["losses"], "the curve differs"
        assert all(torch.equal(state["model"][name], tensor) for name, tensor in expected["model"].items())
        runs += 1
    return runs, faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30, help="how long there are faults (default 30)")
    parser.add_argument("--every", type=float, default=20, help="seconds between faults, on average (default 20)")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20_000, help="of a run (default 20,000)")
    chosen = parser.parse_args()
    runs, faults = soak(chosen.minutes, chosen.every, chosen.world_size, chosen.steps)
    print(f"{runs} runs, {faults} faults: every bit as in runs without faults")
