"""Kill runs at random moments, in the middle of writing too, until they finish: the result must be the same bits.

python tests/soak/checkpoints.py --count 100
"""

import argparse
import os
import random
import signal
import tempfile
import threading
import time
import warnings
from itertools import cycle, product

import torch
import torch.distributed as dist

from ddp_course import launch
from ddp_course.errors import RankError

PROBLEMS = {
    "digits": ["--problem=digits", "--dropout=0.3", "--steps=24", "--global-batch=24"],
    "bytes": ["--problem=bytes", "--parameters=30000", "--dropout=0.2", "--steps=12", "--global-batch=8"],
}
CASES = list(product(("3", "4", "5", "6"), (2, 4), PROBLEMS))


def train(arguments, victim=None, delay=0.0):
    """One rank of a run; rank `victim` is killed `delay` seconds after the first step. Returns result, duration."""
    from ddp_course import train

    started, prepare = [], train.prepare

    def prepared(*args):
        ready = prepare(*args)
        started.append(time.perf_counter())
        if dist.get_rank() == victim:
            killer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
            killer.daemon = True
            killer.start()
        return ready

    train.prepare, train.say = prepared, lambda text: None
    result = train.run(train.parse(arguments))
    return result, time.perf_counter() - started[0]


def killed_until_finished(arguments, folder, world_size, duration, kills, chance):
    """Kill the run `kills` times at random moments, then let it finish.

    Returns the result, the number of kills that hit, and how many of them hit in the middle of writing.
    """
    hits = writing = 0
    for _ in range(kills):
        try:
            victim = chance.choice([0, chance.randrange(world_size)])  # rank 0 more often: it writes
            launch(train, arguments, victim, chance.uniform(0, duration), world_size=world_size)
        except RankError as error:
            assert error.type_name == "killed", error
            hits += 1
            writing += any(name.endswith(".tmp") for name in os.listdir(folder))
    return launch(train, arguments, world_size=world_size)[0][0], hits, writing


def same(result, expected):
    """Equal weights and losses, to the last bit."""
    names = expected["model"].keys()
    equal = all(torch.equal(result["model"][name], expected["model"][name]) for name in names)
    return equal and result["losses"] == expected["losses"] and names == result["model"].keys()


def soak(count, seed=0, cases=CASES, kills=3):
    """Kill runs `count` times or more and compare every resume; returns (kills, of them in the middle of writing)."""
    chance, expected, total, writing = random.Random(seed), {}, 0, 0
    for case in cycle(cases):
        if total >= count:
            return total, writing
        stage, world_size, problem = case
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("error")  # a damaged checkpoint would be skipped with a warning
            options = [*PROBLEMS[problem], "--stage", stage, "--every", "1", "--checkpoint"]
            if case not in expected:
                os.mkdir(unharmed := f"{folder}/unharmed")
                expected[case] = launch(train, [*options, unharmed], world_size=world_size)[0]
            os.mkdir(killed := f"{folder}/killed")
            arguments = [*options, killed], killed, world_size, 0.6 * expected[case][1], kills, chance
            result, hits, torn = killed_until_finished(*arguments)
            assert same(result, expected[case][0]), f"{case}: the resumed run is not the one that was never killed"
        total, writing = total + hits, writing + torn


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--count", type=int, default=100, help="kills in all (default 100)")
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    kills, writing = soak(chosen.count, chosen.seed)
    print(f"{kills} kills, {writing} of them in the middle of writing: every resume exact to the last bit")
