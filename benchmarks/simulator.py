"""`python -m benchmarks simulator`: the simulator's speed."""

import argparse
from time import perf_counter

from ddp_course.measuring.simulate import Layer, Network, Profile, simulate
from ddp_course.measuring.theory import Costs

from .harness import Benchmark, Part, Promise

SECONDS = 2


def speed(args: argparse.Namespace, devices: int = 4096, buckets: int = 500) -> Part:
    """How long this machine takes to simulate a step of `devices` devices with `buckets`
    buckets.
    """
    network = Network(Costs(1e-5, 8e-11), Costs(2e-6, 2.2e-12), 8)  # of hosts with eight devices
    profile = Profile(tuple(Layer(f"layer {k}", 1e-4, 2e-4, 2**20) for k in range(buckets)), 1e-3)
    start = perf_counter()
    step = simulate(profile, devices, network, bucket_cap_mb=1)
    row = {"devices": devices, "buckets": len(step.buckets), "seconds": perf_counter() - start}
    return Part([row], [Promise(f"{devices:,} devices, seconds", row["seconds"], SECONDS)])


BENCHMARK = Benchmark("simulator", "how fast the simulator is", {"speed": speed})
