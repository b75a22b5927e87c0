"""Train under torchrun while a rank is killed every few seconds.

The run must end with the bits of one without faults.

    python tests/soak/faults.py --minutes 30

Every fault is one of: SIGKILL, SIGSEGV, SIGTERM of a random rank. torchrun starts all ranks again
from the newest checkpoint. A short pause in every step makes the run last as long as the faults;
after the last fault it stops pausing.
"""

import argparse
import math
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

from ddp_course import checkpoint, launch

SLOW_TRAIN = Path(__file__).parents[2] / "exercises/clinic/slow_train.py"
FAULTS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
OPTIONS = [
    "--problem",
    "bytes",
    "--parameters",
    "30000",
    "--dropout",
    "0.2",
    "--global-batch",
    "24",
    "--stage",
    "6",
]


def unharmed(options, world_size):
    """Return the result of the same run without faults."""

    def run():
        from ddp_course import train

        torch.set_num_threads(1)  # torchrun sets the same.
        train.say = lambda text: None
        return train.run(train.parse(options))

    return launch(run, world_size=world_size, timeout=3600)[0]


def ranks_of(agent):
    """Return the processes that train, by rank."""
    ranks = {}
    for process in psutil.Process(agent.pid).children(recursive=True):
        try:
            ranks[int(process.environ()["RANK"])] = process
        except (KeyError, psutil.Error):
            continue  # this is a helper process, or it has just ended
    return ranks


def run_with_faults(options, world_size, minutes, every, pause, chance, folder, enough=math.inf):
    """Train under torchrun, with a fault every `every` seconds; return how many there were.

    The end comes after `minutes`, or after `enough` faults.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={world_size}", "--max-restarts=100000"]
    command += ["--monitor-interval=0.1", str(SLOW_TRAIN), *options]
    command += ["--checkpoint", f"{folder}/run"]
    hurry = Path(folder, "hurry")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TMPDIR": folder,
        "PAUSE": str(pause),
        "HURRY": str(hurry),
    }
    faults = 0
    with open(Path(folder, "log"), "w") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        begun = time.monotonic()
        end = begun + 60 * minutes
        due = begun + every
        try:
            while agent.poll() is None:
                now = time.monotonic()
                if now >= end or faults >= enough:
                    end = now
                    hurry.touch()
                ranks = ranks_of(agent) if due <= now < end else {}
                if len(ranks) == world_size and checkpoint.checkpoints(f"{folder}/run"):
                    chance.choice(list(ranks.values())).send_signal(chance.choice(FAULTS))
                    faults += 1
                    due = now + every * chance.uniform(0.5, 1.5)
                time.sleep(0.05)
        finally:
            agent.terminate()  # This changes nothing if the agent has ended.
            agent.wait()
    assert agent.returncode == 0, Path(folder, "log").read_text()[-5000:]
    assert hurry.exists(), "the run ended before its time"
    return faults


def soak(minutes, every=20.0, world_size=2, pause=0.03, seed=0, enough=math.inf):
    """Train once for `minutes`, with faults; return (faults, steps).

    Raises AssertionError if a bit differs.
    """
    steps = int(60 * minutes / pause)  # the pauses of these steps alone take `minutes`
    options = [*OPTIONS, "--steps", str(steps), "--every", "10", "--seed", str(seed)]
    with tempfile.TemporaryDirectory() as folder:
        faults = run_with_faults(
            options, world_size, minutes, every, pause, random.Random(seed), folder, enough
        )
        state = checkpoint.load(f"{folder}/run")
    expected = unharmed(options, world_size)
    assert state["losses"] == expected["losses"], "the curve differs"
    assert all(
        torch.equal(state["model"][name], tensor) for name, tensor in expected["model"].items()
    )
    return faults, steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=30, help="how long there are faults (default 30)"
    )
    parser.add_argument(
        "--every", type=float, default=20, help="seconds between faults, on average (default 20)"
    )
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument(
        "--pause", type=float, default=0.03, help="seconds that each step waits (default 0.03)"
    )
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    faults, steps = soak(chosen.minutes, chosen.every, chosen.world_size, chosen.pause, chosen.seed)
    print(
        f"{faults} faults in {chosen.minutes:g} minutes, {steps} steps: every bit as in a run"
        " without faults"
    )
