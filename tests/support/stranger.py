"""A launch and another user of the same machine, who connects to every port on the loopback.

Call it as `python stranger.py allowed|forbidden|open [LAUNCHES [WORLD_SIZE]]`. "forbidden": the
launch may make no namespaces. Both are in a network apart from the machine's, so that nobody else
is disturbed. Prints what the launches print, and how many ports he found.
"""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from manyranks import linux

NOBODY = 65534
LAUNCHES = """
import sys
import torch, torch.distributed as dist
from manyranks import launch

def total():
    number = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(number)
    return number.item()

for _ in range(int(sys.argv[1])):
    try:
        print(launch(total, world_size=int(sys.argv[2]), timeout=10))
    except Exception as error:
        print(str(error).partition("\\n")[0])
"""


def watch_as_stranger(report):
    """Connect to each new port, as another user, until killed; write a byte for each."""
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    known = set()
    connections = []
    while True:
        for line in linux.read(Path("/proc/self/net/tcp")).splitlines()[1:]:
            _, near, _, state = line.split()[:4]
            if state == linux.LISTENING and (near, line.split()[9]) not in known:
                known.add((near, line.split()[9]))
                os.write(report, b".")
                with suppress(OSError):
                    port = int(near.rpartition(":")[2], 16)
                    connections.append(socket.socket())
                    connections[-1].settimeout(1)
                    connections[-1].connect(("127.0.0.1", port))
        time.sleep(0.0005)


def main(way, launches="1", world_size="2"):
    """Run the launches beside a stranger."""
    linux.call("unshare", linux.CLONE_NEWNET)
    linux.raise_loopback()
    reading, writing = os.pipe()
    stranger = os.fork()
    if stranger == 0:
        linux.die_with_parent()
        watch_as_stranger(writing)
    os.close(writing)
    denied = [str(Path(__file__).with_name("denied.py"))] if way == "forbidden" else []
    network = "open" if way == "open" else "auto"
    subprocess.run(
        [sys.executable, *denied, "-c", LAUNCHES, launches, world_size],
        env={**os.environ, "MANYRANKS_NETWORK": network},
        check=True,
    )
    os.kill(stranger, 9)
    found = 0
    while piece := os.read(reading, 1 << 16):
        found += len(piece)
    print("found:", found)


if __name__ == "__main__":
    main(*sys.argv[1:])
