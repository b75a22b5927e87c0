"""The main job again and again: in every run each rung is faster than the last, and four devices beat one.

python tests/soak/comparison.py --count 20 [--world-size 2] [--link-mode wire]

Run it on a machine that does nothing else; under `taskset -c 0` for a machine of one core.
"""

import argparse
import sys
import time
from itertools import pairwise

import psutil

from ddp_course import compare

GAP = 1.1  # from rung to rung, up to the buckets
LEAST = {2: {"3": 1.05, "5": 1.6}, 4: {"3": 1.2, "5": 3.2}}  # times as fast as one device
OFF_IDEAL = {2: 0.08, 4: 0.20}
SECONDS, MEMORY, ACCURACY = 60.0, 2 << 30, 0.95


def wrong_in(results):
    """A line for everything that is not as the course promises."""
    world_size, stages = results["world_size"], {stage["stage"]: stage for stage in results["stages"]}
    took = {key: stage["step_ms"] for key, stage in stages.items()}
    order = ["1", "3", "4", "5"]
    found = [
        f"{before} to {after}: only {took[before] / took[after]:.2f} times as fast"
        for before, after in pairwise(order)
        if took[before] < GAP * took[after]
    ]
    found += [f"stage {key} takes longer than the buckets" for key in ("6", "torch") if took[key] > GAP * took["5"]]
    found += ["DataParallel is not below one device"] if took["2"] >= took["1"] else []
    for key, least in LEAST.get(world_size, {}).items():
        if stages[key]["speed_up"] < least:
            found.append(f"stage {key}: {stages[key]['speed_up']:.2f} times as fast, not {least}")
    for stage in stages.values():
        off = stage["step_ms"] / stage["ideal_ms"] - 1
        if abs(off) > OFF_IDEAL.get(world_size, 1.0):
            found.append(f"{stage['name']}: {off:+.1%} from its ideal")
        if stage["evaluation"]["accuracy"] < ACCURACY:
            found.append(f"{stage['name']}: accuracy {stage['evaluation']['accuracy']:.3f}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--link-mode", default="auto")
    options = parser.parse_args()
    bad = 0
    for number in range(1, options.count + 1):
        start, free = time.monotonic(), psutil.virtual_memory().available
        results = compare.run("digits", options.world_size, link_mode=options.link_mode, stages="1,2,3,4,5,6,torch")
        seconds, used = time.monotonic() - start, free - psutil.virtual_memory().available
        found = wrong_in(results)
        found += [f"took {seconds:.0f} s"] if seconds > SECONDS else []
        found += [f"kept {used >> 20} MiB"] if used > MEMORY else []
        bad += bool(found)
        times = ", ".join(f"{stage['stage']}: {stage['step_ms']:.0f}" for stage in results["stages"])
        print(f"{number}: {times} ms; {seconds:.0f} s; " + ("; ".join(found) or "as promised"), flush=True)
    print(f"{options.count - bad} of {options.count} runs as promised")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
