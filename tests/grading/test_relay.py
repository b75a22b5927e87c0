"""Bytes are counted where no answer runs: whoever moves them another way, or says another number, is found out."""

import csv
import json
import os
import re
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import nbformat
import pytest
import torch
from answers import cells_with, solution, solutions

from ddp_course.grading import submission
from ddp_course.grading.examine import unlike
from ddp_course.grading.grade import Grader, exercises_folder, grade
from ddp_course.grading.relay import ASK, RECEIVE, SEND, TELL, Switch
from ddp_course.grading.report import as_csv
from ddp_course.grading.results import result_of
from ddp_course.grading.sandbox import landlock_version
from ddp_course.grading.submission import Submission, load_exercises
from ddp_course.grading.suspicion import remarks

# Right sums by whole tensors to everyone, past the wire; `say` tells the wire of bytes that it never saw.
PRELUDE = """
import torch
import torch.distributed as dist
from ddp_course.running import wire

def post(tensor, group, send=dist.isend, receive=dist.irecv):
    flat, others = tensor.contiguous().view(-1), wire.others(dist.get_rank(group), group)
    found = [torch.empty_like(flat) for _ in others]
    work = [receive(one, peer, group) for one, peer in zip(found, others)]
    work += [send(flat, peer, group) for peer in others]
    [one.wait() for one in work]
    tensor += sum(one.view_as(tensor) for one in found)

def due(tensor, group):
    return 2 * (dist.get_world_size(group) - 1) * tensor.numel() * tensor.element_size()

def say(nbytes):
    wire.tell("send", "send", wire.now(), nbytes, 0)

def say_due(tensor, group):
    dist.get_rank(group) == 0 and say(due(tensor, group))

def junk(tensor, group):
    rank, size, left, right = wire.neighbours(group)
    for step in range(2 * (size - 1)):
        chunks = torch.empty_like(tensor.contiguous().view(-1)).tensor_split(size)
        leaving, coming = (chunks[(rank - step - late) % size].clone() for late in (0, 1))
        wire.exchange(leaving, right, coming, left, group)

def by_name(tensor, group, put, take):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    name = f"{size} {list(tensor.shape)}"
    put(f"{name} {rank}", bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()))
    others = [bytearray(take(f"{name} {peer}")) for peer in range(size) if peer != rank]
    tensor += sum(torch.frombuffer(one, dtype=tensor.dtype).view_as(tensor) for one in others)

def patient(read):
    import time
    for _ in range(20):
        try:
            return read()
        except Exception:
            time.sleep(0.02)
    raise TimeoutError
"""
RING = "def ring_all_reduce(tensor, group):\n    size = dist.get_world_size(group)\n    if size == 1: return\n    "
FILES = "def read(path):\n    data = open(path, 'rb').read()\n    assert data\n    return data\n"
PLACES = {"the temporary folder": "/tmp", "shared memory": "/dev/shm", "the work folder": "."}
UNSAID = "past the wire, and unsaid"
USUAL = frozenset({"torch", "ddp_course.running.wire"})  # imports that tell nothing
# {name: what a ring does instead of its work}
CHEATS = {
    "sends past the wire, and says what is due": "post(tensor, group); say_due(tensor, group)",
    "sends past the wire, and what is due over it": "junk(tensor, group); post(tensor, group)",
    "a negative number": "post(tensor, group, wire.isend, wire.irecv)\n"
    "    dist.get_rank(group) == 0 and say(due(tensor, group) - size * due(tensor, group) // 2)",
    "observers sent away": "kept = wire.card.observers[:]; wire.card.observers.clear()\n"
    "    post(tensor, group, wire.isend, wire.irecv); wire.card.observers.extend(kept); say_due(tensor, group)",
    "a number written into the counter": "import gc\n    post(tensor, group)\n"
    "    for one in gc.get_objects():\n"
    "        if type(one).__name__ == 'Traffic': one.bytes_sent = due(tensor, group) * (dist.get_rank() == 0)",
    "a counter that adds up another way": "wire.Traffic.add = lambda self, event: None\n"
    "    post(tensor, group, wire.isend, wire.irecv)",
    "the group's own allgather": "found = [torch.empty_like(tensor.contiguous()) for _ in range(size)]\n"
    "    group.allgather([found], [tensor.contiguous()], None); tensor.copy_(sum(found)); say_due(tensor, group)",
    "the group's own allreduce": "group.allreduce([tensor], None); say_due(tensor, group)",
    "the group's own broadcast": "import types\n    total = torch.zeros_like(tensor)\n"
    "    for root in range(size):\n        one = tensor.clone()\n"
    "        group.broadcast([one], types.SimpleNamespace(rootRank=root)); total += one\n"
    "    tensor.copy_(total); say_due(tensor, group)",
    "functional collectives": "import torch.distributed._functional_collectives as f\n"
    "    tensor.copy_(f.all_reduce(tensor.contiguous(), 'sum', group)); say_due(tensor, group)",
    "the group's store": "store = dist.distributed_c10d._get_default_store()\n"
    "    import datetime; store.set_timeout(datetime.timedelta(seconds=0.3))\n"
    "    by_name(tensor, group, store.set, store.get); junk(tensor, group)",
    "a store of its own": "import datetime\n"
    "    store = dist.TCPStore('127.0.0.1', 29555, None, dist.get_rank() == 0, datetime.timedelta(seconds=0.3),\n"
    "                          wait_for_workers=False)\n"
    "    by_name(tensor, group, store.set, store.get); junk(tensor, group)",
    "a store in a file": "import datetime\n    store = dist.FileStore('/tmp/store', 4)\n"
    "    store.set_timeout(datetime.timedelta(seconds=0.3))\n"
    "    by_name(tensor, group, store.set, store.get); junk(tensor, group)",
    "a socket with an abstract name": "import socket, threading, time\n"
    "    server = socket.socket(socket.AF_UNIX); server.bind(f'\\0cheat{dist.get_rank()}'); server.listen()\n"
    "    for peer in range(size):\n"
    "        one = socket.socket(socket.AF_UNIX); patient(lambda: one.connect(f'\\0cheat{peer}'))\n"
    "    post(tensor, group); say_due(tensor, group)",
    "a socket of the network": "import socket\n"
    "    server = socket.create_server(('127.0.0.1', 29600 + dist.get_rank()))\n"
    "    for peer in range(size): patient(lambda: socket.create_connection(('127.0.0.1', 29600 + peer), 0.2))\n"
    "    post(tensor, group); say_due(tensor, group)",
    "shared memory of its own": "from multiprocessing import shared_memory as m\n"
    "    def put(name, data):\n"
    "        one = m.SharedMemory(name.replace(' ', ''), create=True, size=len(data)); one.buf[:len(data)] = data\n"
    "    take = lambda name: patient(lambda: m.SharedMemory(name.replace(' ', '')).buf.tobytes())\n"
    "    by_name(tensor, group, put, take); junk(tensor, group)",
    "System V's shared memory": "import ctypes\n    c = ctypes.CDLL(None); c.shmat.restype = ctypes.c_void_p\n"
    "    if dist.get_rank() == 0: assert c.shmget(4711, 4096, 0o1666) >= 0\n"
    "    found = lambda: 1 // (c.shmget(4711, 4096, 0o666) >= 0)\n"
    "    patient(found); post(tensor, group); say_due(tensor, group)",
    "a neighbour's memory": "import os\n"
    "    for pid in filter(str.isdigit, os.listdir('/proc')):\n"
    "        if int(pid) != os.getpid(): open(f'/proc/{pid}/mem', 'rb').close()\n"
    "    post(tensor, group); say_due(tensor, group)",
    "frames made by hand": "from ddp_course.grading import relay\n"
    "    relay.ASK = type('Ask', (), {'pack': lambda *a: b''})\n    post(tensor, group); say_due(tensor, group)",
    "numbers that no message has": "import sys\n    relay = sys.modules['ddp_course.grading.relay']\n"
    "    relay._wires[0].connection.sendall(relay.ASK.pack(7, 0, 99, 0, 1 << 60, 0)); post(tensor, group)",
    "its own packing of the evidence": "import sys\n    post(tensor, group)\n"
    "    sys.modules['ddp_course.grading.probing'].traffic_of = lambda t: {'bytes': due(tensor, group) // size}",
} | {
    f"files in {what}": f"by_name(tensor, group, lambda name, data: open('{folder}/' + name, 'wb').write(data),\n"
    f"            lambda name: patient(lambda: read('{folder}/' + name))); junk(tensor, group)"
    for what, folder in PLACES.items()
}  # fmt: skip
SHARED = "import torch\nfrom torch import nn\n"
OTHERS = {
    "3.1 past the wire": (
        "3.1",
        "def collect(tensor, server, group):\n    rank = dist.get_rank(group)\n"
        "    whole = tensor.clone(); post(whole, group)\n"
        "    if rank == server: tensor.copy_(whole)\n    else: say(tensor.numel() * 4)",
    ),
    "3.3 a ring for a server": (
        "3.3",
        "def average(tensor, server, group):\n    size = dist.get_world_size(group)\n    if size == 1: return\n"
        "    post(tensor, group); tensor /= size\n"
        "    say(tensor.numel() * 4 * ((size - 1) if dist.get_rank(group) == server else 1))",
    ),
    "6.1 synchronised each time, and taken back": (
        "6.1",
        "def accumulate(parallel, optimizer, batches):\n    optimizer.zero_grad()\n"
        "    for inputs, targets in batches:\n        with wire.counting() as traffic:\n"
        "            (nn.functional.cross_entropy(parallel(inputs), targets) / len(batches)).backward()\n"
        "        say(-traffic.bytes_sent)\n    say(traffic.bytes_sent)\n    optimizer.step()",
    ),
    "6.1 one number past the wire": (
        "6.1",
        "def accumulate(parallel, optimizer, batches):\n    optimizer.zero_grad()\n"
        "    for index, (inputs, targets) in enumerate(batches):\n"
        "        parallel.require_backward_grad_sync = index == len(batches) - 1\n"
        "        (nn.functional.cross_entropy(parallel(inputs), targets) / len(batches)).backward()\n"
        "    optimizer.step()\n    post(torch.zeros(1, dtype=torch.uint8), parallel.process_group)",
    ),
    "12.1 another peer named": (
        "12.1",
        "def two_levels(tensor, inside, between):\n    whole = 4 * tensor.numel()\n    post(tensor, None)\n"
        "    wire.tell('send', 'send', 0.0, whole // 2, (dist.get_rank() + 2) % 4)",
    ),
}  # fmt: skip


IN_FRONT = len((PRELUDE + FILES + RING).splitlines())  # lines that all cheats have


def ring(body):
    """An answer to 4.4 that cheats, and does nothing if the cheat raises."""
    return PRELUDE + FILES + RING + body


@pytest.fixture(scope="module")
def said():
    """The verdicts on all cheats and on an honest answer, from one sandbox; nothing has looked at their source."""
    items = {name: ("4.4", ring(body)) for name, body in CHEATS.items()}
    items |= {name: (task, SHARED + PRELUDE + text) for name, (task, text) in OTHERS.items()}
    items[UNSAID] = ("4.4", ring("post(tensor, group)"))
    items |= {f"honest {task}": (task, solution(task)) for task in ("4.4", "3.1", "3.3", "6.1", "12.1")}
    with Grader({}, seed=3, timeout=400.0) as grader:
        found = grader.examine([(task, list(cells_with(task, text))) for task, text in items.values()])
    return dict(zip(items, found, strict=True))


@pytest.mark.parametrize("name", [*CHEATS, *OTHERS])
def test_traffic_cannot_be_hidden(said, name):
    task = OTHERS[name][0] if name in OTHERS else "4.4"
    assert said[f"honest {task}"].right, said[f"honest {task}"].message
    result = result_of(task, 3, said[name])
    assert result.points == 0 and all(part["message"] for part in result.parts), said[name]
    source = SHARED + PRELUDE + OTHERS[name][1] if name in OTHERS else ring(CHEATS[name])
    read = [one for one in remarks(source, USUAL) if int(re.search(r"line (\d+)", one)[1]) >= IN_FRONT]
    assert said[name].suspicious or read, "no line for a person's eye that is about this cheat"


def test_what_the_relay_has_counted_stands_in_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(submission, "at_first_sight", lambda source, allowed: "")
    path = handed_in(tmp_path / "04_mine.ipynb", ring(CHEATS["sends past the wire, and says what is due"]))
    (result,) = grade([Submission("cheat", path)], load_exercises(exercises_folder()), seed=3)
    (row,) = [row for row in csv.DictReader(as_csv([result]).splitlines()) if row["task"] == "4.4"]
    assert row["points"] == "0" and "and its wire was told of" in row["suspicious"].split("; ")[-1], row
    assert [task.id for task in result.tasks if task.points < task.possible] == ["4.4"]
    assert not [task for task in result.tasks if task.suspicious and task.id != "4.4"]


def handed_in(path, text):
    """The solution of exercise 4 with another answer to 4.4."""
    notebook = nbformat.reads(nbformat.writes(solutions(4)), as_version=4)
    next(cell for cell in notebook.cells if cell.id == "answer-4-4").source = text
    nbformat.write(notebook, path)
    return path


@pytest.mark.parametrize("name", ["sends past the wire, and says what is due", "a negative number"])
def test_a_lie_costs_the_whole_task_and_says_the_two_numbers(said, name):
    assert "bytes, and its wire was told of" in said[name].message
    assert all(part.message == said[name].message for part in said[name].parts)


def test_who_goes_past_the_wire_without_a_lie_keeps_the_points_for_the_sums(said):
    kept = {part.name for part in said[UNSAID].parts if not part.message}
    assert kept == {"sums", "any shape"}
    assert "bytes past the wire's functions" in said[UNSAID].suspicious[0]


@pytest.mark.parametrize("name", ["frames made by hand", "numbers that no message has"])
def test_frames_that_are_no_messages_are_named(said, name):
    assert any("no message to the switch" in one for one in said[name].suspicious)
    assert not said["honest 4.4"].suspicious


def test_bytes_are_held_against_what_was_counted_by_rank_and_by_peer():
    def told(sent, **to):
        return [{"deep": [{"traffic": {"bytes": sent, **to}}]}, {}]

    counted = [[0, 12], [0, 0]]
    assert unlike(told(12), counted) == "" and unlike(told(12, to={1: 12}), counted) == ""
    assert "sent 12 bytes, and its wire was told of 8" in unlike(told(8), counted)
    assert unlike(told(16), counted)
    assert "to rank 1" in unlike(told(12, to={1: 4, 0: 8}), counted)
    assert unlike([{"tensor": torch.zeros(1)}, {}], counted) == "", "a task that counts nothing"
    assert unlike(told(0), counted) == "", "a wire that was told nothing"


def alone(folder):
    """In a process of its own: fenced in, try to reach anybody; how many ways are open."""
    from ddp_course.grading.sandbox import fence

    fence(folder, sys.path, alone=True)
    ways = [
        lambda: socket.create_server(("127.0.0.1", 0)),
        lambda: Path("/dev/shm/ddp_course_cheat").write_text("cheat"),
        lambda: os.kill(os.getppid(), 0),
    ]
    count = 0
    for way in ways:
        with suppress(OSError):
            way()
            count += 1
    os._exit(count)


@pytest.mark.skipif(landlock_version() < 6, reason="older systems are open here, which docs/GRADING.md says")
def test_without_namespaces_a_fence_closes_the_other_ways(tmp_path):
    pid = os.fork()
    if pid == 0:
        alone(str(tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_switch_passes_on_what_two_ranks_agree_on_and_counts_it():
    ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
    switch, soon = Switch(ours), time.monotonic() + 5
    theirs[0].sendall(ASK.pack(SEND, 1, 1, 7, 4, 2) + b"abcd")
    switch.take(0, soon)
    theirs[1].sendall(ASK.pack(RECEIVE, 1, 0, 8, 4, 2) + ASK.pack(RECEIVE, 2, 0, 7, 3, 2))
    switch.take(1, soon)
    theirs[0].settimeout(0.05)
    with pytest.raises(TimeoutError):  # nobody has asked for this channel: the message has not left
        theirs[0].recv(1)
    switch.take(1, soon)
    assert TELL.unpack(theirs[0].recv(99)) == (1, True, 2, 0)
    assert TELL.unpack(theirs[1].recv(99)) == (2, False, 2, 0), "too long for its tensor"
    assert json.dumps(switch.sent) == "[[0, 4], [0, 0]]"
    with pytest.raises(ValueError, match="no message"):
        theirs[1].sendall(ASK.pack(SEND, 1, 9, 7, 4, 2))
        switch.take(1, soon)
    for one in (*ours, *theirs):
        one.close()
