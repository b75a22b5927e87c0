"""The emulation of a device, which gives every operation of this process the device's time.

torch hands each operation of a thread to the `TorchDispatchMode` that is active in the thread, in
the forward pass, in the backward pass and in the optimizer. The real arithmetic runs, and the
clocks of the device and of the thread advance by the operation's time. So a gradient's hook is
called when the device has finished that gradient.

The mode is active in the thread that began the emulation, and wherever a module or a backward pass
is called in a thread of its own. Threads that only communicate are not slowed. A tensor that was
moved to "cpu:1" is on emulated device 1, and so are the results that are computed from it; a copy
from one device to another takes the time of the link between them.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from .. import clocks
from ..clocks import recording, streams
from ..errors import EmulationError
from ..torch_inside import (
    OperationMode,
    around,
    code_of,
    dispatch_modes,
    tensors_in,
)
from . import roofline

# Each listener is called when a copy between devices begins, and returns a block for the copy.
listeners: list[Callable[[str], AbstractContextManager]] = []


class Operation(NamedTuple):
    """An operation of a device, `bound` by "flops" or "memory".

    `start` and `end` are seconds on the device's clock.
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
        """The seconds that the device took for the operation."""
        return self.end - self.start


class Emulation:
    """A context in which the operations of this process take the time of `device`.

    Copies take the time of its link, if it has one. With `record`, `operations` is the list of all
    `Operation`s. With `sleep=False` no thread waits: the clocks say how long the work would take.
    """

    current: "Emulation | None" = None  # A process has at most one emulation.

    def __init__(self, device: Any, record: bool, sleep: bool):
        self.device = device
        self.active = False
        self.operations = [] if record else None
        self.sleep = sleep
        # Both are by device number. `free_at` is in picoseconds, `busy` in seconds of work.
        self.free_at: dict[int, int] = defaultdict(int)
        self.busy: dict[int, float] = defaultdict(float)
        self.home = WeakKeyDictionary()  # the device numbers of storages that are not on device 0
        self.flops = 0.0
        self.copied = 0.0  # bytes between devices

    def __enter__(self):
        if Emulation.current is not None:
            raise EmulationError(
                "this process emulates a device already; leave that emulation first"
            )
        if self.device.streams and clocks.own() is None:
            raise EmulationError("a device has streams where time is virtual: in a launch")
        self.stack = ExitStack()
        if self.device.streams:
            self.stack.enter_context(streams.installed())
        for owner, name in (
            (torch.nn.Module, "__call__"),
            (torch.autograd, "_engine_run_backward"),
        ):
            self.stack.enter_context(around(owner, name, self.on_its_device))
        self.stack.enter_context(OnDevice(self, 0))
        self.active = True
        Emulation.current = self
        return self

    def __exit__(self, *exception):
        Emulation.current = None
        self.stop()

    def stop(self) -> None:
        """Stop emulating: from here on everything runs at full speed."""
        self.active = False
        self.stack.close()

    @property
    def busy_s(self) -> float:
        """The sum of the seconds that each emulated device has worked."""
        return sum(self.busy.values())

    def perform(self, number: int, operation: Any, args: tuple, kwargs: dict) -> Any:
        """Perform one operation on emulated device `number`, and let its time pass."""
        if roofline.yields_a_value(operation):
            streams.wait_for_value()
        formula = roofline.flops_formula(operation)
        moves = roofline.has_traffic(operation)
        # Traffic matters where memory has a limit, and where tensors are on several devices.
        traffic_matters = self.device.memory or self.home or operation is TO_COPY
        takes_time = formula or (moves and traffic_matters)
        # gloo's own threads inherit the mode, but have no clock: what they copy takes no time.
        of_transport = clocks.virtual() and clocks.own() is None
        if of_transport or not (self.active and takes_time):
            return operation(*args, **kwargs)
        target = destination(operation, kwargs, number)
        if moves and (self.home or target != number):
            self.fetch(target, *args, kwargs)
        result = operation(*args, **kwargs)
        if target:
            for tensor in tensors_in(result):
                self.home[tensor.untyped_storage()] = target
        self.book(target, operation, formula, args, kwargs, result)
        return result

    def book(
        self, number: int, operation: Any, formula: Any, args: tuple, kwargs: dict, result: Any
    ) -> None:
        """Advance the clock of device `number` by the operation's time, and wait for its end."""
        flops = formula(*args, **kwargs, out_val=result) if formula else 0
        nbytes = 0
        if self.device.memory or self.operations is not None:
            # Each tensor is read or written once.
            nbytes = sum(tensor.nbytes for tensor in tensors_in(args, kwargs, result))
        attends = roofline.is_attention(operation)
        cost = self.device.cost(flops, nbytes, attends)
        if clocks.several_compute():
            clocks.own().take_turn()
        start = max(self.moment(), self.free_at[number])
        if streams.are_on():
            start = streams.current().start()
        end = start + round(cost.seconds * 1e12)
        self.free_at[number] = end
        self.busy[number] += cost.seconds
        self.flops += flops
        if self.operations is not None:
            name = operation.overloadpacket.__name__
            self.operations.append(
                Operation(name, number, flops, nbytes, cost.bound, start / 1e12, end / 1e12)
            )
        if streams.are_on():
            streams.book(start, end)
        else:
            recording.note_operation(number, start, end)
            self.reach(end)

    def moment(self) -> int:
        """Return this thread's time in picoseconds; 0 where no time passes."""
        return clocks.moment() if self.sleep or clocks.own() else 0

    def reach(self, moment: int) -> None:
        """Let this thread go on at `moment`: by its clock, or asleep where time is real."""
        clock = clocks.own()
        if clock is not None:
            clock.advance(moment)
        elif self.sleep:
            time.sleep(max(0.0, moment / 1e12 - time.perf_counter()))

    def fetch(self, number: int, *operands: Any) -> None:
        """Let the time pass in which operands on other devices are copied to device `number`."""
        tensors = tensors_in(*operands)
        nbytes = sum(tensor.nbytes for tensor in tensors if self.number_of(tensor) != number)
        link = self.device.link
        if nbytes and link:
            seconds = link.latency + 8 * nbytes / link.bandwidth
            with ExitStack() as spans:
                for listener in listeners:
                    spans.enter_context(listener("copy"))
                self.reach(self.moment() + round(seconds * 1e12))
        self.copied += nbytes

    def on_its_device(self, run: Callable, work: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `work`: the call of a module, or the backward pass from some tensors.

        A thread that has no device yet runs it on the device of the first tensor.
        """
        if not self.active or any(isinstance(mode, OnDevice) for mode in dispatch_modes()):
            return run(work, *args, **kwargs)
        tensors = work.parameters() if isinstance(work, torch.nn.Module) else work
        numbers = map(self.number_of, tensors)
        with OnDevice(self, next(numbers, 0)):
            return run(work, *args, **kwargs)

    def number_of(self, tensor: torch.Tensor) -> int:
        """Return the emulated device of a tensor."""
        return self.home.get(tensor.untyped_storage(), 0)


class OnDevice(OperationMode):
    """Hands every operation of this thread to emulated device `number`."""

    def __init__(self, emulation, number):
        super().__init__()
        self.emulation = emulation
        self.number = number

    def perform(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        """Perform an operation on the emulated device."""
        code = code_of(operation)
        if code is not None:
            # The operations that this code calls are performed one by one.
            with self:
                return code(*args, **kwargs)
        return self.emulation.perform(self.number, operation, args, kwargs)


TO_COPY = torch.ops.aten._to_copy.default


def destination(operation: Any, kwargs: dict, number: int) -> int:
    """Return the emulated device on which an operation's result is.

    It is the device `number` that performs the operation, unless the operation copies to another
    one, such as "cpu:1".
    """
    device = kwargs.get("device") if operation is TO_COPY else None
    return number if device is None or device.index is None else device.index


def device_number(tensor: torch.Tensor) -> int:
    """Return the number of a tensor's GPU, or of the emulated device to which it was moved."""
    if tensor.is_cuda:
        return tensor.device.index
    return Emulation.current.number_of(tensor) if Emulation.current else 0


def full_speed() -> None:
    """End the emulation of this rank's device, so that work takes its real time from now on."""
    if Emulation.current is not None:
        Emulation.current.stop()


def work_at_full_speed_in_child() -> None:
    """Stop emulating in a process that this one has forked, such as a worker of a DataLoader."""
    if Emulation.current is not None:
        Emulation.current.active = False


os.register_at_fork(after_in_child=work_at_full_speed_in_child)
