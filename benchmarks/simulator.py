"""`python -m benchmarks simulator`: the simulator's speed and, with `--only own`, our own training predicted."""

import argparse
from time import perf_counter

from ddp_course.measuring.simulate import Layer, Profile, simulate
from ddp_course.measuring.simulate.network import Network
from ddp_course.measuring.theory import Costs

from .harness import Benchmark, Part, Promise, Row

SECONDS = 2
OWN_MEDIAN, OWN_LARGEST = 0.10, 0.20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where our own training is measured."""
    parser.add_argument("--link", default="200Mbit", help="bandwidth of the virtual hosts' links, for --only own")


def own_training(args: argparse.Namespace) -> Part:
    """Our own training over virtual hosts, calibrated at K = 2."""
    from . import own_training as own

    found = own.compare(args.link)
    table = [
        {"model": row["model"], "by": row["implementation"], "K": row["K"], "cap, MiB": row["bucket_cap_mb"]}
        | {"measured, ms": row["measured_ms"], "simulated, ms": row["predicted_ms"], "error": percent(row["error"])}
        | {"": kind(row)}
        for row in found["compared"]
    ]
    also = {name: value for name, value in found.items() if name != "compared"}
    return Part(found["compared"], promised_of_own(found["held_out_error"]), table, also)


def promised_of_own(error: Row) -> list[Promise]:
    """What is promised of the errors of the settings held out."""
    return [
        Promise("our own training, median error held out", error["median"], OWN_MEDIAN),
        Promise("our own training, largest error held out", error["largest"], OWN_LARGEST),
    ]


def speed(args: argparse.Namespace, devices: int = 4096, buckets: int = 500) -> Part:
    """Seconds in which this machine simulates a step of `devices` devices with `buckets` buckets."""
    profile = Profile(tuple(Layer(f"layer {k}", 1e-4, 2e-4, 2**20) for k in range(buckets)), 1e-3)
    start = perf_counter()
    step = simulate(profile, devices, Network(Costs(1e-5, 8e-11), Costs(2e-6, 2.2e-12), 8), bucket_cap_mb=1)
    row = {"devices": devices, "buckets": len(step.buckets), "seconds": perf_counter() - start}
    return Part([row], [Promise("4,096 devices, seconds", row["seconds"], SECONDS)])


def percent(error: float) -> str:
    """+3.1%"""
    return f"{error:+.1%}"


def kind(row: Row) -> str:
    """What a row served for."""
    return "held out" if row["held_out"] else "calibration"


PARTS = {"speed": speed, "own": own_training}
BENCHMARK = Benchmark(
    "simulator",
    "how fast the simulator is, and how well it knows our own training",
    PARTS,
    on_request=("own",),
    add_options=add_options,
)
