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
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

# Tensors of such classes, as DTensor, have others inside.
is_wrapper = is_traceable_wrapper_subclass_type
# Within this context no mode of this thread sees operations.
without_modes = _disable_current_modes
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


def parts_of(tensors: list) -> list[torch.Tensor]:
    """Return the tensors that hold the elements of tensors: a sparse one has two."""
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


def wait_for_futures_with(wait: Callable, collect_all: Callable) -> None:
    """Have torch wait for a future of a thread by `wait(run, future)`, and make the future of many
    by `collect_all(futures)`.
    """
    run = torch.futures.Future.wait
    setattr(torch.futures.Future, "wait", lambda future: wait(run, future))  # noqa: B010 (as above)
    torch._C._collect_all = collect_all
