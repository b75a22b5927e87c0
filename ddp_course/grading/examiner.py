"""The examiner: draws the inputs of tasks, sends them to where the answers run, judges what comes back.

`python -m ddp_course.grading.examiner` has loaded all tasks once, and forks for each submission. No answer ever runs
here, and what comes back is text. A judge gets so many seconds and so much memory, since what it looks at may be made
to waste both. Standard input is a socket: each message brings one to the host of the answers and one to the grader.
"""

import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import import_module

from ddp_course.errors import Failure, LaunchTimeout, RankError, TooSlow
from ddp_course.grading.examine import Verdict, draw, explain, verdict
from ddp_course.grading.frames import EVIDENCE, FAILURE, ORDER, read_frame, send_frame
from ddp_course.grading.plain import pack
from ddp_course.grading.probing import PATIENCE_SECONDS, own_share
from ddp_course.grading.tasks import Task, exercises, find

TASK_SECONDS = 20.0
JUDGE_SECONDS = 10.0  # of the processor, so that a busy machine makes no answer wrong
MOST_MEMORY = 6 << 30


def serve(control: socket.socket) -> None:
    """Fork a process for each submission until the grader is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # none is waited for
    while True:
        select.select([control], [], [])
        message, descriptors, _, _ = socket.recv_fds(control, 16, 2)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            try:
                examine_submission(*(socket.socket(fileno=descriptor) for descriptor in descriptors))
            finally:
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def examine_submission(host: socket.socket, grader: socket.socket) -> None:
    """Take the order from the grader, examine one task after the other, send a line of JSON for each."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY if hard == resource.RLIM_INFINITY else hard, hard))
    order = json.loads(read_frame(grader)[1])
    seconds = int(len(order["items"]) * (JUDGE_SECONDS + 5))  # also where Python cannot be interrupted
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    for number, cells in order["items"]:
        said = examine_task(host, find(number), cells, order)
        grader.sendall(json.dumps({"task": number, **asdict(said)}).encode() + b"\n")


def examine_task(host: socket.socket, task: Task, cells: list, order: dict) -> Verdict:
    """The verdict on one answer."""
    inputs = draw(task.number, order["seed"], order["hidden"])
    common = {
        "number": task.number, "names": list(task.names), "cells": [tuple(cell) for cell in cells],
        "forbidden": list(task.forbidden), "modules": [name for name in task.imports if name.startswith("ddp_course.")],
        "probe": order["probes"][task.number], "patience": PATIENCE_SECONDS,
    }  # fmt: skip
    send_frame(host, ORDER, json.dumps({"ranks": task.ranks, "seconds": TASK_SECONDS}).encode())
    for rank in range(task.ranks):
        of_rank = {**common, "inputs": own_share(inputs, task.private, rank)}
        send_frame(host, ORDER, json.dumps(pack(of_rank)).encode())
    said = [read_frame(host) for _ in range(task.ranks)]
    sent, nonsense = json.loads(read_frame(host)[1])
    found = judged(task, said, inputs, sent)
    odd = tuple(f"rank {rank} sent what is no message to the switch of its network" for rank in nonsense)
    return replace(found, suspicious=(*found.suspicious, *odd))


def judged(task: Task, said: list[tuple[int, bytes]], inputs: dict, sent: Sequence[Sequence[int]]) -> Verdict:
    """What the frames of all ranks amount to; in time, and within memory. `sent[a][b]`: bytes from rank a to b."""
    failures = [Failure(**json.loads(content)) for kind, content in said if kind == FAILURE]
    if failures:
        failures.sort(key=lambda failure: (failure.consequence, failure.time))
        return verdict(task, {"failure": explain(RankError(failures, task.ranks), task)}, inputs)
    if any(kind != EVIDENCE for kind, _ in said):
        return verdict(task, {"failure": explain(LaunchTimeout(TASK_SECONDS, []), task)}, inputs)
    try:
        with at_most(JUDGE_SECONDS):
            return verdict(task, {"evidence": [json.loads(content) for _, content in said]}, inputs, sent)
    except TooSlow:
        why = f"what your answer returned is too large: not looked at in {JUDGE_SECONDS:g} s"
    except (MemoryError, RecursionError, ValueError) as error:
        why = f"what your answer returned could not be read ({type(error).__name__})"
    return verdict(task, {"failure": why}, inputs)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the block after so many seconds of the processor."""

    def stop(*_: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    for number in exercises():
        import_module(f"ddp_course.grading.tasks.exercise{number:02d}")
    serve(socket.socket(fileno=os.dup(sys.stdin.fileno())))
