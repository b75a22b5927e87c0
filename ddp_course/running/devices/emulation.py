"""The emulation at work: between Python and the arithmetic, every operation is given the time of a
device.

torch hands each operation of a thread to the `TorchDispatchMode` that is active there, in the
forward pass, in the backward pass and in the optimizer. The real arithmetic runs, the device's
clock is advanced by the operation's time, and the thread sleeps until then. So a gradient's hook
fires when the device has finished that gradient.

The mode is active in the thread that began the emulation, and wherever a module or a backward pass
is called in a thread of its own (stage 2). Threads that only communicate are not slowed. A tensor
that was moved to "cpu:1" is on emulated device 1, and so are all results that are computed from it
there; a copy from one device to another takes the time of the bus.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ...errors import EmulationError
from .. import wire
from ..torch_inside import TorchDispatchMode, around, dispatch_modes
from . import capacity, roofline
from .clock import Clock, ThreadClock

# an emulation that ends late by more than this share of the device's time has not kept its clock
LATE = 0.03


class Operation(NamedTuple):
    """An operation of a device, `bound` by "flops" or "memory"; `start` and `end` are on the
    device's clock.
    """

    name: str
    device: int
    flops: float
    nbytes: int
    bound: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Seconds that the device took for the operation."""
        return self.end - self.start


class Emulation:
    """A context in which the operations of this process take the time of `device`, and copies that
    of its link, if any.

    With `record`, `operations` is the list of all `Operation`s. With `sleep=False` no thread waits:
    the clocks say how long the work would take.
    """

    current: "Emulation | None" = None  # a process has at most one emulation

    def __init__(self, device: Any, record: bool, sleep: bool):
        self.device, self.active = device, False
        self.operations = [] if record else None
        self.clocks = defaultdict(Clock)
        self.thread = ThreadClock(sleep)
        self.home = (
            WeakKeyDictionary()
        )  # this maps each storage on another device than 0 to its device
        self.flops = self.behind_s = self.copied = 0.0

    def __enter__(self):
        if Emulation.current is not None:
            raise EmulationError(
                "this process emulates a device already; leave that emulation first"
            )
        self.stack = ExitStack()
        for owner, name in (
            (torch.nn.Module, "__call__"),
            (torch.autograd, "_engine_run_backward"),
        ):
            self.stack.enter_context(around(owner, name, self.on_its_device))
        self.stack.enter_context(OnDevice(self, 0))
        self.active, Emulation.current = True, self
        return self

    def __exit__(self, *exception):
        Emulation.current = None
        self.stop()
        self.stack.close()

    def stop(self) -> None:
        """Stop emulating: from here on everything runs at full speed."""
        if self.active:
            self.active = False
            self.thread.catch_up()
            self.behind_s = self.thread.behind

    def too_fast(self, world_size: int) -> float:
        """Return the factor by which the device was too fast for `world_size` ranks' arithmetic; 0
        if it was not.
        """
        busy_s = self.busy_s or math.inf  # the server of lesson 14 computes nothing
        needed_s = (
            self.thread.total * max(1.0, world_size / capacity.usable_cores()) / capacity.HALF
        )
        return needed_s / busy_s if self.behind_s > LATE * busy_s and needed_s > busy_s else 0.0

    @property
    def busy_s(self) -> float:
        """Seconds that all emulated devices have worked, together."""
        return sum(clock.busy for clock in self.clocks.values())

    def perform(self, number: int, operation: Any, args: tuple, kwargs: dict) -> Any:
        """Perform one operation on emulated device `number`, and let the device's time for it
        pass.
        """
        formula = roofline.flops_formula(operation)
        moves = roofline.has_traffic(operation)
        if not self.active:
            return operation(*args, **kwargs)
        if not (formula or (moves and (self.device.memory or self.home or operation is TO_COPY))):
            return self.thread.real(operation, args, kwargs)
        self.thread.catch_up()
        target = destination(operation, kwargs, number)
        if moves and (self.home or target != number):
            self.fetch(target, *args, kwargs)
        result = self.thread.real(operation, args, kwargs)
        if target:
            self.home.update(
                {tensor.untyped_storage(): target for tensor in roofline.tensors_in(result)}
            )
        self.book(target, operation, formula, args, kwargs, result)
        return result

    def book(
        self, number: int, operation: Any, formula: Any, args: tuple, kwargs: dict, result: Any
    ) -> None:
        """Advance the clock of device `number` by the operation's time, and wait for that
        moment.
        """
        flops, nbytes = formula(*args, **kwargs, out_val=result) if formula else 0, 0
        if self.device.memory or self.operations is not None:  # each tensor is read or written once
            nbytes = sum(tensor.nbytes for tensor in roofline.tensors_in(args, kwargs, result))
        seconds, bound = self.device.seconds(flops, nbytes)
        end = self.clocks[number].book(self.thread.now, seconds)
        self.flops += flops
        if self.operations is not None:
            name = operation.overloadpacket.__name__
            self.operations.append(
                Operation(name, number, flops, nbytes, bound, end - seconds, end)
            )
        self.thread.reach(end)

    def fetch(self, number: int, *operands: Any) -> None:
        """Let the time pass that operands on other devices take over the link to device
        `number`.
        """
        nbytes = sum(
            t.nbytes for t in roofline.tensors_in(*operands) if self.number_of(t) != number
        )
        link = self.device.link
        if nbytes and link:
            start = time.perf_counter()
            self.thread.reach(self.thread.now + link.latency + 8 * nbytes / link.bandwidth)
            wire.tell("span", "copy", start)
        self.copied += nbytes

    def on_its_device(self, run: Callable, what: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a module's call or a backward pass; a thread that has no device yet runs it on the
        tensors' device.
        """
        if not self.active or any(isinstance(mode, OnDevice) for mode in dispatch_modes()):
            return run(what, *args, **kwargs)
        tensor = next(iter(what.parameters() if isinstance(what, torch.nn.Module) else what), None)
        with OnDevice(self, 0 if tensor is None else self.number_of(tensor)):
            return run(what, *args, **kwargs)

    def number_of(self, tensor: torch.Tensor) -> int:
        """Return the emulated device of a tensor."""
        return self.home.get(tensor.untyped_storage(), 0)


class OnDevice(TorchDispatchMode):
    """Hands every operation of this thread to emulated device `number`."""

    def __init__(self, emulation, number):
        super().__init__()
        self.emulation, self.number = emulation, number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.emulation.perform(self.number, func, args, kwargs or {})


TO_COPY = torch.ops.aten._to_copy.default


def destination(operation: Any, kwargs: dict, number: int) -> int:
    """Return the emulated device of an operation's result: "cpu:1" is device 1, a plain "cpu" is
    device `number`.
    """
    device = kwargs.get("device") if operation is TO_COPY else None
    return number if device is None or device.index is None else device.index


def device_number(tensor: torch.Tensor) -> int:
    """Return which of this process's devices `tensor` is on: its GPU, or the emulated device that
    it was moved to.
    """
    if tensor.is_cuda:
        return tensor.device.index
    return Emulation.current.number_of(tensor) if Emulation.current else 0


def full_speed() -> None:
    """End the emulation of this rank's device: from here on, work takes no longer than it really
    does.
    """
    if Emulation.current is not None:
        Emulation.current.stop()
