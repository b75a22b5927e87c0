"""A head and three machines on virtual hosts: host0 is the head; host1 is joined by ssh, host2 and
host3 by "Slurm".

    python tests/support/hosts_on_hosts.py FOLDER

Runs FOLDER/head.py on host0. That asks for accidents by files in FOLDER: "kill-2" (host 2 loses its
power), "unplug-3", "plug-3", "start-2", "count"; each is answered by a file "….done". A process of
its own, as namespaces want one without threads.
"""

import os
import sys
import time
from pathlib import Path

import psutil
from pyroute2 import IPRoute

from ddp_course.running import on_hosts, virtual_hosts

HOSTS = 4
SSHD = """
Port 22
HostKey {folder}/hostkey
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PidFile none
SetEnv PYTHONPATH={pythonpath} TMPDIR={tmpdir} DDP_COURSE_HOSTS={folder}/hosts OMP_NUM_THREADS=1
"""

SRUN = """#!/bin/sh
# What Slurm's srun would do in an allocation of host2 and host3, which here have ssh.
[ "$1 $2" = "--ntasks-per-node=1 --overlap" ] || exit 2
shift 2
for host in host2 host3; do ssh $DDP_COURSE_SSH $host "$*" </dev/null & done
wait
"""


def main(folder):
    """Build, serve accidents until the head's program has ended; its exit code."""
    hosts = virtual_hosts.build(HOSTS, 1e9)
    config = SSHD.format(
        folder=folder, pythonpath=os.environ["PYTHONPATH"], tmpdir=os.environ["TMPDIR"]
    )
    (folder / "sshd").write_text(config)
    Path("/run/sshd").mkdir(exist_ok=True)
    sshd = ["/usr/sbin/sshd", "-D", "-f", str(folder / "sshd")]
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    machines = {
        number: on_hosts.start(hosts, number, sshd, output=log) for number in range(1, HOSTS)
    }
    environment = {
        "DDP_COURSE_HOSTS": str(folder / "hosts"),
        "DDP_COURSE_SSH": (
            f"-i {folder}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -q"
        ),
    }
    (folder / "bin").mkdir()
    (folder / "bin" / "srun").write_text(SRUN)
    (folder / "bin" / "srun").chmod(0o755)
    allocation = {**environment, "SLURM_JOB_ID": "1", "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    address = virtual_hosts.address(0)
    start = [
        sys.executable,
        "-m",
        "ddp_course.cli",
        "hosts",
        "start",
        "--ip",
        address,
        "--ssh",
        "host1",
        "--slurm",
    ]
    start += ["--engines", str(folder / "engines.json")]
    controller = on_hosts.start(hosts, 0, start, allocation, log)
    head = on_hosts.start(hosts, 0, [sys.executable, str(folder / "head.py")], environment)
    while head.poll() is None:
        for asked in folder.glob("ask-*"):
            happen(asked, folder, hosts, machines, environment, log)
        time.sleep(0.01)
    for child in (controller, *machines.values()):
        on_hosts.stop(child)
    return head.returncode


def happen(asked, folder, hosts, machines, environment, log):
    """Carry out what the head's program has asked for."""
    _, what, *number = asked.name.split("-")
    asked.unlink()
    answer = ""
    if what == "kill":
        on_hosts.stop(machines.pop(int(number[0])))
    elif what == "join":
        join = [
            sys.executable,
            "-m",
            "ddp_course.cli",
            "hosts",
            "join",
            str(folder / "engines.json"),
        ]
        machines[int(number[0])] = on_hosts.start(hosts, int(number[0]), join, environment, log)
    elif what in ("unplug", "plug"):
        with IPRoute() as ip:
            port = ip.link_lookup(ifname=f"port{number[0]}")[0]
            ip.link("set", index=port, state="down" if what == "unplug" else "up")
    elif what == "count":
        answer = str(ranks_alive())
    (folder / f"{asked.name}.half").write_text(answer)
    os.replace(folder / f"{asked.name}.half", folder / f"done-{asked.name}")


def ranks_alive():
    """How many agents and ranks run on all hosts: processes whose parent is a launch server, or one
    of its agents.
    """
    count = 0
    for process in psutil.Process().children(recursive=True):
        try:
            is_server, parent = "preloaded.py" in " ".join(process.cmdline()), process.parent()
            count += (
                is_server and parent is not None and "preloaded.py" in " ".join(parent.cmdline())
            )
        except psutil.NoSuchProcess:
            continue
    return count


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
