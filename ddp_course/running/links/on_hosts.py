"""Run a command on every one of several virtual hosts, as a cluster would:

    python -m ddp_course.running.links.on_hosts --hosts 2 --bandwidth 200Mbit -- \\
        torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=host0:29400 \\
        -m ddp_course.train --stage 4

The hosts are called host0, host1, … and reach each other by these names. {host} in the command becomes the number.
This program must stay without threads, so it imports neither torch nor numpy.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

import psutil

from .. import linux, units, virtual_hosts


def start(
    hosts: Sequence[int],
    number: int,
    command: list[str],
    environment: Mapping[str, str] | None = None,
    output: int | None = None,
) -> int:
    """Start `command` (a list of words) on host `number` of those that `virtual_hosts.build` returned.

    Returns a process id for `stop` and `os.waitpid`. The command ends with this process. What it prints goes to the
    file descriptor `output`. Programs of this Python's own environment (torchrun, ddp-course) come before others of
    their name: a notebook server that was started by its path does not have them on the search path.
    """
    child = os.fork()
    if child:
        return child
    try:
        linux.die_with_parent()
        virtual_hosts.enter(hosts, number)
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
        os.environ.update(environment or {})
        os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
        os.execvp(command[0], [word.replace("{host}", str(number)) for word in command])
    except OSError as error:
        print(f"host{number}: {command[0]}: {error.strerror}", file=sys.stderr)
    finally:
        os._exit(127)


def stop(child: int) -> None:
    """Kill what `start` started, with all that it started in turn, as if its host had lost power."""
    first = psutil.Process(child)
    for process in [first, *first.children(recursive=True)]:
        process.kill()
    os.waitpid(child, 0)


def main() -> int:
    """Run the command line; the exit code is the greatest of the commands'."""
    parser = argparse.ArgumentParser(
        prog="python -m ddp_course.running.links.on_hosts", description=__doc__.split(",")[0]
    )
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="how many hosts (default 2)")
    parser.add_argument("--bandwidth", default="1Gbit", help="of every host's cable, each way (default 1Gbit)")
    parser.add_argument("command", nargs="+", help="what to run on each host, after --")
    options = parser.parse_args()
    try:
        hosts = virtual_hosts.build(options.hosts, units.bits_per_second(options.bandwidth))
    except Exception as error:  # whatever forbids it, the reason is for a person to read
        print(f"virtual hosts cannot be had here: {virtual_hosts.explain(error)}", file=sys.stderr)
        return 2
    running = [start(hosts, number, options.command) for number in range(options.hosts)]
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256 for child in running)


if __name__ == "__main__":
    sys.exit(main())
