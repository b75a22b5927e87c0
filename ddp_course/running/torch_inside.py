"""The parts of torch that it does not promise, and that may differ between versions: they are asked
for by what this torch has, never by its number. docs/VERSIONS.md has the versions that were tried.

No other module names a private part of torch, or defines a method that torch calls by a private
name; a test sees to it. Where a part is gone, only what needs it fails, with an error that says so
(`this_torch.part`). A move to another torch starts here, and with the tests.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .this_torch import gone, needing, part

# This is torch's own class, also after `make_groups_with`.
Gloo: Any = part("torch.distributed:ProcessGroupGloo", "virtual time")
ProcessGroup: Any = dist.ProcessGroup  # The stubs overload its methods as no class can follow.

Future = part("torch._C:Future", "stage 6's hooks that communicate")
BatchNorm = part("torch.nn.modules.batchnorm:_BatchNorm", "stage 6's SyncBatchNorm")
TorchDispatchMode: Any = part(
    "torch.utils._python_dispatch:TorchDispatchMode", "an emulated device"
)
# Tensors of such classes, as DTensor, have others inside.
is_wrapper = part(
    "torch.utils._python_dispatch:is_traceable_wrapper_subclass_type", "a model of DTensors"
)
# The function returns this thread's modes, the innermost last.
dispatch_modes = part(
    "torch.utils._python_dispatch:_get_current_dispatch_mode_stack", "an emulated device"
)
tree_leaves = part("torch.utils._pytree:tree_leaves", "finding the tensors of a model's output")
tree_map_only = part("torch.utils._pytree:tree_map_only", "moving the tensors of a model's input")
# torch.compile leaves functions with this decorator as they are. The public one loads the compiler.
uncompiled = getattr(torch, "_disable_dynamo", torch.compiler.disable)
Operator = part("torch._ops:OpOverload", "an emulated device")  # A dispatch mode is given these.
busy_gpu = part("torch.cuda:_sleep", "make gpu")
# In this block a module has other tensors as its weights.
with_weights = part(
    "torch.nn.utils.stateless:_reparametrize_module", "training with weights in half precision"
)
# The function raises ValueError where no group has been made.
default_group = part("torch.distributed.distributed_c10d:_get_default_group", "stage 6")
default_store = part(
    "torch.distributed.distributed_c10d:_get_default_store", "a group of some ranks"
)
# In this block functions treat subclasses as plain tensors.
as_plain_tensors = part("torch._C:DisableTorchFunctionSubclass", "a message between ranks")
SHARDED = "a sharded parameter"
# Backward passes have numbers from 0; -1 means no pass.
backward_pass = part("torch._C:_current_graph_task_id", "noticing a backward pass")


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


@needing("stage 9's layer")
def wrapper_around() -> torch.nn.Module | None:
    """Return torch's own DistributedDataParallel whose forward pass is running, or None."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()


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


def allow_foreach(kind: type) -> None:
    """Have optimizers work on many tensors of this subclass at once, as they do on a GPU with
    ordinary ones; torch itself does this for its DTensor.
    """
    for_clipping = part("torch.utils._foreach_utils:_foreach_supported_types", SHARDED)
    for_updates = part("torch.optim.optimizer:_foreach_supported_types", SHARDED)
    for_clipping.append(kind)
    for_updates.append(kind)


@needing("work at the end of a backward pass")
def after_backward(function: Callable[[], None]) -> None:
    """Have `function()` called when the running backward pass has computed everything, before it
    returns: by `torch.autograd.graph.queue_callback`, public since torch 2.15, or by its older
    private name.
    """
    if hasattr(torch.autograd.graph, "queue_callback"):
        torch.autograd.graph.queue_callback(function)
    else:
        torch.autograd.Variable._execution_engine.queue_callback(function)


@needing("stage 6's broadcast of buffers")
def unnoticed_by_autograd(tensors: Sequence[torch.Tensor]) -> AbstractContextManager:
    """Within this block autograd does not notice that `tensors` are overwritten."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


@needing("a process group like another")
def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long a collective of `group` waits before it gives up."""
    return group._get_backend(group._device_types[0]).options._timeout


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


@contextmanager
def other_collectives(function: Callable[[str], Any]) -> Iterator[None]:
    """Within this block torch's own collectives of tensors on the CPU are `function(name)`, in all
    threads and by whatever name one calls them; sends, receives and barriers stay as they are.
    """
    backend = part("torch._C._distributed_c10d:Backend", "the check of an answer")
    methods = {name: method for name, method in vars(backend).items() if is_collective(name)}
    library = torch.library.Library("c10d", "IMPL")
    try:
        with catch_warnings():  # torch warns of an operator that has other code than before.
            simplefilter("ignore")
            for name in collective_operators():
                library.impl(name, lambda *_, name=name: function(name), "CPU")
        for name in methods:
            setattr(backend, name, lambda *_, name=name, **__: function(name))
        yield
    finally:
        library._destroy()
        for name, method in methods.items():
            setattr(backend, name, method)


@cache
@needing("the check of an answer")
def collective_operators() -> list[str]:
    """The names of torch's collectives among its thousands of operators."""
    operators = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    return [name for space, name in operators if space == "c10d" and is_collective(name)]


def is_collective(name: str) -> bool:
    """Whether a method or an operator of this name sends between all ranks of a group."""
    return name.lstrip("_").startswith(("all", "broadcast", "gather", "reduce", "scatter"))


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


@needing("a process group like another")
def group_like(group: dist.ProcessGroup, members: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Make a process group with the backend and timeout of `group`, and with all its ranks or only
    its `members`.

    Only the new group's ranks call this, all of them together. Every rank of the job would have to
    call `dist.new_group`; with `use_local_synchronization` that derives a name from the number of
    groups that a rank is in, which may differ between ranks. So this calls the inner part of
    `dist.new_group`.
    """
    everyone = dist.get_process_group_ranks(group)
    members = range(len(everyone)) if members is None else members
    ranks = [everyone[member] for member in members]
    group_of_own, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        list(members).index(dist.get_rank(group)),
        ranks,
        distributed_c10d.Backend(dist.get_backend_config(group)),
        default_store(),
        # All members are a range here, so that two of two ranks get another name than all ranks.
        distributed_c10d.GroupName(f"{group.group_name} communication {members}"),
        timeout=timeout_of(group),
    )
    distributed_c10d._world.pg_group_ranks[group_of_own] = {
        rank: place for place, rank in enumerate(ranks)
    }
    return group_of_own


class WorkOfGloo(dist.Work):
    """An operation that gloo carries out as `work`, for a class that adds to it."""

    def __init__(self, work: Any):
        super().__init__()
        self.work = work

    def _source_rank(self) -> int:
        return self.work._source_rank()


def methods_of(collective: str) -> dict[str, str]:
    """Return by which names this torch calls a process group for a collective, each with gloo's own
    name for it; torch has renamed some, the group's method before gloo's.
    """
    renamed = {
        "all_gather_single": "_allgather_base",
        "reduce_scatter_single": "_reduce_scatter_base",
        "all_to_all_single": "alltoall_base",
    }
    older = renamed.get(collective, collective)
    of_gloo = collective if hasattr(Gloo, collective) else older
    return {name: of_gloo for name in (collective, older) if hasattr(ProcessGroup, name)}


class InPlaceOfGloo(ProcessGroup):
    """A process group that torch makes where a program asks for gloo (`make_groups_with`). It has
    the methods that torch calls by private names, which `ProcessGroup` promises to nobody.

    When torch has told who the `members` are (global ranks), it calls `begin`, which is a
    subclass's, and makes the group of gloo that moves the data, `gloo`.

    torch's `Backend.register_backend` promises more, but up to 2.13 it leaves the name "gloo" to
    torch's own class.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: Any, **more: Any):
        super().__init__(rank, size)
        for name, value in more.items():  # since 2.14 there is `enable_reconfigure`
            if value:
                raise NotImplementedError(f"a process group with clocks has no {name}={value!r}")
        self.store = store
        self.patience = timeout
        # torch writes down here what it tells a new group of gloo after it was made.
        self.options = SimpleNamespace(_timeout=timeout, global_ranks_in_group=[], group_name="")
        self.supports_coalescing = False
        self.members: list[int] = []

    def _set_group_name(self, name: str) -> None:
        """Make the group: torch calls this once it has told who is in it."""
        super()._set_group_name(name)
        ranks = self.options.global_ranks_in_group
        self.members = list(ranks) or list(range(self.size()))
        self.begin(of_some_ranks=bool(ranks))
        self.gloo = Gloo(self.store, self.rank(), self.size(), timeout=self.patience)
        self.gloo._set_sequence_number_for_group()

    def begin(self, of_some_ranks: bool) -> None:
        """Meet the other members: a group `of_some_ranks` is made while the whole job has one."""

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
    """Raise a CourseError if torch has made the whole job's group with another class, or did not
    tell it who is in it: virtual time would then be wrong.
    """
    group = dist.group.WORLD
    if not isinstance(group, group_class) or not group.members:
        raise gone("torch.distributed.distributed_c10d.ProcessGroupGloo", "virtual time")
