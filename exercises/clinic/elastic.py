"""An elastic job: host 1 loses its power, the job goes on without it, then host 2 joins. On Linux, a minute or two:

    python exercises/clinic/elastic.py runs/elastic

The hosts are virtual, and the ranks run `slow_train.py`. `runs/elastic/elastic.csv` says when which step was saved, by
how many hosts, and when a host was lost or started.
"""

import csv
import os
import sys
import time
from pathlib import Path

from manyranks.hosts import on_hosts, virtual_hosts

TIMING = "last_call_timeout=1,join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=3"
PROGRAM = Path(__file__).resolve().with_name("slow_train.py")
OPTIONS = ["--problem", "digits", "--stage", "6", "--steps", "900"]


def main(folder, options):
    try:
        hosts = virtual_hosts.build(3, 1e9)  # before torch is imported: this needs a process without threads
    except Exception as error:
        print(f"no hosts: {virtual_hosts.explain(error)}")
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:3", "--nproc-per-node=1"]
    torchrun += ["--max-restarts=5", "--monitor-interval=0.1", "--rdzv-backend=c10d", f"--rdzv-conf={TIMING}"]
    torchrun += ["--rdzv-endpoint=host0:29400", str(PROGRAM), *(options or OPTIONS)]
    torchrun += ["--checkpoint", f"{folder}/run", "--every", "2", "--keep", "10000"]
    # Up to torch 2.15 a node that joins later would wait for an address that is published in the first round only.
    environment = {"HURRY": f"{folder}/hurry", "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def agent(number):
        log = os.open(f"{folder}/host{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return on_hosts.start(hosts, number, torchrun, environment, log)

    first, second = agent(0), agent(1)
    wait_for(folder, world_size=2)
    events = [(time.time(), "host 1 is lost")]
    on_hosts.stop(second)
    wait_for(folder, world_size=1)
    events.append((time.time(), "host 2 starts"))
    third = agent(2)
    wait_for(folder, world_size=2)
    write(folder, events)
    Path(folder, "hurry").touch()
    print("codes", [agent.wait() for agent in (first, third)], flush=True)


def wait_for(folder, world_size, steps=20, seconds=150):
    """Wait until so many ranks have done a number of steps."""
    from ddp_course import checkpoint

    end, first = time.monotonic() + seconds, None
    while time.monotonic() < end:
        if checkpoint.checkpoints(f"{folder}/run"):
            state = checkpoint.load(f"{folder}/run")
            if state["world_size"] == world_size:
                first = state["step"] if first is None else first
                if state["step"] >= first + steps:
                    print(f"world size {world_size} at step {state['step']}", flush=True)
                    return
        time.sleep(0.2)
    sys.exit(f"no checkpoint of {world_size} ranks")


def write(folder, events):
    """Write elastic.csv, from the times of the checkpoints."""
    from ddp_course import checkpoint

    rows = [(when, "", "", event) for when, event in events]
    for file in checkpoint.checkpoints(f"{folder}/run"):
        state = checkpoint.unpacked(file.read_bytes())
        rows.append((file.stat().st_mtime, state["world_size"], state["step"], "saved"))
    start = min(row[0] for row in rows)
    with open(f"{folder}/elastic.csv", "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["seconds", "hosts", "step", "event"])
        table.writerows([f"{when - start:.2f}", *rest] for when, *rest in sorted(rows, key=lambda row: row[0]))


if __name__ == "__main__":
    os.makedirs(sys.argv[1], exist_ok=True)
    main(sys.argv[1], sys.argv[2:])
