"""Random programs of messages, threads, futures, NumPy and layers, and the same with a race.

A program is a list of `Unit`s, which all ranks run one after the other. Each begins an operation on
a buffer, does something, and waits. What it does between is harmless, unless a race is planted.
"""

import ctypes
import pickle
import random
import threading
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn


class Unit(NamedTuple):
    """An operation `begin`, a way to `wait` for it, and the touches before and after the wait."""

    begin: str
    wait: str
    size: int
    before: str
    after: str


# What arrives may not be read, and neither it nor what is sent may be written.
ARRIVES = ("ring", "any", "sum", "broadcast", "gather")
SENDS = ("send", "broadcast root")
WAITS = ("work", "work", "future", "callback", "thread", "asks")
READS = ("sum", "numpy sum", "pickle", "layer", "slice")
WRITES = ("mul", "numpy fill", "batch norm", "native", "slice set", "optimizer")
HARMLESS = ("nothing", "other sum", "other numpy fill", "other batch norm", "other pickle")


def draw_unit(draw):
    """Return a right unit."""
    begin = draw.choice(ARRIVES + SENDS)
    wait = draw.choice(WAITS)
    if begin in ("ring", "any", "send", "broadcast") and wait in ("future", "callback"):
        wait = "work"  # Messages have no futures.
    after = draw.choice((*READS, *WRITES, "nothing"))
    return Unit(begin, wait, draw.choice((4, 12)), draw.choice(HARMLESS), after)


def draw_program(number):
    """Return the program with this number."""
    draw = random.Random(f"whole {number}")
    return [draw_unit(draw) for _ in range(draw.randint(2, 5))]


def plant(program, number):
    """Return the program with a touch between a post and its wait that is a race."""
    draw = random.Random(f"planted {number}")
    units = list(program)
    place = draw.randrange(len(units))
    touches = WRITES if units[place].begin in SENDS else READS + WRITES
    units[place] = units[place]._replace(before=draw.choice(touches))
    return units


class Player:
    """Runs a program on its rank."""

    def __init__(self):
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.total = 0.0
        self.other = torch.ones(12)

    def play(self, program):
        """Run all units; return what has been read."""
        for unit in program:
            buffer = torch.ones(unit.size)
            work, more = self.begin(unit.begin, buffer)
            self.touch(unit.before, buffer)
            for each in more:
                each.wait()
            self.wait(unit.wait, work)
            self.touch(unit.after, buffer)
        return self.total

    def begin(self, kind, buffer):
        """Begin an operation on a buffer; return its work, and others that are to be waited for."""
        right = (self.rank + 1) % self.size
        left = (self.rank - 1) % self.size
        sent = torch.full_like(buffer, self.rank)
        if kind == "ring":
            return dist.irecv(buffer, left), [dist.isend(sent, right)]
        if kind == "any":
            return dist.irecv(buffer), [dist.isend(sent, right)]
        if kind == "send":
            return dist.isend(buffer, right), [dist.irecv(sent, left)]
        if kind == "sum":
            return dist.all_reduce(buffer, async_op=True), []
        if kind == "gather":
            part = torch.ones(len(buffer) // self.size)
            return dist.all_gather_into_tensor(buffer, part, async_op=True), []
        if kind == "broadcast root":  # Each rank sends its own; the others get it elsewhere.
            works = []
            for root in range(self.size):
                tensor = buffer if root == self.rank else torch.zeros_like(buffer)
                works.append(dist.broadcast(tensor, root, async_op=True))
            return works.pop(self.rank), works
        # Rank 0 sends from elsewhere, so that on all ranks the buffer is one that receives.
        if self.rank == 0:
            return dist.irecv(buffer, self.size - 1), [dist.broadcast(sent, 0, async_op=True)]
        works = [dist.broadcast(buffer, 0, async_op=True)]
        if self.rank == self.size - 1:
            works.append(dist.isend(sent, 0))
        return works[0], works[1:]

    def wait(self, way, work):
        """Wait for an operation."""
        if way == "future":
            work.get_future().wait()
        elif way == "callback":
            work.get_future().then(lambda future: future.value()).wait()
        elif way == "thread":
            thread = threading.Thread(target=work.wait)
            thread.start()
            thread.join()
        elif way == "asks":
            while not work.is_completed():
                pass
        work.wait()

    def touch(self, way, buffer):
        """Read or write a buffer, or another one."""
        if way.startswith("other "):
            way = way.removeprefix("other ")
            buffer = self.other
        getattr(self, f"by_{way.replace(' ', '_')}")(buffer)

    def by_nothing(self, buffer):
        pass

    def by_sum(self, buffer):
        self.total += buffer.sum().item()

    def by_numpy_sum(self, buffer):
        self.total += float(np.asarray(buffer).sum())

    def by_pickle(self, buffer):
        self.total += float(pickle.loads(pickle.dumps({"a": [buffer]}))["a"][0][0])

    def by_layer(self, buffer):
        self.total += nn.functional.linear(buffer.view(-1, 4), torch.ones(1, 4)).sum().item()

    def by_slice(self, buffer):
        self.total += buffer.view(2, -1)[1, 1:].clone()[0].item()

    def by_mul(self, buffer):
        buffer.mul_(3)

    def by_numpy_fill(self, buffer):
        buffer.numpy()[1] = 7

    def by_batch_norm(self, buffer):
        size = len(buffer)
        inputs = torch.arange(2.0 * size).view(2, size)
        nn.functional.batch_norm(inputs, buffer, torch.ones(size), training=True)

    def by_native(self, buffer):
        ctypes.memset(buffer.data_ptr(), 1, 4)

    def by_slice_set(self, buffer):
        buffer.view(2, -1)[1, 1:] = 9

    def by_optimizer(self, buffer):
        weight = nn.Parameter(buffer)
        weight.grad = torch.ones_like(buffer)
        torch.optim.SGD([weight], lr=0.5).step()


def play_all(programs):
    """Run programs one after the other on this rank."""
    return [Player().play(program) for program in programs]
