"""An elastic job over three virtual hosts, in a process of its own (namespaces want one without threads).

Host 1 loses power, the job goes on with host 0 alone; host 2 joins, and the job goes on with both. Prints a line
for each of these as it happens, or the reason why hosts cannot be had.
"""

import os
import sys
import time
from pathlib import Path

from ddp_course.running import virtual_hosts
from ddp_course.running.links import on_hosts

TIMING = "last_call_timeout=1,join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=3"


def main(folder, options):
    try:
        hosts = virtual_hosts.build(3, 1e9)
    except Exception as error:
        print(f"no hosts: {virtual_hosts.explain(error)}")
        return
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:3", "--nproc-per-node=1"]
    torchrun += ["--max-restarts=5", "--monitor-interval=0.1", "--rdzv-backend=c10d", f"--rdzv-conf={TIMING}"]
    torchrun += ["--rdzv-endpoint=host0:29400", str(Path(__file__).with_name("slow_train.py"))]
    torchrun += [*options, "--checkpoint", f"{folder}/run", "--every", "2"]
    # In torch 2.13 a node that joins later would wait for an address that is published in the first round only.
    environment = {"HURRY": f"{folder}/hurry", "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def agent(number):
        log = os.open(f"{folder}/host{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return on_hosts.start(hosts, number, torchrun, environment, log)

    first, second = agent(0), agent(1)
    wait_for(folder, world_size=2)
    on_hosts.stop(second)
    wait_for(folder, world_size=1)
    third = agent(2)
    wait_for(folder, world_size=2)
    Path(folder, "hurry").touch()
    print("codes", [os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in (first, third)], flush=True)


def wait_for(folder, world_size, seconds=150):
    """Wait until the newest checkpoint was written by so many ranks."""
    from ddp_course.running import checkpoint

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if checkpoint.checkpoints(f"{folder}/run"):
            state = checkpoint.load(f"{folder}/run")
            if state["world_size"] == world_size:
                print(f"world size {world_size} at step {state['step']}", flush=True)
                return
        time.sleep(0.2)
    sys.exit(f"no checkpoint of {world_size} ranks")


main(sys.argv[1], sys.argv[2:])
