"""A right answer is tried in every order of its messages.

No right one is refuted, however busy the machine is, and what would go wrong is said in words, with
the learner's line.
"""

import multiprocessing
import re
from textwrap import indent

import pytest
from answers import edited, hand_in, of_kind, submission_of

from ddp_exercises import check, evidence
from ddp_exercises.any_order import confirm
from ddp_exercises.attempt import Attempt
from ddp_exercises.diagnosis import nothing
from ddp_exercises.errors import Wrong
from ddp_exercises.evidence import STILL_RUNNING, TOO_LATE, gather
from ddp_exercises.grading.answers import load_exercises
from ddp_exercises.grading.grader import grade
from ddp_exercises.tasks import cells_with, find, of_exercise, solution
from manyranks.errors import LaunchTimeout
from manyranks.orders import every

EXERCISES = (3, 4, 5, 7, 8, 9)
TASKS = [task for exercise in EXERCISES for task in of_exercise(exercise) if task.every_order]
BUSY_LOOPS = 4


def said_of(number, source):
    """Return what is said of an answer that was right at first, part by part."""
    task = find(number)
    attempt = Attempt(task, task.inputs(1), cells_with(number, source))
    return confirm(nothing(task, ""), attempt).parts


def test_all_tasks_in_which_a_learner_sends_ask_for_every_order():
    numbers = [task.number for task in TASKS]
    assert numbers == [
        "3.1",
        "3.2",
        "3.3",
        "4.2",
        "4.3",
        "4.4",
        "4.6",
        "5.3",
        "5.5",
        "7.5",
        "8.7",
        "9.5",
    ]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.number)
def test_no_right_answer_is_refuted(task):
    for source in (solution(task.number), *(answer.source for answer in of_kind(task, "right"))):
        assert not any(said_of(task.number, source).values())


@pytest.fixture
def busy_machine():
    """More processes that compute than there are cores."""
    loops = [multiprocessing.Process(target=loop, daemon=True) for _ in range(BUSY_LOOPS)]
    for process in loops:
        process.start()
    yield
    for process in loops:
        process.kill()


def loop():
    while True:
        pass


@pytest.mark.weekly
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.number)
def test_no_right_answer_is_refuted_beside_busy_loops(task, busy_machine):
    for _ in range(3):
        for answer in of_kind(task, "right"):
            assert not any(said_of(task.number, answer.source).values())


NOT_WAITED_FOR = """
def collect(tensor, server=0, group=None):
    rank, size, left, right = wire.neighbours(group)
    if rank != server:
        wire.isend(tensor, server, group)
        return
    incoming = torch.empty_like(tensor)
    for peer in wire.others(server, group):
        wire.recv(incoming, peer, group)
        tensor += incoming
"""
BOTH_SEND_FIRST = """
def allgather(chunks, group=None):
    rank, size, left, right = wire.neighbours(group)
    for step in range(size - 1):
        wire.send(chunks[(rank + 1 - step) % size], right, group)
        wire.recv(chunks[(rank - step) % size], left, group)
"""
ONE_BUFFER_FOR_ALL_SENDS = """
def reduce_scatter(chunks, group=None):
    rank, size, left, right = wire.neighbours(group)
    outgoing = torch.empty_like(max(chunks, key=len))
    leaving = []
    for step in range(size - 1):
        out = chunks[(rank - step) % size]
        into = chunks[(rank - step - 1) % size]
        outgoing[: len(out)] = out
        leaving.append(wire.isend(outgoing[: len(out)], right, group))
        incoming = torch.empty_like(into)
        wire.recv(incoming, left, group)
        into += incoming
    for transfer in leaving:
        transfer.wait()
"""
ADDS_BEFORE_IT_HAS_ARRIVED = """
def mended_ring(tensor, group=None):
    rank, size, left, right = wire.neighbours(group)
    chunks = list(tensor.tensor_split(size))
    for step in range(size - 1):
        out, own = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        incoming = torch.zeros_like(own)
        arriving = wire.irecv(incoming, left, group)
        wire.send(out, right, group)  # all do the same, so mine has come when theirs has left
        own += incoming
        arriving.wait()
    for step in range(size - 1):
        out, own = chunks[(rank + 1 - step) % size], chunks[(rank - step) % size]
        wire.exchange(out, right, own, left, group)


def the_bug():
    return 3
"""
PLANTED = {
    "nobody waits": ("3.1", NOT_WAITED_FOR, "nobody waits for", "wire.isend(tensor, server"),
    "both send first": ("4.3", BOTH_SEND_FIRST, "wait for ever", "wire.send(chunks"),
    "overwritten": ("4.2", ONE_BUFFER_FOR_ALL_SENDS, "overwrites a buffer", "outgoing[: len(out)]"),
    "read too early": ("4.6", ADDS_BEFORE_IT_HAS_ARRIVED, "reads a buffer", "own += incoming"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_refuted_in_words_with_the_learners_line(fault):
    number, source, words, line = PLANTED[fault]
    parts = said_of(number, source)
    message = parts.pop(find(number).every_order)
    assert message.startswith("right here, but not in every order: ")
    assert words in message
    assert line in message
    assert "of your cell" in message
    assert "Mend it: " in message
    assert not any(parts.values())


# It writes to what it sends, and passes, because it writes what was there before.
PASSES = """
def allgather(chunks, group=None):
    rank, size, left, right = wire.neighbours(group)
    for step in range(size - 1):
        out = chunks[(rank + 1 - step) % size]
        leaving = wire.isend(out, right, group)
        out.round_()
        wire.recv(chunks[(rank - step) % size], left, group)
        leaving.wait()
"""


# Each writes to what it sends, and passes, because it writes what was there before.
TOUCHED = """
import torch.distributed as dist
from ddp_course import wire

def send_touched(tensor, peer, group=None):
    leaving = wire.isend(tensor, peer, group)
    tensor.add_(0)
    leaving.wait()

def touched_reduce_scatter(chunks, group=None):
    rank, size, left, right = wire.neighbours(group)
    for step in range(size - 1):
        own = chunks[(rank - step - 1) % size]
        incoming = torch.empty_like(own)
        arriving = wire.irecv(incoming, left, group)
        send_touched(chunks[(rank - step) % size], right, group)
        arriving.wait()
        own += incoming

"""
HANDED_ON = """
    if dist.get_rank() == 0:
        send_touched(torch.ones(1), 1)
    if dist.get_rank() == 1:
        wire.recv(torch.ones(1), 0)
"""
REFUTED = {  # There is one task of each exercise whose answers send.
    "3.1": [("wire.send(", "send_touched(")],
    "4.3": [],
    "5.3": [("    futures = []\n", f"{HANDED_ON}    futures = []\n")],
    "7.5": [("submit(reduce_scatter, ", "submit(touched_reduce_scatter, ")],
    "8.7": [("wire.send(x.grad, ", "send_touched(x.grad, ")],
    "9.5": [
        ("        return allgather(x)", f"{indent(HANDED_ON, '    ')}        return allgather(x)")
    ],
}
PRISTINE = load_exercises()


@pytest.mark.parametrize("number", REFUTED)
def test_a_learner_reads_it_after_a_right_first_answer(number, tmp_path):
    task = find(number)
    cell = tmp_path / "cell.py"
    cell.write_text(refuted(number))
    space = {"__name__": "__main__"}
    exec(PRISTINE[task.exercise].given["imports"], space)
    exec(compile(cell.read_text(), cell, "exec"), space)
    with pytest.raises(Wrong) as wrong:
        check(number, *[space[name] for name in task.names], seed=1)
    assert_says_where(str(wrong.value))


@pytest.mark.slow
@pytest.mark.parametrize("number", REFUTED)
def test_a_submission_loses_the_points_of_one_part_and_is_told_why(number, tmp_path):
    task = find(number)
    pristine = PRISTINE[task.exercise]
    exercises = {task.exercise: pristine._replace(points={number: pristine.points[number]})}
    path = hand_in(tmp_path / "anna", {number: refuted(number)})
    (result,) = grade([submission_of(path)], exercises, seed=3)
    (graded,) = result.tasks
    assert_says_where(graded.message)
    assert 0 < graded.points < graded.possible or len(task.parts) == 1


def refuted(number):
    """Return the solution of a task, but for a touch that an unlucky order would punish."""
    return PASSES if number == "4.3" else TOUCHED + edited(number, *REFUTED[number])


def assert_says_where(message):
    """Assert that a message names the learner's two lines, and what to do."""
    assert "right here, but not in every order: " in message
    assert re.search(r"overwrites a buffer that may not have left \(line \d+ of your cell", message)
    assert re.search(r"begun \(line \d+ of your cell", message)
    assert "Mend it: wait for the send first" in message


OWN_ALLGATHER = """
from ddp_course import wire

def gather(chunks, group):
    rank, size, left, right = wire.neighbours(group)
    for step in range(size - 1):
        wire.isend(chunks[(rank + 1 - step) % size], right, group)
        wire.recv(chunks[(rank - step) % size], left, group)

"""


@pytest.mark.parametrize(
    "number, own, edit",
    [
        ("3.1", "", ("wire.send(", "wire.isend(")),
        ("8.7", "", ("wire.send(y.detach()", "wire.isend(y.detach()")),
        ("7.5", OWN_ALLGATHER, ("thread.submit(allgather,", "thread.submit(gather,")),
    ],
)
def test_an_answer_that_hangs_is_told_which_send_nobody_keeps(number, own, edit, monkeypatch):
    monkeypatch.setattr(evidence, "PATIENCE", 2.0)
    monkeypatch.setattr(evidence, "SLOWER", 0.0)
    source = own + edited(number, edit)
    attempt = Attempt(find(number), find(number).inputs(1), cells_with(number, source))
    failure = gather([attempt])[0].failure
    assert failure.startswith((TOO_LATE, STILL_RUNNING)), "the message was not lost"
    message = confirm(nothing(find(number), failure), attempt).message
    assert "it never comes to its end: " in message
    assert "nobody waits for what was begun" in message or "and not waited for" in message
    assert "of your cell: wire.isend" in message


def test_what_could_not_be_tried_is_no_fault(monkeypatch):
    ends_its_process = edited(
        "4.3",
        (
            "    rank, world_size",
            "    import os, sys\n"
            '    if "manyranks.orders.in_flight" in sys.modules:\n'
            "        os._exit(1)\n"
            "    rank, world_size",
        ),
    )
    assert not any(said_of("4.3", ends_its_process).values())

    def has_no_time(*_, **limits):
        raise LaunchTimeout(1.0, [])

    monkeypatch.setattr(every, "run", has_no_time)
    assert not any(said_of("4.3", BOTH_SEND_FIRST).values())
