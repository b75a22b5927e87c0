"""The private parts of torch that launching and virtual time need.

They may differ between versions, so each part is asked for by what this torch has, never by its
number. docs/VERSIONS.md has the versions that were tried.

No other module of the library names a private part of torch, or defines a method that torch calls
by a private name; a test sees to it. Where a part is gone, only what needs it fails, with an error
that says so (`this_torch.part`). A move to another torch starts here, and with the tests.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .this_torch import gone, needing, part

SIZES = "tensors that have sizes only"
# This stays torch's own class after `make_groups_with`, too.
Gloo: Any = part("torch.distributed:ProcessGroupGloo", "virtual time")
ProcessGroup: Any = dist.ProcessGroup  # The stubs overload its methods as no class can follow.

TorchDispatchMode: Any = part(
    "torch.utils._python_dispatch:TorchDispatchMode", "an emulated device"
)
# The function says whether a class of tensors, such as DTensor, has other tensors inside.
is_wrapper = part(
    "torch.utils._python_dispatch:is_traceable_wrapper_subclass_type", "a model of DTensors"
)
# Within this context no mode of this thread sees operations.
without_modes = part("torch.utils._python_dispatch:_disable_current_modes", "an emulated device")
# Operations of tensors without values raise one of these where a value is asked for.
NO_VALUE = (
    part("torch._subclasses.fake_tensor:DataDependentOutputException", SIZES),
    part("torch._subclasses.fake_tensor:DynamicOutputShapeException", SIZES),
)
FakeTensor = part("torch._subclasses.fake_tensor:FakeTensor", SIZES)
# Within this context new tensors have values again.
no_fake_tensors = part("torch._subclasses.fake_tensor:unset_fake_temporarily", SIZES)
# Within this context no mode sees what is done, not even in threads that begin to work then.
unseen_by_modes = part("torch._C:_DisableTorchDispatch", "an emulated device")
# The function returns this thread's modes, the innermost last.
dispatch_modes = part(
    "torch.utils._python_dispatch:_get_current_dispatch_mode_stack", "an emulated device"
)
tree_leaves = part("torch.utils._pytree:tree_leaves", "finding the tensors of a model's output")
tree_map_only = part("torch.utils._pytree:tree_map_only", "moving the tensors of a model's input")
# Backward passes have numbers from 0; -1 means no pass.
backward_pass = part("torch._C:_current_graph_task_id", "noticing a backward pass")


class OperationMode(TorchDispatchMode):
    """The base of modes: `perform(operation, args, kwargs)` is called for a thread's operations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # A DTensor's operation comes again, with this rank's own part.
        if any(map(is_wrapper, types)):
            return NotImplemented
        return self.perform(func, args, kwargs or {})


def tensors_in(*operands: Any) -> list[torch.Tensor]:
    """Return the tensors in operands, lists, tuples, dicts and dataclasses.

    This is called for each operation, and `tree_leaves` takes twice as long.
    """
    tensors: list[torch.Tensor] = []
    for operand in operands:
        if isinstance(operand, torch.Tensor):
            tensors.append(operand)
        elif isinstance(operand, (list, tuple)):
            tensors += tensors_in(*operand)
        elif isinstance(operand, dict):
            tensors += tensors_in(*operand.values())
        elif hasattr(operand, "__dataclass_fields__"):
            tensors += tensors_in(
                *(getattr(operand, name) for name in operand.__dataclass_fields__)
            )
    return tensors


def parts_of(tensors: list) -> list[torch.Tensor]:
    """Return the dense tensors in which the elements of tensors lie: a sparse one has two."""
    parts: list = []
    for tensor in tensors:
        if tensor.is_sparse:
            parts += [tensor._indices(), tensor._values()]
        else:
            parts.append(tensor)
    return parts


@contextmanager
def around(owner: Any, name: str, hook: Callable) -> Iterator[None]:
    """Within this block `owner.name(…)` is `hook(run, …)`, where `run` is the original function.

    torch has hooks before and after a module's call, but none around it, and none at a backward
    pass.
    """
    run = getattr(owner, name)

    @wraps(run)
    def hooked(*args, **kwargs):
        return hook(run, *args, **kwargs)

    setattr(owner, name, hooked)
    try:
        yield
    finally:
        setattr(owner, name, run)


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Within this block the attributes of `owner` that are named here have these values."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def fake_tensors() -> Any:
    """Return a context in which new tensors have sizes and no values.

    Tensors with values that came before may take part in operations.
    """
    return part("torch._subclasses.fake_tensor:FakeTensorMode", SIZES)(allow_non_fake_inputs=True)


# By this method modules are moved, and converted to other types.
CONVERSION = (torch.nn.Module, "_apply")


def convert_without_values(
    run: Callable, module: Any, function: Callable, recurse: bool = True
) -> Any:
    """Convert a module whose parameters have sizes only by `function`.

    torch would swap the tensors, which it refuses for those that its own cache refers to.
    """
    parameters = list(module.parameters(recurse=False))
    if not any(isinstance(parameter, FakeTensor) for parameter in parameters):
        return run(module, function, recurse)
    if recurse:
        for child in module.children():
            child._apply(function)
    for name, parameter in module.named_parameters(recurse=False):
        with torch.no_grad():
            converted = function(parameter)
        if converted is not parameter:
            module._parameters[name] = torch.nn.Parameter(converted, parameter.requires_grad)
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = function(buffer)
    return module


def code_of(operation: Any) -> Callable | None:
    """Return the Python code of an operation of `fully_shard`, None for another operation.

    The operations of `fully_shard` copy between parameters and what is gathered.
    """
    if operation.namespace != "fsdp":
        return None
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    name = operation.overloadpacket.__name__
    usual = getattr(_fsdp_collectives, name, None)
    return getattr(_fsdp_collectives, f"{name}_cuda", usual)


def group_of_operation(name: Any) -> dist.ProcessGroup:
    """Return the process group that a collective names where it is an operation of torch."""
    if isinstance(name, dist.ProcessGroup):
        return name
    return distributed_c10d._resolve_process_group(name)


# The keys are names of collectives that are operations of torch, without "_coalesced" and the "_"
# of those that work in place. The values are the newest name of the group's method, and whether the
# method is given the result first, and then the input.
OPERATIONS = {
    "all_reduce": ("allreduce", False),
    "broadcast": ("broadcast", False),
    "all_gather_into_tensor": ("all_gather_single", True),
    "all_gather_into_tensor_out": ("all_gather_single", True),
    "reduce_scatter_tensor": ("reduce_scatter_single", True),
    "all_to_all_single": ("all_to_all_single", True),
}


def begin_operation(group: Any, name: str, inputs: Any, result: Any) -> list[tuple]:
    """Begin, in a group, a collective that is an operation of torch.

    Return each tensor of its result with its work. Raises NotImplementedError if OPERATIONS lacks
    the collective.
    """
    plain = name.rstrip("_").removesuffix("_coalesced")
    if plain not in OPERATIONS:
        raise NotImplementedError(f"{name} is not known where tensors have sizes only")
    newest, result_first = OPERATIONS[plain]
    method, *_ = methods_of(newest)
    begun = []
    for output, given in zip(tensors_in(result), tensors_in(inputs), strict=True):
        arguments = (output, given) if result_first else ([output], None)
        begun.append((output, getattr(group, method)(*arguments)))
    return begun


@needing("work at the end of a backward pass")
def after_backward(function: Callable[[], None]) -> None:
    """Have `function()` called when the running backward pass is over, before it returns.

    This uses `torch.autograd.graph.queue_callback`, public since torch 2.15, or its older private
    name.
    """
    if hasattr(torch.autograd.graph, "queue_callback"):
        torch.autograd.graph.queue_callback(function)
    else:
        torch.autograd.Variable._execution_engine.queue_callback(function)


def serve_store_on(listener: socket.socket, patience: timedelta) -> dist.TCPStore:
    """Serve a key-value store on a socket that is bound already, so that two jobs never clash."""
    host, port = listener.getsockname()[:2]
    own: dict[str, Any] = {
        "is_master": True,
        "wait_for_workers": False,
        "master_listen_fd": listener.detach(),
    }
    return dist.TCPStore(host, port, timeout=patience, **own)


@needing("a launch that refuses other users of the machine")
def after_each_group(action: Callable[[], None]) -> None:
    """Have `action` called whenever this process has made a process group, from now on."""
    make = distributed_c10d._new_process_group_helper

    @wraps(make)
    def make_and_act(*args: Any, **kwargs: Any) -> Any:
        group = make(*args, **kwargs)
        action()
        return group

    distributed_c10d._new_process_group_helper = make_and_act


@needing("counting messages")
def messages() -> int:
    """Return how many of torch's own operations this process has begun in all process groups."""
    # The stubs do not know that groups count their operations.
    groups: Any = distributed_c10d._world.pg_map
    count = 0
    for group in groups:
        # The backend of a mesh's group does not count its operations.
        with suppress(RuntimeError):
            count += group._get_sequence_number_for_group()
    return count


class WorkOfGloo(dist.Work):
    """The base of a class that adds to an operation which gloo carries out as `work`."""

    def __init__(self, work: Any):
        super().__init__()
        self.work = work

    def _source_rank(self) -> int:
        return self.work._source_rank()


def methods_of(collective: str) -> dict[str, str]:
    """Return the names by which this torch calls a group for a collective, each with gloo's name.

    torch has renamed some of these methods, the group's before gloo's.
    """
    renamed = {
        "all_gather_single": "_allgather_base",
        "reduce_scatter_single": "_reduce_scatter_base",
        "all_to_all_single": "alltoall_base",
    }
    older = renamed.get(collective, collective)
    of_gloo = collective if collective in dir(Gloo) else older  # `hasattr` raises if gloo is gone.
    return {name: of_gloo for name in (collective, older) if hasattr(ProcessGroup, name)}


class InPlaceOfGloo(ProcessGroup):
    """A process group that torch makes where a program asks for gloo (`make_groups_with`).

    It has the methods that torch calls by private names, which `ProcessGroup` promises to nobody.

    When torch has told the group who its `members` are (global ranks), the group calls `begin`,
    which a subclass defines, and makes the group of gloo that moves the data, `gloo`.

    torch's `Backend.register_backend` promises more, but up to 2.13 it leaves the name "gloo" to
    torch's own class.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: Any, **more: Any):
        super().__init__(rank, size)
        # Since torch 2.14 there is `enable_reconfigure`.
        for name, value in more.items():
            if value:
                raise NotImplementedError(f"a process group with clocks has no {name}={value!r}")
        self.store = store
        self.patience = timeout
        # torch writes here what it tells a new group of gloo after it was made.
        self.options = SimpleNamespace(_timeout=timeout, global_ranks_in_group=[], group_name="")
        self.supports_coalescing = False
        self.members: list[int] = []

    def _set_group_name(self, name: str) -> None:
        """Make the group, since torch has told by now who is in it."""
        super()._set_group_name(name)
        ranks = self.options.global_ranks_in_group
        self.members = list(ranks) or list(range(self.size()))
        self.begin(of_some_ranks=bool(ranks))
        self.gloo = self.mover()

    def mover(self) -> Any:
        """Return what moves the data: a group of gloo."""
        gloo = Gloo(self.store, self.rank(), self.size(), timeout=self.patience)
        gloo._set_sequence_number_for_group()
        return gloo

    def begin(self, of_some_ranks: bool) -> None:
        """Meet the other members; a group `of_some_ranks` is made beside that of the whole job."""

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing yet: up to torch 2.13 this call comes before the group's name."""

    def _get_sequence_number_for_group(self) -> int:
        return self.gloo._get_sequence_number_for_group()

    def _get_backend(self, device: Any) -> "InPlaceOfGloo":
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]


def make_groups_with(group_class: type[InPlaceOfGloo]) -> None:
    """Have torch make a process group with `group_class` wherever this process asks for gloo."""
    setattr(distributed_c10d, "ProcessGroupGloo", group_class)  # noqa: B010 (the stubs forbid it)


def refuse_others(group_class: type[InPlaceOfGloo]) -> None:
    """Raise a ManyranksError if torch has made the whole job's group with another class.

    So it is if torch did not tell the group who is in it: virtual time would then be wrong.
    """
    group = dist.group.WORLD
    if not isinstance(group, group_class) or not group.members:
        raise gone("torch.distributed.distributed_c10d.ProcessGroupGloo", "virtual time")


def wait_for_futures_with(wait: Callable, collect_all: Callable) -> None:
    """Have torch wait by `wait(run, future)`, and join futures by `collect_all(futures)`."""
    future_class: Any = torch.futures.Future  # The stubs do not know that it can be patched.
    run = future_class.wait
    future_class.wait = lambda future: wait(run, future)
    torch._C._collect_all = collect_all
