"""`python -m benchmarks virtual_time`: is virtual time exact, the same in each run, and quick?

exact       the step of each stage beside its closed form, at 2, 4, 8 and 16 ranks
same_bits   one comparison again and again: beside busy processes, with random sleeps before
            each lock, and on ranks that are not forked; SHA-256 says whether any bit differs
speed       what a comparison, a launch of many ranks and a message cost this machine; these
            numbers alone depend on the machine and on what else it does
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import torch.distributed as dist
from tqdm import tqdm

from ddp_course import Device, Link, launch, wire
from ddp_course.job import Job, make_job
from ddp_course.lab.measuring import comparison
from ddp_course.lab.measuring.results import Comparison
from manyranks.launching.server_handle import servers, use_server

from .harness import Benchmark, Part, Promise, Row

DEVICE = Device("2.4GFLOP/s")
LINK = "100Mbit"
STEPS = 3  # The first two are a warm-up, as in every comparison.
WORLD_SIZES = (2, 4, 8, 16)
STAGES = ("1", "3", "4w", "4", "5", "6", "torch", "7o", "7", "9", "2", "8")
# These have threads, messages, hooks, futures in C++, prefetching, and receives posted early.
DISTURBED = ("2", "3", "5", "torch", "7", "8", "9")
# The closed forms of these stages know all that a step does where chunks are equal; in stage 2
# Python's pool of threads asks questions, which take time.
NEARLY = {"2": 1e-2, "8": 1e-2}
# A step may be so far from its closed form: with equal chunks, and with unequal ones.
EQUAL = 1e-9
UNEQUAL = 5e-4
AGAINST_REALITY = ("3", "4", "5", "6")
LARGE = {
    "parameters": 2_000_000,
    "lr": 0.001,
    "bucket_cap_mb": 2.0,
    "device": Device("90MFLOP/s"),
    "link": LINK,
}
EXCHANGES = 2000
FUZZ_MS = "2"  # A sleep before a lock takes at most so many milliseconds.


def exact(args: argparse.Namespace) -> Part:
    """Compare each stage with its closed form."""
    rows = []
    for world_size in tqdm(WORLD_SIZES, unit="world size", disable=None):
        rows += beside_closed_forms(world_size, STAGES)
    promises = []
    for bound in sorted({EQUAL, UNEQUAL, *NEARLY.values()}):
        errors = [abs(row["step/closed form - 1"]) for row in rows if row["bound"] == bound]
        promises.append(Promise(f"largest error of {len(errors)} steps", max(errors), bound))
    return Part(rows, promises)


def beside_closed_forms(world_size: int, stages: tuple[str, ...]) -> list[Row]:
    """Return a row for each stage: its step in virtual time, its closed form, and their tolerance.

    The tolerance is how far they may differ.
    """
    rows = []
    for stage in stages:
        problem = problem_for(stage, world_size)
        results = comparison.run(problem, world_size, STEPS, stage, device=DEVICE, link=LINK)
        [entry] = results.stages
        assert entry.ideal_ms is not None, "on an emulated device every stage has an ideal"
        row = {"stage": stage, "world_size": world_size, "problem": problem}
        row |= {"step_ms": entry.step_ms, "closed_form_ms": entry.ideal_ms}
        row["step/closed form - 1"] = entry.step_ms / entry.ideal_ms - 1
        row["bound"] = bound_of(stage, make_job(problem, world_size, STEPS))
        rows.append(row)
    return rows


def problem_for(stage: str, world_size: int) -> str:
    """Return what is trained: the digits, unless a pipeline's ranks outnumber their layers."""
    return "synthetic" if stage == "8" and world_size > 5 else "digits"


def bound_of(stage: str, job: Job) -> float:
    """Return how far a stage's step may be from its closed form.

    Where K does not divide what is sent, chunks are unequal, of which the closed form knows
    nothing.
    """
    if stage in NEARLY:
        return NEARLY[stage]
    sent = {"4": [job.parameter_count], "7o": [job.parameter_count]}
    if stage in ("5", "7"):
        sent[stage] = [parameter.numel() for parameter in job.model().parameters()]
    unequal = any(numbers % job.world_size for numbers in sent.get(stage, []))
    return UNEQUAL if unequal else EQUAL


def same_bits(args: argparse.Namespace) -> Part:
    """Return the hash of one comparison, after many runs under all that could disturb it.

    There are twenty runs and more.
    """
    ways = {"quiet": 1, "beside four busy processes": 10, "sleeps before locks": 5, "spawned": 5}
    rows = []
    for way, runs in ways.items():
        for _ in tqdm(range(runs), desc=way, unit="run", disable=None):
            rows.append({"way": way, "sha256": hash_under(way)})
    hashes = {row["sha256"] for row in rows}
    table = []
    for way, runs in ways.items():
        table.append({"way": way, "runs": runs, "sha256": min(hashes)[:16]})
    return Part(rows, [Promise(f"different hashes in {len(rows)} runs", len(hashes), 1)], table)


def hash_under(way: str) -> str:
    """Return the hash of a comparison that something disturbs."""
    environment = {}
    if way == "sleeps before locks":
        environment = {"MANYRANKS_FUZZ": FUZZ_MS}
    if way == "spawned":
        environment = {"MANYRANKS_START": "spawn"}
    busy = 4 if way == "beside four busy processes" else 0
    with variables(environment), busy_processes(busy):
        results = comparison.run("digits", 4, STEPS, DISTURBED, device=DEVICE, link=LINK)
    return digest(results)


def digest(results: Comparison) -> str:
    """Return the SHA-256 of all in a comparison that virtual time decides."""
    same: dict = {key: getattr(results, key) for key in ("world_size", "emulated_device", "link")}
    keys = ("stage", "step_ms", "communication_ms", "bytes_sent_max", "timeline")
    same["stages"] = []
    for stage in results.stages:
        same["stages"].append({key: getattr(stage, key) for key in keys})
    return hashlib.sha256(json.dumps(same).encode()).hexdigest()


@contextmanager
def variables(values: dict[str, str]) -> Iterator[None]:
    """Set variables of the environment for the launches within, from a server of their own."""
    before = dict(os.environ)
    os.environ.update(values)
    use_server(None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        use_server(None)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Have `count` processes compute all the time."""
    processes = []
    for _ in range(count):
        process = multiprocessing.Process(target=stay_busy, args=(os.getpid(),), daemon=True)
        process.start()
        processes.append(process)
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def stay_busy(parent: int) -> None:
    """Compute until the parent ends."""
    os.nice(5)
    while os.getppid() == parent:
        sum(range(100_000))


def speed(args: argparse.Namespace) -> Part:
    """Return what virtual time costs, once the launch server has imported all that ranks need."""
    rows: list[Row] = []
    runs: tuple = (
        ("compare, all steps", 4, None, comparison.DEFAULT_STAGES),
        ("compare, 10 steps", 4, 10, comparison.DEFAULT_STAGES),
        ("stage 4, 10 steps", 16, 10, ("4",)),
        ("stage 4, 3 steps", 64, 3, ("4",)),
    )
    for what, world_size, steps, stages in runs:
        before = cpu_seconds_of_launches()
        began = time.perf_counter()
        comparison.run("digits", world_size, steps, stages)
        wall_s = time.perf_counter() - began
        cpu_s = cpu_seconds_of_launches() - before
        rows.append({"what": what, "world_size": world_size, "wall_s": wall_s, "cpu_s": cpu_s})
    extra_us = microseconds(Link("1Gbit")) - microseconds(None)
    promises = [
        Promise("compare, CPU seconds", rows[0]["cpu_s"], 20),
        Promise("compare, seconds", rows[0]["wall_s"], 20),
        Promise("stage 4 on 16 ranks, CPU seconds", rows[2]["cpu_s"], 8),
        Promise("stage 4 on 64 ranks, seconds", rows[3]["wall_s"], 15),
        Promise("microseconds of a post or wait above gloo's own", extra_us, 30),
    ]
    return Part(rows, promises)


def cpu_seconds_of_launches() -> float:
    """Return the CPU seconds so far of the launch server and of all ranks that have ended."""
    # The server imports more after its first launch, and takes the next one when it has done so.
    for _ in range(2):
        launch(dist.get_rank, world_size=1)
    times = psutil.Process(servers[0].process.pid).cpu_times()
    return sum((times.user, times.system, times.children_user, times.children_system))


def microseconds(link: Link | None) -> float:
    """Return the CPU microseconds of a post or a wait, of four in an exchange of small messages."""
    seconds = launch(exchange, world_size=2, device="cpu", link=link)
    return 1e6 * max(seconds) / (4 * EXCHANGES)


def exchange() -> float:
    """Return the CPU seconds of this thread while two ranks exchange small messages."""
    peer = 1 - dist.get_rank()
    outgoing = torch.ones(1)
    incoming = torch.zeros(1)
    began = time.thread_time()
    for _ in range(EXCHANGES):
        sent = wire.isend(outgoing, peer)
        wire.irecv(incoming, peer).wait()
        sent.wait()
    return time.thread_time() - began


def hosts(args: argparse.Namespace) -> Part:
    """Return the stages in real time on virtual hosts, beside virtual time.

    With messages of megabytes they must agree; with the small ones of the default comparison TCP's
    slow start shows, of which virtual time knows nothing.
    """
    rows = [
        *beside_hosts("messages of 2 MB", "synthetic", 5, **LARGE),
        *beside_hosts("messages of 0.1 MB", "digits", 10),
    ]
    ratios = [row["hosts/virtual"] for row in rows if row["setting"] == "messages of 2 MB"]
    promises = [
        Promise("real time over virtual time, least", min(ratios), at_least=0.9),
        Promise("real time over virtual time, most", max(ratios), 1.1),
    ]
    return Part(rows, promises)


def beside_hosts(setting: str, problem: str, steps: int, **options: Any) -> list[Row]:
    """Return a row for each stage on 4 ranks: its step in virtual time, and on virtual hosts."""
    results = comparison.run_on_sockets_too(
        problem=problem, world_size=4, steps=steps, stages=AGAINST_REALITY, **options
    )
    rows = []
    for stage in results.stages:
        assert stage.on_sockets is not None, "it was just measured"
        hosts_ms = stage.step_ms * stage.on_sockets
        row = {"setting": setting, "stage": stage.stage, "virtual_ms": stage.step_ms}
        rows.append({**row, "hosts_ms": hosts_ms, "hosts/virtual": stage.on_sockets})
    return rows


BENCHMARK = Benchmark(
    "virtual_time",
    "is virtual time exact, the same in each run, and quick?",
    {"exact": exact, "same_bits": same_bits, "speed": speed, "hosts": hosts},
    file="virtual_time.json",
    on_request=("hosts",),
)
