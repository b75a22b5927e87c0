"""`python -m benchmarks devices`: emulated devices beside the clock and beside the simulator.

"clock": a step without communication in a launch of 4 ranks, and what the emulation itself costs.
"steps": the comparison's stages at 2 and 4 ranks, each beside its ideal. "simulator": stage 5 on
random settings (ranks, buckets, devices, links), measured on emulated devices and predicted by the
simulator from the same device's layer times and the link's bandwidth, nothing fitted.
"""

import argparse
import random
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from ddp_course import ladder
from ddp_course.job import Job, make_job
from ddp_course.lab.measuring import comparison
from ddp_course.lab.measuring.recording import Recording
from ddp_course.lab.measuring.simulate import Network, simulate
from ddp_course.lab.measuring.theory import Costs
from manyranks.devices import Device
from manyranks.launching.launch import launch
from manyranks.links import Link

from .harness import Benchmark, Part, Promise

SETTINGS = 30
SEED = 11
STEPS = 8
RANKS = (2, 3, 4, 6, 8)
CAPS_MB = (0.02, 0.05, 0.1, 0.25, 25.0)
RANK_SECONDS = 0.04  # A rank's step takes at least this long for each rank on this machine.
MBITS = (30, 50, 80, 120)
# These are promised: differences from the simulator, from the ideal at so many ranks and from
# flops/rate, at most, and what the emulation costs itself.
MEDIAN = 0.05
WORST = 0.15
OFF_IDEAL = {2: 0.08, 4: 0.20}
OFF_RATE = 0.03
OVERHEAD_US = 15.0
OPERATIONS = 2000
TRIES = 9
# At 4 ranks these stages must be this many times as fast as one device.
FASTER = {"5": 3.2, "3": 1.2}


def clock(args: argparse.Namespace) -> Part:
    """Return the steps of 4 ranks that do not communicate, beside flops/rate.

    The processor's time for an emulated operation is measured, too.
    """
    job = job_of({"K": 4, "cap_mb": 25.0})
    device = device_for(job, 4, 4 * RANK_SECONDS)
    derived = job.work(device, 4).compute_s
    ranks = launch(train, job, "1", world_size=4, device=device)
    measured = median_step(ranks)
    with Device("100TFLOP/s").emulate():
        slowed = operation_us()
    overhead = slowed - operation_us()
    row = {"step_ms": 1000 * measured, "derived_ms": 1000 * derived, "overhead_us": overhead}
    promises = [
        Promise(
            "4 ranks without communication, beside flops/rate",
            abs(measured / derived - 1),
            OFF_RATE,
        ),
        Promise("the emulation itself, microseconds an operation", overhead, OVERHEAD_US),
    ]
    return Part([row], promises)


def device_for(job: Job, world_size: int, seconds: float) -> Device:
    """Return a device that computes a rank's step of a job in so many seconds."""
    flops = job.work(Device("1GFLOP/s"), world_size).flops  # They do not depend on the device.
    return Device(f"{flops / seconds}FLOP/s")


def median_step(ranks: list[list[float]]) -> float:
    """Return the median seconds of a step, of which the slowest rank's count."""
    return statistics.median(max(step) for step in zip(*ranks, strict=True))


def operation_us() -> float:
    """Return the processor microseconds of a small product, at its best of several tries."""
    matrix = torch.ones(8, 8)
    best = float("inf")
    for _ in range(TRIES):
        start = time.thread_time()
        for _ in range(OPERATIONS):
            torch.mm(matrix, matrix)
        best = min(best, time.thread_time() - start)
    return 1e6 * best / OPERATIONS


def steps(args: argparse.Namespace) -> Part:
    """Return the stages of the comparison, measured and ideal."""
    rows = []
    promises = []
    for world_size, allowed in OFF_IDEAL.items():
        results = comparison.run("digits", world_size, STEPS, link_mode=args.link_mode)
        for stage in results.stages:
            assert stage.ideal_ms is not None, "on emulated devices every stage has an ideal"
            row: dict[str, Any] = {"K": world_size}
            for name in ("stage", "name", "step_ms", "ideal_ms", "speed_up"):
                row[name] = getattr(stage, name)
            row["off"] = stage.step_ms / stage.ideal_ms - 1
            rows.append(row)
        worst = max(abs(row["off"]) for row in rows if row["K"] == world_size)
        promises.append(Promise(f"{world_size} ranks, furthest from the ideal", worst, allowed))
    at_four = {row["stage"]: row["speed_up"] for row in rows if row["K"] == 4}
    promises += [
        Promise(f"stage {key} at 4 ranks, speed-up", at_four[key], at_least=least)
        for key, least in FASTER.items()
    ]
    return Part(rows, promises)


def against_simulator(args: argparse.Namespace) -> Part:
    """Compare emulated devices with the simulator, for random settings of stage 5."""
    chance = random.Random(SEED)
    rows = []
    for _ in range(args.settings):
        setting = {
            "K": chance.choice(RANKS),
            "cap_mb": chance.choice(CAPS_MB),
            "mbit": chance.choice(MBITS),
        }
        setting["rank_s"] = setting["K"] * RANK_SECONDS * chance.uniform(1.0, 2.0)
        rows.append({**setting, **both(setting, args.link_mode)})
    differences = sorted(abs(row["difference"]) for row in rows)
    promises = [
        Promise(
            "simulator and emulation, median difference", statistics.median(differences), MEDIAN
        ),
        Promise("simulator and emulation, largest difference", differences[-1], WORST),
    ]
    return Part(rows, promises)


def both(setting: dict[str, Any], mode: str) -> dict[str, float]:
    """Return the milliseconds of a step in one setting, emulated and simulated.

    The row also says by how much the first is longer.
    """
    job = job_of(setting)
    world_size = setting["K"]
    device = device_for(job, world_size, setting["rank_s"])
    work = job.work(device, world_size)
    link = Link(f"{setting['mbit']}Mbit", mode=mode)
    network = Network(Costs.of_link(link.bandwidth, link.latency))
    simulated = simulate(work, world_size, network, bucket_cap_mb=setting["cap_mb"]).step_s
    ranks = launch(train, job, "5", world_size=world_size, device=device, link=link)
    emulated = median_step(ranks)
    return {
        "emulated_ms": 1000 * emulated,
        "simulated_ms": 1000 * simulated,
        "difference": emulated / simulated - 1,
    }


def job_of(setting: dict[str, Any]) -> Job:
    """Return the digits, in batches that any number of ranks can share."""
    return make_job(
        "digits", setting["K"], STEPS, 48 * setting["K"], bucket_cap_mb=setting["cap_mb"]
    )


def train(job: Job, stage: str) -> list[float]:
    """On each rank, return the seconds of a stage's steps, each rank on its share of the batch."""
    record = Recording()
    batches = record.stamped(job.batches(dist.get_rank(), job.world_size))
    train_stage = ladder.find(stage).trainer({"bucket_cap_mb": job.bucket_cap_mb})
    train_stage(job.model(), batches, job.lr)
    return [record.seconds(step) for step in record.steps(with_spans=False)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--settings", type=int, default=SETTINGS, help="random settings (default %(default)s)"
    )
    parser.add_argument(
        "--link-mode",
        choices=["virtual", "hosts"],
        default="virtual",
        help="how links are emulated",
    )


BENCHMARK = Benchmark(
    "devices",
    "emulated devices beside their ideals, and beside the simulator",
    {"clock": clock, "steps": steps, "simulator": against_simulator},
    add_options=add_options,
)
