"""`python -m benchmarks simulator`: the simulator's speed."""

import argparse
from time import perf_counter

from ddp_course.lab.measuring.simulate import Layer, Network, Profile, simulate
from ddp_course.lab.measuring.theory import Costs

from .harness import Benchmark, Part, Promise

DEVICES = 4096
LAYERS = 500
MOST_SECONDS = 2  # The simulator may take so long for a step of all devices.


def speed(args: argparse.Namespace) -> Part:
    """Time the simulation of a step: DEVICES devices, and LAYERS layers, each its own bucket."""
    between_hosts = Costs(alpha=1e-5, beta=8e-11)  # These are 100 Gbit/s.
    inside_host = Costs(alpha=2e-6, beta=2.2e-12)  # These are about 450 GB/s, as NVLink's.
    network = Network(between_hosts, inside_host, per_host=8)
    layers = []
    for number in range(LAYERS):
        name = f"layer {number}"
        layers.append(Layer(name, forward_s=1e-4, backward_s=2e-4, gradient_bytes=2**20))
    profile = Profile(tuple(layers), update_s=1e-3)
    start = perf_counter()
    step = simulate(profile, DEVICES, network, bucket_cap_mb=1)
    seconds = perf_counter() - start
    row = {"devices": DEVICES, "buckets": len(step.buckets), "seconds": seconds}
    return Part([row], [Promise(f"{DEVICES:,} devices, seconds", seconds, MOST_SECONDS)])


BENCHMARK = Benchmark("simulator", "how fast the simulator is", {"speed": speed})
