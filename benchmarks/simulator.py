"""`python -m benchmarks simulator`: the simulator against published tables and, with `--only own`, our own training."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from ddp_course.measuring.simulate import Layer, Profile, published, simulate
from ddp_course.measuring.simulate.network import Network
from ddp_course.measuring.theory import Costs
from ddp_course.running.files import replace_file

from .harness import Benchmark, Part, Promise, Row

SHAPED, V100, SECONDS = {"gloo": 0.10, "nccl": 0.05}, 0.05, 2
OWN_MEDIAN, OWN_LARGEST = 0.10, 0.20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where our own training is measured."""
    parser.add_argument("--link", default="200Mbit", help="bandwidth of the virtual hosts' links, for --only own")


def shaped_links(args: argparse.Namespace) -> Part:
    """All-reduces of 128 MiB over shaped links, calibrated at K = 4."""
    found = published.shaped_links()
    rows = found["compared"]
    table = [
        {"library": row["library"], "K": row["K"], "Gbit/s": row["link_gbit_s"], "delay, ms": row["link_delay_ms"]}
        | {"published, ms": row["measured_ms"], "simulated, ms": row["predicted_ms"], "error": percent(row["error"])}
        | {"formula's": percent(row["by_formula_ms"] / row["measured_ms"] - 1), "": kind(row)}
        for row in rows
    ]
    errors = {
        name: [abs(row["error"]) for row in rows if row["held_out"] and row["library"] == name] for name in SHAPED
    }
    promises = [Promise(f"{name}, largest error held out", max(errors[name]), most) for name, most in SHAPED.items()]
    also = {name: found[name] for name in ("parameters", "predictions")}
    return Part(rows, promises, table, also)


def v100_steps(args: argparse.Namespace) -> Part:
    """Steps of torch's DDP on V100, calibrated at 1 and 2 GPUs; beside them the error of a constant predictor."""
    found = published.v100_steps()
    table = [
        {"model": row["model"], "K": row["K"], "published, s": row["measured_s"], "simulated, s": row["predicted_s"]}
        | {"error": percent(row["error"]), "constant predictor's": percent(row["constant_error"])}
        for row in found["compared"]
    ]
    table += [
        {"model": f"{size} error", "error": percent(found["error"][size])}
        | {"constant predictor's": percent(found["constant_error"][size])}
        for size in ("mean", "largest")
    ]
    also = {name: found[name] for name in ("parameters", "error", "constant_error")}
    return Part(found["compared"], [Promise("V100 steps, largest error", found["error"]["largest"], V100)], table, also)


def own_training(args: argparse.Namespace) -> Part:
    """Our own training over virtual hosts, calibrated at K = 2."""
    from ddp_course.measuring.simulate import measured

    found = measured.compare(args.link)
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


def predictions(report: Row, folder: Path) -> Iterator[Path]:
    """Write simulator.json: what is predicted for numbers of ranks that nobody has published."""
    if "shaped links" in report["parts"]:
        content = json.dumps(report["parts"]["shaped links"]["predictions"], indent=1) + "\n"
        replace_file(folder / "simulator.json", content.encode())
        yield folder / "simulator.json"


PARTS = {"shaped links": shaped_links, "V100 steps": v100_steps, "speed": speed, "own": own_training}
BENCHMARK = Benchmark(
    "simulator",
    "the simulator against published tables, and against our own training",
    PARTS,
    on_request=("own",),
    add_options=add_options,
    finish=predictions,
)
