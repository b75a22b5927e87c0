"""`launch` where processes cannot be forked (Windows): everything starts from nothing, and meets in a folder.

    caller ── agent (`be_agent`) ── torch's elastic launcher ── rank 0 … rank K-1

The call, the ranks' reports, prints and stacks are files in a temporary folder that the caller reads and removes.
Slower to start than the preloaded server (each process imports torch), but with the same results and errors.
"""

import faulthandler
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil

from ..errors import Failure, LaunchError, LaunchTimeout, RankError
from . import flight_recorder, stacks
from .run import ENDING_SECONDS, GRACE_SECONDS, STARTING_SECONDS, Lines, how_it_ended

POLL_SECONDS = 0.05


def run(setting, payload, show) -> list:
    """Run one launch to its end, as `launch.run_ranks` does; `payload` is an open file with the packed call."""
    with tempfile.TemporaryDirectory(prefix="ddp_course_", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        payload.seek(0)
        (folder / "call").write_bytes(payload.read())
        (folder / "recorder").write_bytes(bytes(flight_recorder.size(setting["world_size"])))
        (folder / "setting").write_bytes(pickle.dumps(setting))
        environ = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        agent_source = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from ddp_course.running import spawned; spawned.be_agent({name!r})"
        )
        with open(folder / "log", "wb") as log:
            agent = subprocess.Popen(
                [sys.executable, "-c", agent_source],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env=environ,
            )  # fmt: skip
        try:
            return watch(agent, folder, setting, show)
        finally:
            kill_tree(agent)


def watch(agent, folder, setting, show) -> list:
    """Show what ranks print until all have reported, one has failed, or time is up; then the results or the error."""
    world_size = setting["world_size"]
    printed = [
        (Lines(None, lambda text, r=rank, s=stream: show(r, s, text)), folder / f"{stream}-{rank}")
        for rank in range(world_size)
        for stream in ("stdout", "stderr")
    ]
    reading = [(lines, path, 0) for lines, path in printed]
    deadline, begun, failed = time.monotonic() + STARTING_SECONDS + setting["timeout"], False, None
    while True:
        ended = agent.poll() is not None
        reading = [(lines, path, show_more(lines, path, offset)) for lines, path, offset in reading]
        reports = {rank: report for rank in range(world_size) if (report := read_report(folder, rank))}
        if not begun and (folder / "stacks-0").exists():
            begun, deadline = True, time.monotonic() + setting["timeout"] + ENDING_SECONDS / 5
        told = [what["consequence"] for kind, what in reports.values() if kind == "failed"]
        failed = failed or (time.monotonic() if told else None)
        patience = ENDING_SECONDS if all(told) else GRACE_SECONDS  # a broken connection has a cause still to be told
        if ended or (failed and time.monotonic() > failed + patience):
            break
        if time.monotonic() > deadline:
            raise LaunchTimeout(setting["timeout"], describe_ranks(folder, world_size, reports))
        time.sleep(POLL_SECONDS)
    for lines, _, _ in reading:
        lines.close()
    return outcome(folder, world_size, reports)


def show_more(lines, path, offset) -> int:
    """Show what a rank has printed since `offset`; returns the new offset."""
    if not path.exists():
        return offset
    with open(path, "rb") as file:
        file.seek(offset)
        taken = file.read()
    lines.feed(taken)
    return offset + len(taken)


def read_report(folder, rank):
    """What a rank has reported, ("result", value) or ("failed", description), or None so far."""
    path = folder / f"report-{rank}"
    return pickle.loads(path.read_bytes()) if path.exists() else None


def describe_ranks(folder, world_size, reports) -> list:
    """For each rank its last collective, and the stack that its own watchdog has written."""
    with open(folder / "recorder", "rb") as recorder:
        calls, now = flight_recorder.last_calls(recorder.fileno(), world_size), time.monotonic()
    states = []
    for rank in range(world_size):
        dump, pid = folder / f"stacks-{rank}", folder / f"pid-{rank}"
        number = int(pid.read_text()) if pid.exists() and pid.read_text() else None
        text = dump.read_text(errors="replace") if dump.exists() else ""
        states.append(stacks.look(rank, number, text, calls.get(rank), rank in reports, now))
    return states


def outcome(folder, world_size, reports) -> list:
    """The results in rank order, or the error that says best what happened."""
    ended = pickle.loads((folder / "ended").read_bytes()) if (folder / "ended").exists() else {}
    failures = [Failure(rank=rank, **what) for rank, (kind, what) in reports.items() if kind == "failed"]
    for rank, code in ended.items():
        if reports.get(rank, ("result",))[0] == "result":
            failures.append(Failure(rank, *how_it_ended(code)))
    if failures:
        raise RankError(sorted(failures, key=lambda failure: (failure.consequence, failure.time)), world_size)
    if len(reports) < world_size:
        log = (folder / "log").read_text(errors="replace")
        raise LaunchError(f"the ranks were ended from outside; launch again\n{log}".strip())
    return [reports[rank][1] for rank in range(world_size)]


def kill_tree(agent):
    """End the agent and all processes below it."""
    with suppress(psutil.NoSuchProcess):
        tree = [*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)]
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(tree, timeout=ENDING_SECONDS)
    agent.stdin.close()
    agent.wait()


def be_agent(folder):
    """The agent: have torch's elastic launcher spawn the ranks, and put down which of them ended badly."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousStoreInfo, rendezvous_handler_registry
    from torch.distributed.launcher.api import elastic_launch

    from . import agent

    folder = Path(folder)
    setting = pickle.loads((folder / "setting").read_bytes())
    logging.disable()  # the elastic launcher's own reports
    threading.Thread(target=end_with_caller, daemon=True).start()
    nowhere = RendezvousStoreInfo("localhost", 0)  # the ranks meet in a file
    make = lambda parameters: agent.OneAgent(nowhere, parameters.run_id, lambda: None)  # noqa: E731
    rendezvous_handler_registry.register("one-agent", make)
    ended = {}
    try:
        elastic_launch(agent.config(setting["world_size"], "spawn"), be_rank)(str(folder), os.getpid())
    except ChildFailedError as error:
        ended = {rank: failure.exitcode for rank, failure in error.failures.items()}
    (folder / "ended").write_bytes(pickle.dumps(ended))


def end_with_caller():
    """In a thread of the agent: when the caller is gone, its end of our standard input is closed."""
    sys.stdin.buffer.read()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(1)


def be_rank(folder, agent):
    """One rank: the same as `rank.main`, with files instead of pipes."""
    import torch.distributed as dist

    from . import rank as forked

    number, folder = int(os.environ["RANK"]), Path(folder)
    setting = pickle.loads((folder / "setting").read_bytes())
    (folder / f"pid-{number}").write_text(str(os.getpid()))
    threading.Thread(target=lambda: (psutil.Process(agent).wait(), os._exit(1)), daemon=True).start()
    try:
        forked.choose_device(setting, number)
        store = dist.FileStore(str(folder / "store"), setting["world_size"])
        patience = timedelta(seconds=setting["timeout"] + 60)
        dist.init_process_group(
            setting["backend"], store=store, rank=number, world_size=setting["world_size"], timeout=patience
        )
        flight_recorder.attach(os.open(folder / "recorder", os.O_RDWR), number, setting["world_size"])
        forked.redirect_output(*(open_to_write(folder / f"{stream}-{number}") for stream in ("stdout", "stderr")))
        stack = open_to_write(folder / f"stacks-{number}")
        faulthandler.dump_traceback_later(setting["timeout"], file=stack)
        answer = forked.pack_result(forked.call(os.open(folder / "call", os.O_RDONLY | getattr(os, "O_BINARY", 0))))
    except BaseException as error:
        sys.stdout.flush()
        put_report(folder, number, pickle.dumps(("failed", forked.describe(error))))
        threading.Event().wait()
    sys.stdout.flush()
    sys.stderr.flush()
    put_report(folder, number, answer)


def open_to_write(path) -> int:
    """A descriptor of a new file."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0))


def put_report(folder, rank, pickled):
    """Write a report under a temporary name first: the caller must never see half of it."""
    temporary = folder / f"writing-{rank}"
    temporary.write_bytes(pickled)
    os.replace(temporary, folder / f"report-{rank}")
