"""A part of `python -m benchmarks launch`: does a job take as long when a cell starts it as when
torchrun does?

On two virtual hosts with cables of 1 Gbit/s, two ranks each, the ring averages the same tensor
again and again: started by torchrun on each host, and by `launch` on hosts that have joined. This
file is also the program that a host runs:

    python -m benchmarks.two_hosts torchrun|head|join FOLDER
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from ddp_course.running import virtual_hosts
from ddp_course.running.join import join
from ddp_course.running.launching import hosts
from ddp_course.running.launching.launch import launch
from ddp_course.running.links import available
from ddp_course.stage4_ring import ring_all_reduce

from .harness import Part, Promise, Row, slowest

HOSTS, RANKS_A_HOST, WARM_UP, STEPS, FLOATS = 2, 2, 5, 40, 1 << 18
AS_LONG, LONGEST_SECONDS = 1.10, 300
NAME = "benchmarks.two_hosts"
THIS = [sys.executable, "-m", NAME]
COURSE = [sys.executable, "-m", "ddp_course.cli"]
TORCHRUN = [
    "torchrun",
    f"--nnodes={HOSTS}",
    f"--nproc-per-node={RANKS_A_HOST}",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=host0:29400",
    "-m",
    NAME,
    "torchrun",
]


def compare(args: argparse.Namespace) -> Part:
    """Seconds of the job by both ways, in turns; and from the command, or the cell, to the
    result.
    """
    refused = available()["hosts"] or (
        None if importlib.util.find_spec("ipyparallel") else "needs ipyparallel"
    )
    if refused:
        return Part([{"way": "two hosts", "refused": refused}])
    branch = f'exec {" ".join(THIS)} $(test {{host}} = 0 && echo head || echo join) "$0"'
    commands = {"torchrun": TORCHRUN, "launch": ["sh", "-c", branch]}
    runs: dict[str, list] = {way: [] for way in commands}
    for _ in range(args.repeats):
        for way, command in commands.items():
            runs[way].append(on_hosts(command))
    rows: list[Row] = [
        {
            "way": way,
            "job_s": median([job for job, _ in each]),
            "from_start_s": median([whole for _, whole in each]),
        }
        for way, each in runs.items()
    ]
    ratio = rows[1]["job_s"] / rows[0]["job_s"]
    return Part(
        rows,
        [Promise("two hosts, times torchrun's seconds for the same job", ratio, at_most=AS_LONG)],
    )


def on_hosts(command: list[str]) -> tuple[float, float]:
    """Run the command on both hosts, with a folder as its last word; the seconds of the job, and
    from the start on.
    """
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "DDP_COURSE_HOSTS": f"{folder}/hosts"}
        both = [
            sys.executable,
            "-m",
            "ddp_course.running.on_hosts",
            f"--hosts={HOSTS}",
            "--bandwidth=1Gbit",
        ]
        began = time.perf_counter()
        subprocess.run(
            [*both, "--", *command, folder],
            env=environ,
            check=False,
            capture_output=True,
            timeout=LONGEST_SECONDS,
        )
        whole = time.perf_counter() - began
        seconds = [float(word) for word in (Path(folder) / "seconds").read_text().split()]
        return seconds[0], (seconds[1:] or [whole])[0]


def job() -> float:
    """Average 1 MiB on the ring STEPS times, after a warm-up; the slowest rank's seconds."""
    tensor, began = torch.ones(FLOATS), 0.0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            dist.barrier()
            began = time.perf_counter()
        ring_all_reduce(tensor)
        tensor /= dist.get_world_size()
    return slowest(time.perf_counter() - began)


def head(folder: Path) -> None:
    """Bring both hosts together, launch the job once to warm up and once to measure; end the
    controller last.
    """
    start = ["start", "--ip", virtual_hosts.address(0), "--engines", str(folder / "engines.json")]
    controller = subprocess.Popen([*COURSE, "hosts", *start], stdout=subprocess.DEVNULL)
    try:
        wait_for(folder / "engines.json")
        engine = join_as_engine(folder)
        with hosts.connect() as client:
            while len(client.ids) < HOSTS:
                time.sleep(0.1)
        for _ in range(2):
            began = time.perf_counter()
            seconds = launch(job, world_size=HOSTS * RANKS_A_HOST, hosts="all", device="cpu")[0]
            whole = time.perf_counter() - began
        (folder / "seconds").write_text(f"{seconds} {whole}\n")
        engine.terminate()
    finally:
        controller.terminate()
        controller.wait()


def join_as_engine(folder: Path) -> subprocess.Popen:
    """Start this host's engine."""
    return subprocess.Popen([*COURSE, "hosts", "join", str(folder / "engines.json")])


def wait_for(file: Path) -> None:
    """Wait until another host has written the file."""
    while not file.is_file() or not file.stat().st_size:
        time.sleep(0.05)


def main(part: str, folder: Path) -> None:
    """Be one host, or be one rank under torchrun."""
    if part == "torchrun":
        join("cpu")
        seconds = job()
        if dist.get_rank() == 0:
            (folder / "seconds").write_text(f"{seconds}\n")
        dist.destroy_process_group()
    elif part == "head":
        head(folder)
    else:
        wait_for(folder / "engines.json")
        os.execv(sys.executable, [*COURSE, "hosts", "join", str(folder / "engines.json")])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
