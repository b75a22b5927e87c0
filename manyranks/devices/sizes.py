"""Sizes only: tensors have shapes and no memory, messages have lengths, and nothing is computed.

So a model can be rehearsed that no machine at hand can hold.

    launch(fn, device=Device("H100", streams=True), link=Link("NVLink"), sizes_only=True)

Only whole numbers have values, as long as they follow from nothing that has none. A program that
asks for another value, by `loss.item()` or by a decision that depends on data, gets an error with
the line, or the `answer` that was given for all such questions.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from .. import torch_inside
from ..clocks import stalls
from ..clocks.stalls import line_of
from ..errors import NoValueError
from ..torch_inside import OperationMode, around, replaced
from .memory import Memory

# Tensors of these types keep their values, as long as they follow from nothing that has none. Such
# are the ranks of a mesh, the samples of a DataLoader, and pickled objects.
WHOLE = (torch.bool, torch.int32, torch.int64, torch.uint8)
# These make whole numbers, unless another type is asked for.
USUALLY_WHOLE = ("arange", "randint", "randperm")
# These functions send pickles.
OBJECTS = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)
COMPARING = ("allclose", "equal", "is_nonzero")  # These operations answer with True or False.
ASK_ELSEWHERE = (
    "ask only where there are values, as in `if not rehearsing: print(loss.item())`, or give a"
    " number that answers such questions: answer=0 (--answer 0)"
)
FIXED_SIZE = (
    "the size of its result follows from values: write it with a fixed size, as in"
    " `torch.where(mask, x, 0)` for `x[mask]`"
)


class Counted(OperationMode):
    """Counts the memory of all tensors that operations of this thread make."""

    def __init__(self, memory: Memory):
        super().__init__()
        self.memory = memory

    def perform(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        """Return the operation's result, and count its memory."""
        result = self.result_of(operation, args, kwargs)
        self.memory.note(result)
        return result

    def result_of(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        """Return the operation's result."""
        return operation(*args, **kwargs)


class SizesOnly(Counted):
    """Counts memory, and refuses or answers questions for values.

    It also books the collectives that DTensor begins as operations.
    """

    current: "SizesOnly | None" = None  # A process has at most one.

    def __init__(self, memory: Memory, answer: float | None):
        super().__init__(memory)
        self.answer = answer
        self.active = True
        self.works = WeakKeyDictionary()  # the works that nobody has waited for, by their storages

    def result_of(self, operation: Any, args: tuple, kwargs: dict) -> Any:
        """Return the operation's result, or an answer; raises NoValueError for other questions."""
        if not self.active or is_of_whole_numbers(operation, args, kwargs):
            with torch_inside.no_fake_tensors():
                return operation(*args, **kwargs)
        try:
            result = operation(*args, **kwargs)
        except torch_inside.NO_VALUE:
            return self.value(operation, args)
        if operation.namespace == "_c10d_functional":
            self.communicate(operation.overloadpacket.__name__, args, result)
        return result

    def value(self, operation: Any, args: tuple) -> Any:
        """Return the answer to a question for a value; raises NoValueError if none was given."""
        name = operation.overloadpacket.__name__.strip("_")
        if torch.Tag.data_dependent_output not in operation.tags:
            raise refusal(name, FIXED_SIZE)
        if self.answer is None:
            raise refusal(name, ASK_ELSEWHERE)
        return as_value(self.answer, operation, args)

    @staticmethod
    def numpy(run: Callable, tensor: torch.Tensor, **options: Any) -> Any:
        """Return a tensor's NumPy array; raises NoValueError if the tensor has no values."""
        if isinstance(tensor, torch_inside.FakeTensor):
            raise refusal("numpy", ASK_ELSEWHERE)
        return run(tensor, **options)

    def communicate(self, name: str, args: tuple, result: Any) -> None:
        """Book a collective that is an operation of torch, as DTensor's collectives are."""
        if name == "wait_tensor":
            work = self.works.pop(args[0].untyped_storage(), None)
            if work is not None:
                work.wait()
            return
        group = torch_inside.group_of_operation(args[-1])
        for tensor, work in torch_inside.begin_operation(group, name, args[0], result):
            self.works[tensor.untyped_storage()] = work


def is_of_whole_numbers(operation: Any, args: tuple, kwargs: dict) -> bool:
    """Return whether an operation has values.

    It has if its tensors have values and are of whole numbers, or if it makes such tensors of
    nothing.
    """
    tensors = torch_inside.tensors_in(args, kwargs)
    if tensors:
        return all(
            tensor.dtype in WHOLE and not isinstance(tensor, torch_inside.FakeTensor)
            for tensor in tensors
        )
    dtype = kwargs.get("dtype")
    if dtype is None and operation.overloadpacket.__name__ in USUALLY_WHOLE:
        return not any(isinstance(number, float) for number in args)
    return dtype in WHOLE


def refusal(name: str, advice: str) -> NoValueError:
    """Return the error for a question for a value, with the line that asks, and advice."""
    line = line_of(sys._getframe())
    return NoValueError(
        f"{line} asks for a value ({name}), and with sizes only there is none; {advice}"
    )


def as_value(answer: float, operation: Any, args: tuple) -> Any:
    """Return an answer as the operation's kind of value: a bool, a whole number or a float."""
    dtype = args[0].dtype
    if dtype == torch.bool or operation.overloadpacket.__name__ in COMPARING:
        return bool(answer)
    if dtype.is_floating_point:
        return float(answer)
    return int(answer)


@contextmanager
def sizes_only(capacity: float | None, answer: float | None) -> Iterator[None]:
    """Give this process's tensors sizes only within this block."""
    memory = Memory(capacity)
    mode = SizesOnly(memory, answer)
    with ExitStack() as stack:
        stack.enter_context(memory.counting())
        # A rank may be busy for long, and virtual time stands still meanwhile.
        stack.enter_context(replaced(stalls, PATIENCE_S=60.0))
        stack.enter_context(torch_inside.fake_tensors())
        for name in OBJECTS:
            for owner in (dist, dist.distributed_c10d):
                stack.enter_context(around(owner, name, with_values))
        # The tensors that workers of a DataLoader send have values.
        stack.enter_context(around(reductions, "rebuild_tensor", with_values))
        stack.enter_context(around(*torch_inside.CONVERSION, torch_inside.convert_without_values))
        stack.enter_context(around(torch.Tensor, "__format__", with_value_of))
        stack.enter_context(around(torch.Tensor, "numpy", mode.numpy))
        stack.enter_context(around(torch, "save", save_sizes))
        stack.enter_context(mode)
        stack.enter_context(replaced(SizesOnly, current=mode))
        yield


def have_values_in_child() -> None:
    """Give tensors values in a process that a rank has forked, such as a DataLoader's worker."""
    if SizesOnly.current is not None:
        SizesOnly.current.active = False


os.register_at_fork(after_in_child=have_values_in_child)


def with_values(run: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return `run(…)`, during which new tensors have values."""
    with torch_inside.no_fake_tensors():
        return run(*args, **kwargs)


def save_sizes(run: Callable, what: Any, *args: Any, **kwargs: Any) -> None:
    """Save tensors that have sizes only as those of torch's device "meta", and all else as it is.

    What was saved so is small, whatever the model is, and takes no time.
    """

    def to_meta(tensor: torch.Tensor) -> torch.Tensor:
        local = tensor
        while hasattr(local, "_local_tensor"):
            local = local._local_tensor
        if not isinstance(local, torch_inside.FakeTensor):
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    with torch_inside.no_fake_tensors():
        run(torch_inside.tree_map_only(torch.Tensor, to_meta, what), *args, **kwargs)


def with_value_of(run: Callable, tensor: torch.Tensor, form: str) -> str:
    """Return a tensor as text; a form such as ".3f" asks for its value."""
    if form and isinstance(tensor, torch_inside.FakeTensor) and tensor.dim() == 0:
        return format(tensor.item(), form)
    return run(tensor, form)
