"""Several courses at once on one machine, as in a workshop on a hub: do their launches get in each other's way?

python tests/soak/courses.py --processes 8 --count 20
"""

import argparse
import subprocess
import sys
import time

COURSE = """
import sys
import torch, torch.distributed as dist
from ddp_course import launch, ring_all_reduce

def total(course):
    tensor = torch.full((1000,), float(course))
    ring_all_reduce(tensor)
    return tensor[0].item()

course, count = map(int, sys.argv[1:])
for number in range(count):
    world_size = 2 + number % 3
    assert launch(total, course, world_size=world_size) == [world_size * course] * world_size
"""


def main():
    """Run the courses; 0 if all of them got their results."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--processes", type=int, default=8)
    arguments.add_argument("--count", type=int, default=20)
    options = arguments.parse_args()
    begin = time.monotonic()
    courses = [
        subprocess.Popen([sys.executable, "-c", COURSE, str(course), str(options.count)])
        for course in range(options.processes)
    ]
    failed = [course for course, process in enumerate(courses) if process.wait() != 0]
    seconds = time.monotonic() - begin
    print(f"{options.processes} courses of {options.count} launches: {seconds:.0f} s, failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
