"""`ddp-course hosts`: bring several machines together for `launch(fn, hosts=…)`.

`start` runs the controller on this machine, `join` an engine on each machine that is to have ranks. All that goes
between them is encrypted (CurveZMQ), and only who has the file that `start` writes can join.
"""

import argparse
import atexit
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..running.launching.hosts import connection_folder

REGISTRATION_SECONDS = 15
OWNER_ONLY = 0o700


def add_parser(subparsers: Any) -> None:
    """Add `hosts` to the command line."""
    parser = subparsers.add_parser("hosts", help="bring several machines together for launch(fn, hosts=...)")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    start = actions.add_parser("start", help="run the controller, here, until it is stopped")
    start.add_argument("--ip", required=True, help="this machine's address, as the other machines reach it")
    start.add_argument("--engines", metavar="FILE", help="where to leave the file with which engines join")
    start.add_argument("--ssh", metavar="NAMES", help="start an engine on each of these hosts, by ssh; with commas")
    start.add_argument("--slurm", action="store_true", help="start an engine on each node of this Slurm allocation")
    start.set_defaults(run=begin)
    join = actions.add_parser("join", help="take part: run an engine on this machine until the controller ends")
    join.add_argument("file", metavar="FILE", help='what "hosts start" has written; "-" reads it from standard input')
    join.set_defaults(run=lambda args: take_part(args.file))


def begin(args: argparse.Namespace) -> int:
    """Run the controller until it is interrupted, and the engines that were asked for."""
    folder = connection_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=OWNER_ONLY)
    folder.chmod(OWNER_ONLY)
    for old in folder.glob("ipcontroller-*.json"):
        old.unlink()
    controller = start_controller(folder, args.ip)
    engines: list = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        file = wait_for_files(folder, controller, args.engines)
        print(f"The controller runs on {args.ip}. On every machine that is to have ranks, with this file copied there:")
        print(f"\n    ddp-course hosts join {shlex.quote(str(file))}\n", flush=True)
        engines = start_engines(file, args.ssh.split(",") if args.ssh else [], args.slurm)
        print('Then, in a cell here: launch(fn, hosts="all", world_size=...). Ctrl-C ends it all.', flush=True)
        return controller.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        for process in [*engines, controller]:
            process.terminate()
        for process in [*engines, controller]:
            process.wait()
        for old in folder.glob("ipcontroller-*.json"):
            old.unlink()


def start_controller(folder: Path, address: str) -> subprocess.Popen:
    """ipyparallel's controller on this address, with encryption, its files in `folder`, and quiet."""
    options = [f"--ip={address}", f"--location={address}", "--IPController.enable_curve=True", "--nodb", "--ping=1000"]
    options += [f"--profile-dir={folder / 'profile'}", "--log-level=ERROR"]
    options += [f"--IPController.{who}_json_file={folder}/ipcontroller-{who}.json" for who in ("client", "engine")]
    with open(folder / "controller.log", "wb") as log:
        command = [sys.executable, "-m", "ipyparallel.controller", *options]
        return subprocess.Popen(command, umask=0o077, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def wait_for_files(folder: Path, controller: subprocess.Popen, copy_to: str | None) -> Path:
    """The file for engines, once the controller has written it; copied to where it was wanted, for the owner only."""
    file = folder / "ipcontroller-engine.json"
    while not (file.is_file() and (folder / "ipcontroller-client.json").is_file()):
        if controller.poll() is not None:
            words = (folder / "controller.log").read_text(errors="replace").strip().split("\n")[-1]
            raise LaunchError(f"the controller did not start; is the address this machine's own? {words}")
        time.sleep(0.05)
    if copy_to is None:
        return file
    handle = os.open(copy_to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as copy:
        os.fchmod(handle, 0o600)
        copy.write(file.read_bytes())
    return Path(copy_to).absolute()


def start_engines(file: Path, names: list, slurm: bool) -> list:
    """One engine on each named host by ssh, with the file on its standard input; or one on each node by srun."""
    join = [sys.executable, "-m", "ddp_course.cli", "hosts", "join"]
    started = []
    for name in names:
        command = ["ssh", *shlex.split(os.environ.get("DDP_COURSE_SSH", "")), name, shlex.join([*join, "-"])]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        process.stdin.write(file.read_bytes() + b"\n")
        process.stdin.flush()  # it stays open: when this process ends, so do the engines
        started.append(process)
    if slurm:
        if "SLURM_JOB_ID" not in os.environ:
            raise LaunchError("--slurm works inside an allocation; get one with: salloc --nodes=2")
        started.append(subprocess.Popen(["srun", "--ntasks-per-node=1", "--overlap", *join, str(file)]))
    return started


def take_part(file: str) -> int:
    """Be an engine until the controller is gone."""
    try:
        from ipyparallel.engine.app import IPEngine
    except ImportError:
        raise LaunchError('joining needs the package ipyparallel; run: pip install "ddp-course[hosts]"') from None
    if file == "-":
        text = read_object(sys.stdin)
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
        file = put_down(text)
    if not Path(file).is_file():
        raise FileNotFoundError(f'there is no file "{file}"; copy it from the machine where "hosts start" runs')

    class Engine(IPEngine):
        """ipyparallel's engine, with one line for what goes wrong."""

        def abort(self) -> None:
            """No answer, or none that could be decrypted."""
            print(
                f"ddp-course: the controller of {file} did not let this machine in within {self.timeout:g} s: it has "
                "ended, cannot be reached, or the file is of another one; copy it anew",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            os._exit(1)

    profile = connection_folder() / "engine"
    profile.mkdir(parents=True, exist_ok=True, mode=OWNER_ONLY)
    options = [f"--file={file}", f"--timeout={REGISTRATION_SECONDS}", "--log-level=CRITICAL"]
    options += ["--IPEngine.max_heartbeat_misses=10", f"--profile-dir={profile}"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Engine.launch_instance(argv=options)
    return 0


def read_object(stream: Any) -> str:
    """The lines of `stream` up to the end of a JSON object, whose keys of encryption may have braces in them."""
    text = ""
    for line in iter(stream.readline, ""):
        text += line
        with contextlib.suppress(ValueError):
            json.loads(text)
            return text
    raise LaunchError("what came over ssh is no connection file; was the command on the other side ended?")


def put_down(text: str) -> str:
    """A file for the owner only with what came over ssh; it ends with this process."""
    folder = tempfile.mkdtemp(prefix="ddp_course_hosts_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = Path(folder) / "ipcontroller-engine.json"
    file.write_text(text)
    return str(file)
