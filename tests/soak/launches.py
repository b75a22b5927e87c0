"""Launch again and again with random faults, and see that nothing is left behind.

    python tests/soak/launches.py --count 1000

Prints one line per fault and a summary, and ends with exit code 1 if an error was not the expected
one, a process or a file was left, or open files or memory of this process grew.
"""

import argparse
import contextlib
import gc
import io
import json
import linecache
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from launch_faults import FAULTS, HEADER, Fault

from manyranks.launching import server_handle

ALLOWED_GROWTH = 5 << 20  # Memory may grow by this many bytes.
TORCH_CACHE = "torchinductor_"  # Torch makes one such folder per user when an optimizer is made.
WARM_UP = 20  # The first measurement comes after this many launches.
NONE = Fault("no fault", culprit="pass", others="pass", error="none", pattern="")
SLEEPING = replace(NONE, culprit="time.sleep(100)", others="time.sleep(100)")
FROM_OUTSIDE = {
    "interrupt": replace(SLEEPING, name="interrupt", error="KeyboardInterrupt"),
    "agent killed": replace(
        SLEEPING, name="agent killed", error="LaunchError", pattern="ended from outside"
    ),
    "server killed": replace(
        SLEEPING, name="server killed", error="LaunchError", pattern="ended from outside"
    ),
    "rank killed at start": replace(
        SLEEPING,
        name="rank killed at start",
        error="RankError",
        pattern=r"rank \d: killed: by SIGKILL",
    ),
}


def main():
    """Run the launches; return 0 if nothing was wrong."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    arguments.add_argument("--count", type=int, default=1000)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    chance = random.Random(options.seed)
    names = {"__name__": "__main__"}
    exec(HEADER, names)
    faults = [*FAULTS, *FROM_OUTSIDE.values(), *[NONE] * 5]
    seconds = defaultdict(list)
    wrong = []
    before = None
    handlers = signal_handlers()
    for done in range(options.count):
        if done == min(WARM_UP, options.count // 2):
            before = measure()
        fault = chance.choice(faults)
        world_size = chance.choice([2, 3, 4])
        begin = time.monotonic()
        error, message = attempt(fault, world_size, names, chance)
        seconds[fault.name].append(time.monotonic() - begin)
        if not is_expected(error, message, fault, world_size):
            wrong.append(
                f"launch {done}: {fault.name} at world size {world_size} gave {error}: {message}"
            )
    after = measure()
    wrong += left_behind(before, after)
    if handlers != signal_handlers():
        wrong.append("signal handlers have changed")
    report(options.count, seconds, before, after, wrong)
    return 1 if wrong else 0


def signal_handlers():
    """Return what this process does on the signals that a launch handles."""
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]


def is_expected(error, message, fault, world_size):
    """Return whether a launch with a fault has raised the error of the table."""
    pattern = fault.pattern.replace("{culprit}", str(world_size - 1))
    return error == fault.error and re.search(pattern, message) is not None


def attempt(fault, world_size, names, chance):
    """Launch once with one fault; return the exception that was raised, or "none", and its message.

    The exception is given by its name.
    """
    source = fault.cell(world_size)
    linecache.cache["<fault>"] = (len(source), None, source.splitlines(True), "<fault>")
    stop = threading.Event()
    attacker = threading.Thread(target=attack, args=(fault.name, chance.uniform(0.05, 0.5), stop))
    attacker.start()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            exec(compile(source, "<fault>", "exec"), names)
        return "none", ""
    except (Exception, KeyboardInterrupt) as error:
        return type(error).__name__, str(error)
    finally:
        stop.set()
        attacker.join()


def attack(name, delay, stop):
    """Interrupt the launch or kill one of its processes, in a thread, if the fault says so.

    A rank is killed at once, and all else comes after a `delay`.
    """
    if name not in FROM_OUTSIDE:
        return
    ranks = []
    deadline = time.monotonic() + 300
    while not ranks and not stop.is_set() and time.monotonic() < deadline:
        agents, ranks = launch_processes()
        stop.wait(0.002)
    if name != "rank killed at start":
        stop.wait(delay)
    if stop.is_set() or not ranks:
        return
    server = psutil.Process(server_handle.servers[0].process.pid)
    if name == "interrupt":
        kill(psutil.Process(), signal.SIGINT)
    else:
        victims = {
            "agent killed": agents[0],
            "server killed": server,
            "rank killed at start": ranks[-1],
        }
        kill(victims[name], signal.SIGKILL)


def kill(process, number):
    """Send a signal; the process may have gone by itself."""
    with contextlib.suppress(psutil.NoSuchProcess):
        os.kill(process.pid, number)


def launch_processes():
    """Return the agents and the ranks that run now."""
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        agents = psutil.Process(server_handle.servers[0].process.pid).children()
        return agents, [rank for agent in agents for rank in agent.children()]
    return [], []


def measure():
    """Count the open files and the bytes of this process, and the processes below it."""
    gc.collect()
    process = psutil.Process()
    below = [
        child.pid
        for child in process.children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE
    ]
    return {
        "files": process.num_fds(),
        "bytes": process.memory_full_info().uss,
        "processes": len(below),
    }


def left_behind(before, after):
    """Return a line for each thing that should not be there after the last launch."""
    found = []
    files = [name for name in os.listdir(tempfile.gettempdir()) if not name.startswith(TORCH_CACHE)]
    if files:
        found.append(f"left in the temporary folder: {files}")
    if after["processes"] > 1:  # One of them is the server.
        found.append(f"{after['processes'] - 1} processes left")
    if after["files"] > before["files"]:
        found.append(f"open files grew from {before['files']} to {after['files']}")
    if after["bytes"] > before["bytes"] + ALLOWED_GROWTH:
        found.append(f"memory grew by {(after['bytes'] - before['bytes']) / (1 << 20):.1f} MiB")
    return found


def report(count, seconds, before, after, wrong):
    """Print the slowest time of each fault, and the summary as JSON."""
    for name in sorted(seconds):
        times = sorted(seconds[name])
        print(
            f"{name:30} {len(times):5} launches, median {times[len(times) // 2]:6.2f} s, slowest"
            f" {times[-1]:6.2f} s"
        )
    print(*wrong, sep="\n")
    print(json.dumps({"launches": count, "before": before, "after": after, "wrong": len(wrong)}))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="ddp_course_soak") as own_folder:
        # No other program leaves files in this folder.
        os.environ["TMPDIR"] = tempfile.tempdir = own_folder
        sys.exit(main())
