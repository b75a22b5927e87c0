"""The host of answers: in a sandbox, a fresh process for each task and rank, of which only plain data comes back.

    grader ── examiner  = socket =  host ── rank 0, rank 1, …
              judge, references,     forks,  one answer, its probe, its own inputs,
              seeds, all inputs      relays  the modules that its task may use

The host runs no answer. It forks the ranks of a task, hands to each what the examiner sends for it, is the switch of
their network (`relay.py`), and passes back what each says and what left it, as frames of JSON. What the probe prepares
is done on all ranks before an answer is loaded on any; from then on each byte counts.
"""

import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

from ..errors import Failure
from ..running.launching import rank as ranks
from ..running.launching.launched import how_it_ended
from ..running.linux import die_with_parent
from . import harness, sandbox
from .frames import COUNTED, EVIDENCE, FAILURE, LATE, READY, read_frame, send_frame
from .plain import pack, unpack
from .probing import load, patience_seconds, run_probe
from .relay import Switch, join

MOST_EVIDENCE = 32 << 20  # bytes of JSON a rank and task
GRACE_SECONDS = 0.4  # after the first failure: for others to tell theirs, of which the earliest counts
PACKAGE = __package__.split(".")[0]


def host_answers(order: dict, answer: socket.socket, peer: socket.socket) -> None:
    """The job of a sandbox: until the examiner is done, run one task after the other."""
    answer.close()
    ranks.hide_gpus()
    with peer:
        while True:
            try:
                _, head = read_frame(peer)
            except EOFError:
                return
            task = json.loads(head)
            run_task(peer, task["ranks"], task["seconds"], order["folder"])


def run_task(peer: socket.socket, count: int, seconds: float, folder: str) -> None:
    """Fork the ranks of a task, give each its order, pass back what they say and what left them, end them."""
    ours, wires, pids = [], [], []
    try:
        for number in range(count):  # all are forked before any order is read, so that none holds another's
            (one, theirs), (wire, their_wire) = socket.socketpair(), socket.socketpair()
            ours.append(one)
            wires.append(wire)
            pids.append(os.fork())
            if pids[-1] == 0:
                for descriptor in (peer, *ours, *wires):
                    descriptor.close()
                be_rank(theirs, their_wire, number, count, folder)
            theirs.close()
            their_wire.close()
        for one in ours:
            kind, content = read_frame(peer)
            try:
                send_frame(one, kind, content)
            except OSError:
                continue  # it has ended already, which shows below
        switch = Switch(wires)
        for kind, content in hear(ours, switch, pids, seconds):
            send_frame(peer, kind, content)
        send_frame(peer, COUNTED, json.dumps([switch.sent, switch.nonsense]).encode())
    finally:
        end(pids)
        for one in (*ours, *wires):
            one.close()


def hear(ours: list[socket.socket], switch: Switch, pids: list[int], seconds: float) -> list[tuple[int, bytes]]:
    """What each rank says, as frames, passing on their messages; LATE for one that has not said anything in time."""
    said: dict[int, tuple[int, bytes]] = {}
    preparing = set(range(len(ours)))
    deadline = time.monotonic() + seconds
    wires = {wire: number for number, wire in enumerate(switch.sockets)}
    while len(said) < len(ours):
        waiting = {one: number for number, one in enumerate(ours) if number not in said}
        ready, _, _ = select.select([*wires, *waiting], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for wire in [one for one in ready if one in wires]:
            try:
                switch.take(wires[wire], deadline)
            except (OSError, EOFError, ValueError):
                del wires[wire]  # it has ended, or talks nonsense: nobody hears it any more
        for one in [one for one in ready if one in waiting]:
            number = waiting[one]
            frame = heard(one, number, pids, deadline)
            if frame[0] == READY and number in preparing:
                preparing.remove(number)
                if not preparing:
                    let_go(ours, switch)
                continue
            said[number] = frame
            if frame[0] != EVIDENCE:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return [said.get(number, (LATE, b"")) for number in range(len(ours))]


def heard(one: socket.socket, number: int, pids: list[int], deadline: float) -> tuple[int, bytes]:
    """The frame that a rank has begun to send, or one about how it failed to."""
    try:
        return read_frame(one, MOST_EVIDENCE, deadline)
    except (OSError, EOFError):
        return failure(number, *how_it_ended(exit_code(pids, number)))
    except ValueError as error:
        return failure(number, "ValueError", f"the answer is too large: {error}")


def let_go(ours: list[socket.socket], switch: Switch) -> None:
    """All ranks are prepared, and none has an answer yet: count from here on, and let them load it."""
    switch.start_counting()  # what they have sent has been received, so nothing is on its way
    for one in ours:
        with suppress(OSError):  # a rank that has ended
            send_frame(one, READY, b"")


def failure(number: int, type_name: str, message: str) -> tuple[int, bytes]:
    """A frame about a rank that could not tell itself how it failed."""
    told = Failure(number, type_name, message, time=time.monotonic())
    return FAILURE, json.dumps(vars(told)).encode()


def exit_code(pids: list[int], number: int) -> int | None:
    """How a rank ended whose connection is closed, forgetting its id; None if it still runs."""
    for _ in range(50):
        pid, status = os.waitpid(pids[number], os.WNOHANG)
        if pid:
            pids[number] = 0
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def end(pids: list[int]) -> None:
    """Kill the ranks, and wait until they are gone."""
    for pid in filter(None, pids):
        os.kill(pid, signal.SIGKILL)
    for pid in filter(None, pids):
        os.waitpid(pid, 0)


def be_rank(connection: socket.socket, wire: socket.socket, number: int, count: int, folder: str) -> None:
    """In a forked process: one rank of one task. Never returns."""
    die_with_parent()
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(silent, descriptor)
    try:
        order = unpack(json.loads(read_frame(connection)[1]))
        evidence = pack(answer_order(order, number, count, connection, wire, folder))
        kind, content = EVIDENCE, json.dumps(evidence).encode()
    except BaseException as error:
        told: dict[str, Any] = {"rank": number, **ranks.describe(error)}
        kind, content = FAILURE, json.dumps({**told, "message": told["message"][:4000]}).encode()
    send_frame(connection, kind, content)
    while True:
        signal.pause()  # the others may still need this rank; the host ends all together


def answer_order(
    order: dict, number: int, count: int, connection: socket.socket, wire: socket.socket, folder: str
) -> Any:
    """Take what is allowed, close the door behind it, run the answer under its probe; the evidence."""
    scope: dict[str, Any] = {"__name__": "probe"}
    harness.run_imports(order["probe"], *(source for name, source in order["cells"] if name == "imports"))
    for name in order["modules"]:
        import_module(name)
    exec(compile(order["probe"], "<task>", "exec"), scope)
    torch.default_generator.manual_seed(number)
    patience_seconds.set(order["patience"])
    ranks.choose_device({"devices": ["cpu"] * count, "ranks": list(range(count)), "threads": 1, "backend": ""}, number)
    if count > 1:
        join(wire, number, count)
    sandbox.shut_in(folder)
    sys.meta_path.insert(0, Gate())

    def answers():
        return load(order["number"], order["names"], order["cells"])

    def all_ready():
        send_frame(connection, READY, b"")
        read_frame(connection)

    return run_probe(scope["probe"], answers, order["inputs"], order["forbidden"], scope["prepare"], all_ready)


class Gate:
    """Refuses to import more of the course than is there when it is put up."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """ImportError for a module of the course; of others, this knows nothing."""
        if name.split(".")[0] == PACKAGE:
            raise ImportError(f"{name} is not for this task: an answer may use what its notebook imports")
