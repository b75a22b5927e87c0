"""Run a command on every one of several virtual hosts, as a cluster would.

    python -m manyranks.hosts.on_hosts --hosts 2 --bandwidth 200Mbit -- \\
        torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=host0:29400 \\
        train.py

The hosts are called host0, host1, … and reach each other by these names. {host} in the command
becomes the host's number. This program must stay without threads, so it imports neither torch nor
numpy.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

import psutil

from .. import linux, units
from . import virtual_hosts


def start(
    hosts: Sequence[int],
    number: int,
    command: list[str],
    environment: Mapping[str, str] | None = None,
    output: int | None = None,
) -> subprocess.Popen:
    """Start a command, a list of words, on host `number` of those that `build` returned.

    The command ends with this process. Its output goes to the file descriptor `output`. Programs of
    this Python's own environment, such as torchrun, come before others of the same name: a notebook
    server that was started by its path does not have them on the search path. Raises OSError if
    there is no such program.
    """

    def move() -> None:
        linux.die_with_parent()
        virtual_hosts.enter(hosts, number)

    words = [word.replace("{host}", str(number)) for word in command]
    environ = {**os.environ, **virtual_hosts.ON_A_HOST, **(environment or {})}
    own_programs = os.path.dirname(sys.executable)
    environ["PATH"] = os.pathsep.join([own_programs, environ.get("PATH", os.defpath)])
    return subprocess.Popen(words, stdout=output, stderr=output, env=environ, preexec_fn=move)


def stop(process: subprocess.Popen) -> None:
    """Kill a process that `start` started, and all its descendants, as if its host lost power."""
    for each in [process, *psutil.Process(process.pid).children(recursive=True)]:
        each.kill()
    process.wait()


def main() -> int:
    """Run the command line, and return the greatest of the commands' exit codes."""
    parser = argparse.ArgumentParser(
        f"python -m {__package__}.on_hosts",
        description="Run a command on every one of several virtual hosts",
    )
    parser.add_argument(
        "--hosts", type=int, default=2, metavar="N", help="how many hosts (default 2)"
    )
    parser.add_argument(
        "--bandwidth", default="1Gbit", help="of every host's cable, each way (default 1Gbit)"
    )
    parser.add_argument("command", nargs="+", help="what to run on each host, after --")
    options = parser.parse_args()
    try:
        hosts = virtual_hosts.build(options.hosts, units.bits_per_second(options.bandwidth))
        processes = [start(hosts, number, options.command) for number in range(options.hosts)]
    except FileNotFoundError as error:
        parser.error(str(error))
    except Exception as error:
        # Whatever the error is, a person should read its reason.
        print(f"virtual hosts cannot be had here: {virtual_hosts.explain(error)}", file=sys.stderr)
        return 2
    # Popen's number of a process that a signal has ended is negative: % 256 makes it an exit code.
    return max(process.wait() % 256 for process in processes)


if __name__ == "__main__":
    sys.exit(main())
