"""The private parts of torch that stages and exercises need.

They may differ between versions, so each part is asked for by what this torch has, never by its
number. docs/VERSIONS.md has the versions that were tried.

Parts that launching needs, too, are in `manyranks/torch_inside.py`. No other module names a private
part of torch, and a test sees to it. Where a part is gone, only what needs it fails, with an error
that says so.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache, wraps
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.distributed import distributed_c10d

from manyranks.this_torch import needing, part
from manyranks.torch_inside import ProcessGroup, methods_of

Future = part("torch._C:Future", "stage 6's hooks that communicate")
BatchNorm = part("torch.nn.modules.batchnorm:_BatchNorm", "stage 6's SyncBatchNorm")
# torch.compile leaves functions with this decorator as they are; the public decorator would load
# the compiler. Each call takes more than a microsecond.
left_alone = getattr(torch, "_disable_dynamo", torch.compiler.disable)
# A dispatch mode is given operations of this class.
Operator = part("torch._ops:OpOverload", "an emulated device")
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
# Whether the running backward pass comes to a node of the graph. It raises RuntimeError for a leaf
# whose gradient `torch.autograd.grad` returns. Where this function is gone, nothing is refused.
comes_to = getattr(torch._C, "_will_engine_execute_node", bool)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that torch.compile is to leave as it is; a call costs next to nothing.

    Only the compiler, as it reads this code, finds that it is compiling.
    """
    for_compiler = left_alone(function)

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return for_compiler(*arguments, **named)
        return function(*arguments, **named)

    return call


@needing("stage 9's layer")
def wrapper_around() -> torch.nn.Module | None:
    """Return torch's own DistributedDataParallel whose forward pass is running, or None."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()


def allow_foreach(kind: type) -> None:
    """Have optimizers on a GPU work on many tensors of this subclass at once, as on plain ones.

    torch itself does this for its DTensor.
    """
    for_clipping = part("torch.utils._foreach_utils:_foreach_supported_types", SHARDED)
    for_updates = part("torch.optim.optimizer:_foreach_supported_types", SHARDED)
    for_clipping.append(kind)
    for_updates.append(kind)


def accumulators_of(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """Return the nodes at which gradients are accumulated; each lasts as long as it is kept."""
    with as_plain_tensors():
        return [get_gradient_edge(parameter).node for parameter in parameters]


def returned_by_grad(accumulators: Sequence[Any]) -> bool:
    """Whether `torch.autograd.grad` runs, and returns the gradient of one of these leaves.

    Then no hook hears of it. In other backward passes the first leaf mostly gives the answer.
    """
    try:
        any(map(comes_to, accumulators))
    except RuntimeError:
        return True
    return False


@needing("stage 6's broadcast of buffers")
def unnoticed_by_autograd(tensors: Sequence[torch.Tensor]) -> AbstractContextManager:
    """Return a block in which autograd does not notice that `tensors` are overwritten."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


@needing("a process group like another")
def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long a collective of `group` waits before it gives up."""
    return group._get_backend(group._device_types[0]).options._timeout


@contextmanager
def other_collectives(function: Callable[[str], Any]) -> Iterator[None]:
    """Call `function(name)` in place of torch's own collectives on the CPU, within this block.

    This holds in all threads, and by whatever name a collective is called; sends, receives and
    barriers stay as they are.
    """
    backend = part("torch._C._distributed_c10d:Backend", "the check of an answer")
    methods = {name: method for name, method in vars(backend).items() if is_collective(name)}
    library = torch.library.Library("c10d", "IMPL")
    try:
        # torch warns of an operator that has other code than before.
        with catch_warnings():
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
    """Return the names of torch's collectives among its thousands of operators."""
    operators = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    return [name for space, name in operators if space == "c10d" and is_collective(name)]


def is_collective(name: str) -> bool:
    """Return whether a method or an operator of this name is a collective of a whole group."""
    return name.lstrip("_").startswith(("all", "broadcast", "gather", "reduce", "scatter"))


@needing("a process group like another")
def group_like(
    group: dist.ProcessGroup | None,
    members: Sequence[int] | None = None,
    use: str = "communication",
) -> dist.ProcessGroup:
    """Return a new process group with the backend and timeout of `group`, or of the whole job's.

    The new group has all ranks of `group`, or only its `members`. Groups of the same ranks differ
    in their `use`. Only the new group's ranks call this, all of them together.

    `dist.new_group` will not do: every rank of the job would have to call it, and with
    `use_local_synchronization` it derives a name from the number of groups that a rank is in, which
    may differ between ranks. So this calls the inner part of `dist.new_group`.
    """
    group = group or default_group()
    everyone = dist.get_process_group_ranks(group)
    members = range(len(everyone)) if members is None else members
    ranks = [everyone[member] for member in members]
    group_of_own, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        list(members).index(dist.get_rank(group)),
        ranks,
        distributed_c10d.Backend(dist.get_backend_config(group)),
        default_store(),
        # All members are a range here, so that two of two ranks have another name than all ranks.
        distributed_c10d.GroupName(f"{group.group_name} {use} {members}"),
        timeout=timeout_of(group),
    )
    distributed_c10d._world.pg_group_ranks[group_of_own] = {
        rank: place for place, rank in enumerate(ranks)
    }
    return group_of_own


class Done(dist.Work):
    """The work of an operation that is over already."""

    def __init__(self, tensors: list[torch.Tensor]):
        super().__init__()
        self.future: torch.futures.Future = torch.futures.Future()
        self.future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        """Return at once, since the operation is over."""
        return True

    def is_completed(self) -> bool:
        """Return True, since the operation is over."""
        return True

    def get_future(self) -> torch.futures.Future:
        """Return a future that has the tensors."""
        return self.future


class GroupOverAnother(ProcessGroup):
    """A process group whose sums and gathers are a subclass's, for torch's own training.

    The subclass has `add_up(tensor)`, `add_up_own(output, tensor)` and `collect(output, tensor)`,
    which are over when they return. The group `beneath` does what carries no gradients. torch
    itself refuses every other collective, so nothing passes the subclass by.
    """

    def __init__(self, beneath: dist.ProcessGroup, name: str):
        super().__init__(beneath.rank(), beneath.size())
        self.beneath: Any = beneath
        self.own_name = name
        self.sums = 0

    def _get_sequence_number_for_group(self) -> int:
        """Return how many sums were taken, by which a launch knows that its ranks have met."""
        return self.sums

    def getBackendName(self) -> str:
        """Return a name that is no backend of torch's."""
        return "own"

    def getGroupName(self) -> str:
        """Return the name by which torch finds this group."""
        return self.own_name

    group_name = property(getGroupName)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:
        """Sum each tensor in place."""
        for tensor in tensors:
            self.add_up(tensor)
            self.finish(tensor, options)
        return Done(tensors)

    def scatter_sums(self, output: Any, tensor: Any, options: Any = None) -> dist.Work:
        """Put the sum of this rank's part of `tensor` into `output`."""
        self.add_up_own(output, tensor)
        self.finish(output, options)
        return Done([output])

    def gather_all(self, output: Any, tensor: Any, options: Any = None) -> dist.Work:
        """Put the `tensor` of each rank into `output`."""
        self.collect(output, tensor)
        return Done([output])

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], *options: Any
    ) -> dist.Work:
        """Put each of the `tensors` of each rank into an output, as `full_tensor` asks for."""
        for output, tensor in zip(outputs, tensors, strict=True):
            self.collect(output, tensor)
        return Done(outputs)

    def finish(self, summed: torch.Tensor, options: Any) -> None:
        """Divide a sum by K where a mean is asked for, as `fully_shard` does.

        Raises ValueError for other operations, such as a maximum.
        """
        self.sums += 1
        operation = dist.ReduceOp.SUM if options is None else options.reduceOp
        if operation == dist.ReduceOp.AVG:
            summed.div_(self.size())
        elif operation != dist.ReduceOp.SUM:
            raise ValueError(
                f"this group adds up, not {operation}: use ReduceOp.SUM or ReduceOp.AVG,"
                " or another group"
            )

    def broadcast(self, *arguments: Any) -> dist.Work:
        """Copy one rank's tensors to all ranks."""
        return self.beneath.broadcast(*arguments)

    def allgather(self, *arguments: Any) -> dist.Work:
        """Gather a list of tensors, as torch's DDP does with the shapes of parameters."""
        return self.beneath.allgather(*arguments)

    def barrier(self, *arguments: Any) -> dist.Work:
        """Wait for all ranks."""
        return self.beneath.barrier(*arguments)


for name in methods_of("all_gather_single"):
    setattr(GroupOverAnother, name, GroupOverAnother.gather_all)
for name in methods_of("reduce_scatter_single"):
    setattr(GroupOverAnother, name, GroupOverAnother.scatter_sums)
