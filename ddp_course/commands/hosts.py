"""`ddp-course hosts`: bring several machines together for `launch(fn, hosts=…)`.

`start` runs ipyparallel's controller on this machine, `join` its engine on each machine that is to
have ranks. All their messages are encrypted (CurveZMQ), and only a machine with the file that
`start` writes can join.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..running import files, linux
from ..running.files import connection_folder

# An engine gives up after missing this many heartbeats, one per second, the controller after 10.
MISSED_HEARTBEATS = 4
JOIN_SECONDS, REJOIN_SECONDS = (
    15,
    120,
)  # An engine waits this long for a controller, and for one that it has lost.
NOT_LET_IN = 255  # An ipyparallel engine that no controller answered exits with this code.
# A child process that calls this gets SIGTERM when this program ends, however it ends.
end_with_us = partial(linux.prctl, linux.PR_SET_PDEATHSIG, signal.SIGTERM)


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    start = actions.add_parser("start", help="run the controller, here, until it is stopped")
    start.add_argument(
        "--ip", required=True, help="this machine's address, as the other machines reach it"
    )
    start.add_argument(
        "--engines", metavar="FILE", help="where to leave the file with which engines join"
    )
    start.add_argument(
        "--ssh", metavar="NAMES", help="start an engine on each of these hosts, by ssh; with commas"
    )
    start.add_argument(
        "--slurm", action="store_true", help="start an engine on each node of this Slurm allocation"
    )
    join = actions.add_parser(
        "join", help="take part: run an engine on this machine until the controller ends"
    )
    join.add_argument(
        "file", metavar="FILE", help='what "hosts start" has written; "-" reads it from the input'
    )
    join.set_defaults(main=take_part)


def main(args: argparse.Namespace) -> int:
    """Run the controller until it is interrupted, and the engines that were asked for; one
    controller for a folder.
    """
    folder = own_folder()
    try:
        with files.claimed(folder / "start"):
            return serve(folder, args)
    except BlockingIOError as error:
        second = "or set DDP_COURSE_HOSTS to another folder for this one and its notebook"
        raise LaunchError(
            f'"hosts start" runs already ({error}); end it there with Ctrl-C, {second}'
        ) from None


def serve(folder: Path, args: argparse.Namespace) -> int:
    """Run controller and engines; at the end stop them, and delete the keys in `folder`."""
    delete_keys(folder)
    processes = [start_controller(folder, args.ip)]
    try:
        file = folder / "ipcontroller-engine.json"
        if args.engines:
            file = files.replace_file(
                Path(args.engines).absolute(), file.read_bytes(), "--engines", 0o600
            )
        print(
            f"The controller runs on {args.ip}. On every machine that is to have ranks, with this"
            " file copied there:"
        )
        print(f"\n    ddp-course hosts join {shlex.quote(str(file))}\n", flush=True)
        processes += start_engines(file, args.ssh.split(",") if args.ssh else [], args.slurm)
        print(
            'Then, in a cell here: launch(fn, hosts="all", world_size=...). Ctrl-C ends it all.',
            flush=True,
        )
        return processes[0].wait()
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
        delete_keys(folder)


def own_folder() -> Path:
    """The folder of keys and logs, which only its owner can enter."""
    folder = connection_folder()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def delete_keys(folder: Path) -> None:
    """Delete the files with which notebooks and engines connect, and the list of hosts."""
    for file in folder.glob("*.json"):
        file.unlink()


def start_controller(folder: Path, address: str) -> subprocess.Popen:
    """Start the controller on this address, with encryption, and wait until it has written its
    files in `folder`.
    """
    written = {peer: folder / f"ipcontroller-{peer}.json" for peer in ("client", "engine")}
    options = [
        f"--ip={address}",
        f"--location={address}",
        "--IPController.enable_curve=True",
        "--nodb",
        "--ping=1000",
    ]
    options += [f"--IPController.{peer}_json_file={file}" for peer, file in written.items()]
    controller = start_program("controller", "--log-level=ERROR", *options)
    while not all(file.is_file() and file.stat().st_size for file in written.values()):
        if controller.poll() is not None:
            words = (folder / "controller.log").read_text(errors="replace").strip().split("\n")[-1]
            raise LaunchError(
                f"the controller did not start; is the address this machine's own? {words}"
            )
        time.sleep(0.05)
    return controller


def start_program(name: str, *options: str, **environ: str) -> subprocess.Popen:
    """Start ipyparallel's "controller" or "engine", which ends with this process; its files are for
    the owner only.
    """
    if find_spec("ipyparallel") is None:
        raise LaunchError(
            'several hosts need the package ipyparallel; run: pip install "ddp-course[hosts]"'
        )
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            ending, signal.default_int_handler
        )  # On KeyboardInterrupt the callers end their processes.
    folder = own_folder()
    (folder / name).mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-m",
        f"ipyparallel.{name}",
        f"--profile-dir={folder / name}",
        *options,
    ]
    with open(folder / f"{name}.log", "wb") as log:
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        return subprocess.Popen(
            command, env=os.environ | environ, umask=0o077, preexec_fn=end_with_us, **quiet
        )


def start_engines(file: Path, names: list[str], slurm: bool) -> list[subprocess.Popen]:
    """Start an engine on each named host by ssh, which also sends the file; or one on each node by
    srun.
    """
    join = [sys.executable, "-m", "ddp_course.cli", "hosts", "join"]
    started = []
    for name in names:
        command = [
            "ssh",
            *shlex.split(os.environ.get("DDP_COURSE_SSH", "")),
            name,
            shlex.join([*join, "-"]),
        ]
        with file.open() as content:
            started.append(subprocess.Popen(command, stdin=content, preexec_fn=end_with_us))
    if slurm:
        srun = ["srun", "--ntasks-per-node=1", "--overlap", *join, str(file)]
        started.append(subprocess.Popen(srun, preexec_fn=end_with_us))
    return started


def take_part(args: argparse.Namespace) -> int:
    """Keep an engine running on this machine: start a new one when the controller was lost, until
    none answers.
    """
    content, patience = connection(args.file), JOIN_SECONDS
    options = ["--log-level=CRITICAL", f"--IPEngine.max_heartbeat_misses={MISSED_HEARTBEATS}"]
    while True:
        engine = start_program(
            "engine", f"--timeout={patience}", *options, IPP_CONNECTION_INFO=content
        )
        try:
            if engine.wait() == NOT_LET_IN:
                break
        finally:
            engine.terminate()
        print(
            "ddp-course: the controller or the engine was lost; joining again",
            file=sys.stderr,
            flush=True,
        )
        patience = REJOIN_SECONDS
        time.sleep(1)
    reasons = "it has ended, cannot be reached, or the file is of another one; copy it anew"
    raise LaunchError(f"the controller of {args.file} did not let this machine in: {reasons}")


def connection(name: str) -> str:
    """The content of a connection file, "-" for the standard input; LaunchError if that is
    something else.
    """
    text = sys.stdin.read() if name == "-" else Path(name).read_text(errors="replace")
    try:
        json.loads(text)["curve_serverkey"]
    except (ValueError, KeyError, TypeError):
        raise LaunchError(
            f'"{name}" is not what "hosts start" has written; copy it anew from that machine'
        ) from None
    return text
