"""Launch again and again over three virtual hosts: `python tests/soak/hosts.py [--count 1000]`, as root.

Ends with exit code 1 if a launch gave another result, or if the head's or an engine's open files, memory or processes
have grown since the first launches.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALLOWED_GROWTH = 10 << 20  # bytes
HEAD = """
import gc, json, os, sys, time
from pathlib import Path
import psutil, torch, torch.distributed as dist
from ddp_course import launch
from ddp_course.running.launching import hosts

FOLDER, COUNT = Path(__file__).parent, {count}

def summed(turn):
    tensor = torch.tensor(float(turn + dist.get_rank()))
    dist.all_reduce(tensor)
    return tensor.item()

def measure():
    import gc, psutil
    gc.collect()
    process = psutil.Process()
    below = [child for child in process.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    return process.num_fds(), process.memory_full_info().uss, len(below)

def everywhere():
    with hosts.connect() as client:
        return {{"head": measure(), **dict(enumerate(client[:].apply_sync(measure), 1))}}

while not (FOLDER / "hosts" / "ipcontroller-client.json").exists():
    time.sleep(0.1)
with hosts.connect() as client:
    while len(client.ids) < 3:
        time.sleep(0.1)
wrong, before = [], None
for turn in range(COUNT):
    if turn == min(20, COUNT // 2):
        before = everywhere()
    found = launch(summed, turn, world_size=3, hosts="all")
    if found != [3.0 * turn + 3] * 3:
        wrong.append(f"launch {{turn}} gave {{found}}")
(FOLDER / "found").write_text(json.dumps([wrong, before, everywhere()]))
"""


def main():
    """Run the launches on hosts of their own; 0 if nothing was wrong."""
    arguments = argparse.ArgumentParser(description=__doc__.split(":")[0])
    arguments.add_argument("--count", type=int, default=1000)
    count = arguments.parse_args().count
    with tempfile.TemporaryDirectory(prefix="ddp_course_soak") as name:
        folder = Path(name)
        (folder / "head.py").write_text(HEAD.format(count=count))
        for key in ("key", "hostkey"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": name}
        program = [sys.executable, str(ROOT / "tests" / "support" / "hosts_on_hosts.py"), name]
        subprocess.run(program, env=environ, check=True)
        wrong, before, after = json.loads((folder / "found").read_text())
    for place, (files, memory, processes) in after.items():
        print(f"{place}: files {before[place][0]} to {files}, memory {before[place][1] >> 20} to {memory >> 20} MiB")
        grown = (files > before[place][0], memory > before[place][1] + ALLOWED_GROWTH, processes > before[place][2])
        wrong += [
            f"{place}: {what} grew" for what, has in zip(("files", "memory", "processes"), grown, strict=True) if has
        ]
    print(*wrong, sep="\n")
    print(f"{count} launches over 3 hosts, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
