"""What launching and virtual time need of torch that it does not promise, and that may differ
between versions. It was seen on 2.10 and 2.13.

No other module of the library names a private part of torch; a test sees to it. A move to another
torch starts here, and with the tests.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

# Tensors of such classes, as DTensor, have others inside.
is_wrapper = is_traceable_wrapper_subclass_type
# Operations of tensors without values raise one of these where a value is asked for.
NO_VALUE = (DataDependentOutputException, DynamicOutputShapeException)
# Within this block new tensors have values again.
no_fake_tensors = unset_fake_temporarily
# Within this block no mode sees what is done, not even in threads that begin to work then.
unseen_by_modes = torch._C._DisableTorchDispatch
# The function returns this thread's modes, the innermost last.
dispatch_modes = _get_current_dispatch_mode_stack
# Backward passes have numbers from 0; -1 means no pass.
backward_pass = torch._C._current_graph_task_id


def tensors_in(*operands: Any) -> list[torch.Tensor]:
    """Return the tensors among operands, and in their lists, tuples, dicts and dataclasses;
    `tree_leaves` takes twice as long.
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
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within this block `owner.name` is `value`."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def fake_tensors() -> Any:
    """Return a context in which tensors have sizes and no values; real ones that came before may
    take part in operations.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


# By this method modules are moved, and converted to other types.
CONVERSION = (torch.nn.Module, "_apply")


def convert_without_values(
    run: Callable, module: Any, function: Callable, recurse: bool = True
) -> Any:
    """Convert a module whose parameters have sizes only by `function`: torch would swap the
    tensors, which it refuses for those that its own cache refers to.
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
    """Return the Python code of an operation of `fully_shard`, which copies between parameters and
    what is gathered; None for another operation.
    """
    if operation.namespace != "fsdp":
        return None
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    name = operation.overloadpacket.__name__
    usual = getattr(_fsdp_collectives, name, None)
    return getattr(_fsdp_collectives, f"{name}_cuda", usual)


def group_of_operation(name: Any) -> dist.ProcessGroup:
    """Return the process group that a collective which is an operation of torch names."""
    if isinstance(name, dist.ProcessGroup):
        return name
    return distributed_c10d._resolve_process_group(name)


# By the name of such an operation, without "_coalesced" and the "_" of one that works in place: the
# group's method, and whether that is given the result first, and then the input.
OPERATIONS = {
    "all_reduce": ("allreduce", False),
    "broadcast": ("broadcast", False),
    "all_gather_into_tensor": ("_allgather_base", True),
    "all_gather_into_tensor_out": ("_allgather_base", True),
    "reduce_scatter_tensor": ("_reduce_scatter_base", True),
    "all_to_all_single": ("alltoall_base", True),
}


def begin_operation(group: Any, name: str, inputs: Any, result: Any) -> list[tuple]:
    """Begin, in a group, a collective that is an operation of torch; return each tensor of its
    result with its work. Raises NotImplementedError for one that is not known.
    """
    plain = name.rstrip("_").removesuffix("_coalesced")
    if plain not in OPERATIONS:
        raise NotImplementedError(f"{name} is not known where tensors have sizes only")
    method, result_first = OPERATIONS[plain]
    begun = []
    for output, given in zip(tensors_in(result), tensors_in(inputs), strict=True):
        arguments = (output, given) if result_first else ([output], None)
        begun.append((output, getattr(group, method)(*arguments)))
    return begun


def after_backward(function: Callable[[], None]) -> None:
    """Have `function()` called when the running backward pass has computed everything, before it
    returns.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def serve_store_on(
    listener: socket.socket, patience: timedelta = timedelta(minutes=5)
) -> dist.TCPStore:
    """Serve a key-value store on a bound socket, and on no other address, so that two jobs never
    clash.
    """
    host, port = listener.getsockname()[:2]
    own: dict[str, Any] = {
        "is_master": True,
        "wait_for_workers": False,
        "master_listen_fd": listener.detach(),
    }
    return dist.TCPStore(host, port, timeout=patience, **own)


def after_each_group(action: Callable[[], None]) -> None:
    """Have `action` called whenever this process has made a process group, from now on."""
    make = distributed_c10d._new_process_group_helper

    @wraps(make)
    def make_and_act(*args: Any, **kwargs: Any) -> Any:
        group = make(*args, **kwargs)
        action()
        return group

    distributed_c10d._new_process_group_helper = make_and_act


def messages() -> int:
    """Return how many of torch's own collectives, sends and receives this process has begun, in all
    process groups.
    """
    # The stubs do not know that groups count their operations.
    groups: Any = distributed_c10d._world.pg_map
    count = 0
    for group in groups:
        with suppress(RuntimeError):  # the backend of a mesh's group does not count its operations
            count += group._get_sequence_number_for_group()
    return count


def make_groups_with(group_class: type) -> None:
    """Have torch make a process group with `group_class` wherever this process asks for gloo."""
    setattr(distributed_c10d, "ProcessGroupGloo", group_class)  # noqa: B010 (the stubs forbid it)
