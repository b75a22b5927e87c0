"""`ddp-course hosts`: bring several machines together for `launch(fn, hosts=…)`.

`start` runs the controller on this machine, `join` an engine on each machine that is to have ranks. All that goes
between them is encrypted (CurveZMQ), and only a machine with the file that `start` writes can join.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..running import files, linux
from ..running.files import connection_folder

REGISTRATION_SECONDS = 15
MISSED_HEARTBEATS = 4  # an engine hears one a second, and gives up sooner than the controller, which waits for 10
REJOIN_SECONDS = 120  # how long an engine tries to come back
LOST, NOT_LET_IN = 75, 76  # exit codes of an engine
OWNER_ONLY = 0o700
ENDINGS = (signal.SIGTERM, signal.SIGHUP)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    start = actions.add_parser("start", help="run the controller, here, until it is stopped")
    start.add_argument("--ip", required=True, help="this machine's address, as the other machines reach it")
    start.add_argument("--engines", metavar="FILE", help="where to leave the file with which engines join")
    start.add_argument("--ssh", metavar="NAMES", help="start an engine on each of these hosts, by ssh; with commas")
    start.add_argument("--slurm", action="store_true", help="start an engine on each node of this Slurm allocation")
    start.set_defaults(run=begin)
    join = actions.add_parser("join", help="take part: run an engine on this machine until the controller ends")
    join.add_argument(
        "file", metavar="FILE", help='what "hosts start" has written; "-" reads it as a line of the input'
    )
    join.set_defaults(run=lambda args: take_part(args.file))


def begin(args: argparse.Namespace) -> int:
    """Run the controller until it is interrupted, and the engines that were asked for; one controller for a folder."""
    folder = connection_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=OWNER_ONLY)
    folder.chmod(OWNER_ONLY)
    for ending in ENDINGS:
        signal.signal(ending, signal.default_int_handler)
    try:
        with files.claimed(folder / "controller"):
            return serve(folder, args)
    except BlockingIOError as error:
        raise LaunchError(
            f'"hosts start" runs already ({error}); end it there with Ctrl-C, '
            "or have a second one beside it: set DDP_COURSE_HOSTS to another folder for it and its notebook"
        ) from None
    except KeyboardInterrupt:
        return 0


def serve(folder: Path, args: argparse.Namespace) -> int:
    """Run controller and engines; at the end stop them, and delete the keys in `folder`."""
    delete_keys(folder)
    processes = [start_controller(folder, args.ip)]
    try:
        file = wait_for_files(folder, processes[0], args.engines)
        print(f"The controller runs on {args.ip}. On every machine that is to have ranks, with this file copied there:")
        print(f"\n    ddp-course hosts join {shlex.quote(str(file))}\n", flush=True)
        processes += start_engines(file, args.ssh.split(",") if args.ssh else [], args.slurm)
        print('Then, in a cell here: launch(fn, hosts="all", world_size=...). Ctrl-C ends it all.', flush=True)
        return processes[0].wait()
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
        delete_keys(folder)


def delete_keys(folder: Path) -> None:
    """Delete the files with which heads and engines connect, and the list of hosts."""
    for file in folder.glob("*.json"):
        file.unlink()


def end_with_us() -> None:
    """In a child process: let it end in good order when this program ends, however it does."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGTERM)


def start_controller(folder: Path, address: str) -> subprocess.Popen:
    """ipyparallel's controller on this address, with encryption, its files in `folder`, and quiet."""
    options = [f"--ip={address}", f"--location={address}", "--IPController.enable_curve=True", "--nodb", "--ping=1000"]
    options += [f"--profile-dir={folder / 'profile'}", "--log-level=ERROR"]
    options += [f"--IPController.{peer}_json_file={folder}/ipcontroller-{peer}.json" for peer in ("client", "engine")]
    return start_quietly(["ipyparallel.controller", *options], folder / "controller.log")


def start_quietly(module: list, log: Path) -> subprocess.Popen:
    """Start a module of Python, whose files are for the owner only and whose words go to `log`; it ends with us."""
    with open(log, "wb") as words:
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": words, "stderr": words}
        return subprocess.Popen([sys.executable, "-m", *module], umask=0o077, preexec_fn=end_with_us, **quiet)


def wait_for_files(folder: Path, controller: subprocess.Popen, copy_to: str | None) -> Path:
    """The file for engines, once the controller has written it; copied to the path `copy_to`, for the owner only."""
    file = folder / "ipcontroller-engine.json"
    while not (file.is_file() and (folder / "ipcontroller-client.json").is_file()):
        if controller.poll() is not None:
            words = (folder / "controller.log").read_text(errors="replace").strip().split("\n")[-1]
            raise LaunchError(f"the controller did not start; is the address this machine's own? {words}")
        time.sleep(0.05)
    if copy_to is None:
        return file
    return files.replace_file(Path(copy_to).absolute(), file.read_bytes(), "--engines", 0o600)


def start_engines(file: Path, names: list, slurm: bool) -> list:
    """One engine on each named host by ssh, with the file as a line of its input; or one on each node by srun."""
    join = [sys.executable, "-m", "ddp_course.cli", "hosts", "join"]
    started = []
    for name in names:
        command = ["ssh", *shlex.split(os.environ.get("DDP_COURSE_SSH", "")), name, shlex.join([*join, "-"])]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        process.stdin.write(json.dumps(json.loads(file.read_text())).encode() + b"\n")
        process.stdin.flush()  # it stays open: when this process ends, so do the engines
        started.append(process)
    if slurm:
        if "SLURM_JOB_ID" not in os.environ:
            raise LaunchError("--slurm works inside an allocation; get one with: salloc --nodes=2")
        srun = ["srun", "--ntasks-per-node=1", "--overlap", *join, str(file)]
        started.append(subprocess.Popen(srun, preexec_fn=end_with_us))
    return started


def take_part(name: str) -> int:
    """Keep an engine on this machine: a new one whenever the way to the controller was cut, until it stays away.

    The engine is a process of its own, as ipyparallel's cannot begin anew.
    """
    if find_spec("ipyparallel") is None:
        raise LaunchError('joining needs the package ipyparallel; run: pip install "ddp-course[hosts]"')
    text = connection(name)
    for ending in ENDINGS:
        signal.signal(ending, lambda *_: sys.exit(0))
    if name == "-":
        threading.Thread(target=end_with_standard_input, daemon=True).start()
    with tempfile.NamedTemporaryFile("w", prefix="ddp_course_hosts_", suffix=".json") as file:  # for the owner only
        file.write(text)
        file.flush()
        code = keep_engine(file.name if name == "-" else name)
    if code == NOT_LET_IN:
        raise LaunchError(
            f"the controller of {name} did not let this machine in: it has ended, cannot be reached, or the file is of "
            "another one; copy it anew"
        )
    if code:
        raise LaunchError(f"this machine's engine ended with code {code}; join again. Its last words: {engine_log()}")
    return 0


def connection(name: str) -> str:
    """The text of a connection file, "-" for a line of the standard input; LaunchError if that is something else."""
    if name != "-" and not Path(name).is_file():
        raise FileNotFoundError(f'there is no file "{name}"; copy it from the machine where "hosts start" runs')
    text = sys.stdin.readline() if name == "-" else Path(name).read_text(errors="replace")
    try:
        whole = {"registration", "interface", "location", "curve_serverkey"} <= json.loads(text).keys()
    except (ValueError, AttributeError):
        whole = False
    if not whole:
        what = "the standard input" if name == "-" else name
        raise LaunchError(f'{what} is not what "hosts start" has written; copy the file anew from that machine')
    return text


def end_with_standard_input() -> None:
    """In a thread: what started this over ssh has ended when its end of the input is closed."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def keep_engine(file: str) -> int:
    """Run engines, one after the other while each loses its controller; the exit code of the last."""
    code, deadline = run_engine(file), -math.inf
    while code == LOST or (code == NOT_LET_IN and time.monotonic() < deadline):
        if code == LOST:
            deadline = time.monotonic() + REJOIN_SECONDS
            print("ddp-course: the controller is not heard any more; joining again", file=sys.stderr, flush=True)
        code = run_engine(file)
    return code


def run_engine(file: str) -> int:
    """Run one engine, a process of its own that ends with this one; returns its exit code."""
    engine_log().parent.mkdir(parents=True, exist_ok=True, mode=OWNER_ONLY)
    with start_quietly([__name__, file], engine_log()) as engine:
        try:
            return engine.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            engine.terminate()


def engine_log() -> Path:
    """Where an engine leaves what it has to say."""
    return connection_folder() / "engine.log"


def be_engine(file: str) -> None:
    """Be an engine until the controller is gone; exits with LOST then, with NOT_LET_IN if it was never let in."""
    from ipyparallel.engine.app import IPEngine

    class Engine(IPEngine):
        """ipyparallel's engine; the process that started it says what went wrong."""

        def abort(self) -> None:
            """No answer, or none that could be decrypted."""
            os._exit(NOT_LET_IN)

    profile = connection_folder() / "engine"
    profile.mkdir(exist_ok=True, mode=OWNER_ONLY)
    options = [f"--file={file}", f"--timeout={REGISTRATION_SECONDS}", "--log-level=CRITICAL"]
    options += [f"--IPEngine.max_heartbeat_misses={MISSED_HEARTBEATS}", f"--profile-dir={profile}"]
    with contextlib.suppress(RuntimeError):  # its loop was stopped, as it does when heartbeats fail to come
        Engine.launch_instance(argv=options)
    os._exit(LOST)


if __name__ == "__main__":
    be_engine(sys.argv[1])
