"""Launches over virtual hosts, ended in every way at random moments: no process, namespace or interface may stay.

python tests/soak/links.py --count 100
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "running" / "links"))

from test_links_end import check_gone, interfaces, me_and_mine, ranks_up

from ddp_course import launch, ring_all_reduce
from ddp_course.errors import CourseError
from ddp_course.running.links import Link

VICTIMS = ("rank", "agent", "server", None)


def work(folder, rounds):
    """Write down where this rank is, then reduce for a while."""
    Path(folder, f"{dist.get_rank()}.partial").write_text(json.dumps(me_and_mine()))
    dist.barrier()
    Path(folder, f"{dist.get_rank()}.partial").rename(Path(folder, f"{dist.get_rank()}.json"))
    for _ in range(rounds):
        ring_all_reduce(torch.ones(10_000))


def end_once(victim, world_size, link, delay):
    """One launch, its `victim` killed `delay` seconds after all ranks are up; raises if anything is wrong after it."""
    before, failed = interfaces(), []

    def run():
        try:
            launch(work, folder, 50 if victim is None else 10**6, world_size=world_size, device="cpu", link=link)
        except CourseError as error:
            failed.append(error)

    with tempfile.TemporaryDirectory() as folder:
        thread = threading.Thread(target=run)
        thread.start()
        ranks = ranks_up(folder, world_size)
        if victim is not None:
            time.sleep(delay)
            os.kill(random.choice(ranks)[victim], signal.SIGKILL)
        thread.join(60)
        assert not thread.is_alive() and bool(failed) == (victim is not None), (victim, failed)
    check_gone(ranks)
    assert interfaces() == before


def main():
    """Run the soak; the exit code is 0 only if every launch left nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    link = Link(mode="hosts")
    for number in range(arguments.count):
        victim, world_size = VICTIMS[number % len(VICTIMS)], random.choice((2, 3, 4))
        end_once(victim, world_size, link, random.random() * 0.3)
    print(f"{arguments.count} launches over virtual hosts left nothing behind")


if __name__ == "__main__":
    main()
