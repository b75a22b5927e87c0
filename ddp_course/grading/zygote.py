"""A process that has loaded everything once, and forks a warden for each job: `python -m ddp_course.grading.zygote`.

Loading torch, pytest and Jupyter takes seconds, a fork milliseconds. The zygote runs no code of a learner's; what it
forks starts from the same clean state each time, so memory stays constant. It has loaded no stage of the course, no
task and no judge. Its standard input is a socket: each message brings the folder of an order (order.json), a socket for
the outcome, and for answers one to the examiner. It ends when its standard input does.
What a warden leaves behind that was killed itself, becomes the zygote's, and is killed too.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from ddp_course.grading import sandbox
from ddp_course.grading.family import children
from ddp_course.running.linux import take_large_pages

PRELOAD = (
    "torch", "torch._dynamo", "torch.utils.data", "numpy", "pytest", "nbval.plugin", "nbformat.v4",
    "ipykernel.kernelapp", "ipykernel.ipkernel",
    "jupyter_client.manager", "jupyter_client.provisioning", "xml.dom.minidom", "ddp_course.running.wire",
    "ddp_course.grading.nbval_run", "ddp_course.grading.answering",
)  # fmt: skip
LONGEST_PATH = 1 << 12


def preload() -> None:
    """Load what jobs need. A part that this machine lacks fails later, in the job that needs it."""
    for name in PRELOAD:
        try:
            import_module(name)
        except ImportError:
            continue
    sandbox.libraries()
    gc.collect()
    gc.freeze()
    take_large_pages()


def serve(control: socket.socket) -> None:
    """Fork a warden for each order until the grader is gone, then kill what still runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sandbox.prctl(sandbox.PR_SET_CHILD_SUBREAPER, 1)
    sandbox.namespaces_allowed()  # tried once, here, and known to all wardens
    wardens = set()
    while True:
        ready, _, _ = select.select([control], [], [], 0.5)
        end_orphans(wardens)
        if not ready:
            continue
        order, descriptors, _, _ = socket.recv_fds(control, LONGEST_PATH, 2)
        if not order:
            break
        warden = os.fork()
        if warden == 0:
            control.close()
            be_warden(order.decode(), *(socket.socket(fileno=descriptor) for descriptor in descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        wardens.add(warden)
    sandbox.end_all()


def end_orphans(wardens: set[int]) -> None:
    """Forget the `wardens` that have ended, and kill children that are no wardens: theirs, if they were killed."""
    for child in children():
        if child not in wardens:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    try:
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            wardens.discard(pid)
    except ChildProcessError:
        return


def be_warden(folder: str, answer: socket.socket, peer: socket.socket | None = None) -> None:
    """In the forked child: run the job of a folder in the sandbox, send back how it went. Never returns."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        order = json.loads(Path(folder, "order.json").read_text())
        module, function = order["job"].split(":")
        job = getattr(import_module(module), function)
        limits = sandbox.Limits(**order["limits"])
        seen = None if peer else [*sandbox.libraries(), str(sandbox.PACKAGE)]  # a host shuts its ranks in itself
        outcome = sandbox.confine(lambda: job(order, answer, peer), folder, limits, seen, drop=not peer)
        answer.sendall(json.dumps({"outcome": outcome}).encode() + b"\n")
    except BaseException as error:
        answer.sendall(json.dumps({"outcome": "failed", "message": repr(error)}).encode() + b"\n")
    finally:
        os._exit(0)


if __name__ == "__main__":
    from ddp_course.grading import zygote  # so that what is forked has this module under its own name

    zygote.preload()
    zygote.serve(socket.socket(fileno=os.dup(0)))
