"""NCCL's manners for pretended GPUs.

torch's own process group stays; c10d's operators are met on their way.

- A group's communicator is made by its first collective or first batch of messages: everybody
  comes, each rank with a
  GPU of its own. A message outside of a batch goes over a communicator of two, made when both
  have come.
- What is given to one communicator runs in that order, one after the other; a batch is one
  piece of work.
- All ranks call the same collectives, with the same shapes; else NCCL would hang, and here
  the call is named.
- Two threads must not use one communicator at the same time: the order would not be the same
  on all ranks.
- `wait()` makes the current stream wait, not the processor.

Who waits for a message that cannot come would hang; here that ends after PRETEND_PATIENCE seconds.
The bytes are moved by a gloo group of the communicator's own, in a thread that stands for its
stream.
"""

import os
import threading
import weakref
from collections import deque
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map

from . import tensors
from .report import note
from .streams import (
    LOCK,
    Event,
    Stream,
    clocks,
    contexts,
    current_stream,
    host_waits,
    physical,
    place,
    queue_work,
)

PATIENCE = float(os.environ.get("PRETEND_PATIENCE", 60))
READ_ONLY = {"input_tensor", "input_tensors", "inputs", "input"}  # Arguments have these names.
MESSAGES = ("send", "recv_", "recv_any_source_")
communicators = {}
local = threading.local()
alive = deque(maxlen=64)  # torch forgets the Python half of a work that only C++ holds


class PretendNCCL(dist.ProcessGroupGloo):
    """Stands in the place of the backend "nccl"; no tensor goes through it."""

    class Options:
        """What may be passed as `pg_options`."""

        def __init__(self, is_high_priority_stream=False, **_):
            self._timeout = timedelta(minutes=10)
            self.is_high_priority_stream = is_high_priority_stream

    supports_coalescing = property(lambda self: False)

    def __init__(self, store, rank, size, options=None):
        super().__init__(store, rank, size, timeout=timedelta(seconds=PATIENCE))

    def abort(self):
        """Nothing to stop."""

    def perform_nocolor_split(self, device):
        """Nothing to split."""


class Message:
    """A piece of work for a communicator, seen from the bytes [start, end) that it touches.

    It reads or writes them.
    """

    def __init__(self, task, start, end):
        self.task = task
        self.start = start
        self.end = end

    def finish(self):
        """Wait for it, as the stream would."""
        self.task.finish()


class Task:
    """A piece of work: one collective, or the messages of a batch."""

    def __init__(self, thread, before):
        self.done = threading.Event()
        self.error = None
        self.thread = thread
        self.calls = []
        self.before = before
        self.receives = False
        self.place = place()

    def finish(self):
        """Wait until it is done; raise what went wrong."""
        if not self.done.wait(PATIENCE):
            raise TimeoutError(f"NCCL would hang: the call at {self.place} did not end")
        if self.error is not None:
            raise self.error

    def run(self):
        """Do it, once the messages are over that its bytes wait for."""
        try:
            for message in self.before:
                message.finish()
            works = [call() for call in self.calls]
            for work in works:
                work.wait()
        except BaseException as error:
            self.error = error
        self.calls = self.before = None
        self.done.set()


class Communicator:
    """Members, a stream, and a thread that does one piece of work after the other."""

    def __init__(self, name, group, members, device):
        self.stream = Stream(device)
        self.size = len(members)
        self.count = 0
        self.pending = []
        self.queue = SimpleQueue()
        self.store = dist.PrefixStore(f"pretended/{name}", group.get_group_store())
        waiting = [
            task.place
            for other in list(communicators.values())
            for task in other.pending
            if task.receives and not task.done.is_set()
        ]
        if waiting:
            note("late", f"{place()} makes a communicator while {waiting[0]} receives")
        rank = members.index(group.rank())
        self.store.set(f"gpu/{rank}", str(physical(device.index)))
        note("own", str(physical(device.index)))
        self.gpus = [self.read(f"gpu/{each}", name) for each in range(self.size)]
        if len(set(self.gpus)) < self.size and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            raise dist.DistBackendError(
                f"ncclInvalidUsage: Duplicate GPU detected: ranks are on GPUs {self.gpus}"
            )
        patience = timedelta(seconds=2 * PATIENCE)  # Who waits says first which call did not end.
        gloo = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", self.store), rank, self.size, timeout=patience
        )
        self.group = dist.ProcessGroup(self.store, rank, self.size)
        kind = dist.ProcessGroup.BackendType.GLOO
        self.group._set_default_backend(kind)
        self.group._register_backend(torch.device("cpu"), kind, gloo)
        if rank == 0:
            note("communicator", f"{os.getppid()}: {self.size} ranks")
        thread = threading.Thread(target=self.work, name=f"NCCL {name}", daemon=True)
        thread.start()

    def read(self, key, name):
        """Return what another member has written, once it has come."""
        try:
            self.store.wait([key], timedelta(seconds=PATIENCE))
        except dist.DistError as error:
            raise TimeoutError(
                f"NCCL would hang: not all ranks came to communicator {name} at {place()}"
            ) from error
        return self.store.get(key).decode()

    def work(self):
        """Do one piece of work after the other."""
        with torch.no_grad():
            while True:
                self.queue.get().run()

    def begin(self, before):
        """Return a new piece of work of this thread."""
        me = threading.get_ident()
        self.pending = [task for task in self.pending if not task.done.is_set()]
        if any(task.thread != me for task in self.pending):
            raise RuntimeError(
                f"two threads use one NCCL communicator at the same time ({place()})"
            )
        task = Task(me, before)
        self.pending.append(task)
        return task

    def agree(self, call):
        """Check that all members call the same."""
        self.count += 1
        first = self.store.compare_set(f"call/{self.count}", "", call).decode()
        if first != call:
            raise RuntimeError(
                f"NCCL would hang here: call {self.count} of this group is {call} at {place()}, "
                f"but another rank calls {first}"
            )


class Queued(dist.Work):
    """What a call returns."""

    def __init__(self, stream, task, results, used):
        super().__init__()
        self.stream = stream
        self.task = task
        self.end = Event()
        self.used = used
        self.results = [weakref.ref(tensor) for tensor in results]
        self.end.record(stream)

    def wait(self, timeout=None):
        """Let the current stream wait."""
        current_stream(self.stream.device).wait_event(self.end)
        self.used = None
        if self.task.error is not None:
            raise self.task.error
        return True

    def synchronize(self):
        """Wait, which is what this older name means."""
        self.wait()

    def is_completed(self):
        """Return whether the bytes have been moved."""
        return self.task.done.is_set()

    def get_future(self):
        """Return a future that is complete at once; who uses its value waits, as a stream does."""
        future = torch.futures.Future(devices=[self.stream.device])
        results = [reference() for reference in self.results]
        with self.stream:
            future.set_result([tensor for tensor in results if tensor is not None])
        return future


def communicator_of(group, device, peer=None):
    """Return the communicator of a whole group, or of this rank and one peer in it."""
    members = list(range(group.size()))
    name = f"{group.group_name}/all"
    if peer is not None:
        members = sorted({group.rank(), peer})
        name = f"{group.group_name}/{members[0]}-{members[-1]}"
    if name not in communicators:
        communicators[name] = Communicator(name, group, members, device)
    found = communicators[name]
    if found.stream.device != device:
        raise RuntimeError(f"this communicator is on {found.stream.device}, the tensor on {device}")
    return found


def checked(name, used):
    """Return the one GPU of all tensors."""
    if not all(isinstance(tensor, tensors.PretendTensor) for tensor, _ in used):
        raise RuntimeError(f"No backend type associated with device type cpu ({name})")
    devices = {tensor.device for tensor, _ in used}
    if len(devices) != 1:
        raise RuntimeError(f"NCCL wants tensors on one GPU, not on {sorted(map(str, devices))}")
    if not all(tensor.is_contiguous() for tensor, _ in used):
        raise RuntimeError("Tensors must be contiguous")
    return devices.pop()


def collective(func, args, kwargs):
    """Meet an operator of c10d: check it, queue it, and return what it would."""
    schema = func._schema
    name = schema.name.removeprefix("c10d::")
    values = (
        dict(zip([argument.name for argument in schema.arguments], args, strict=False)) | kwargs
    )
    boxed = next(value for value in values.values() if is_group(value))
    group = dist.ProcessGroup.unbox(boxed)
    used = []
    for argument, value in values.items():
        writes = not (name == "send" or argument in READ_ONLY)
        used += [(tensor, writes) for tensor in tensors.tensors_in(value)]
    device = checked(name, used)
    if "nccl" not in dist.get_backend_config(group):
        return by_gloo(func, values, used)
    batch = getattr(local, "batch", None)
    is_message = name in MESSAGES
    peer = None
    if is_message and batch is None:
        peer = values.get("dst", values.get("src"))
    communicator = communicator_of(group, device, peer)
    if not is_message:
        shapes = [] if name == "allgather_" else [tuple(tensor.shape) for tensor, _ in used]
        communicator.agree(f"{name} {shapes}")
    raw = {key: tree_map(tensors.bare, value) for key, value in values.items()}
    for key, value in values.items():
        if value is boxed:
            raw[key] = communicator.group.boxed()
        if is_message and key in ("dst", "src") and peer is not None:
            raw[key] = int(value > min(group.rank(), value))
    return queue(communicator, bare_call(func, raw), used, func, values, batch)


def functional(func, args, kwargs):
    """Meet an operator of torch's functional collectives, which DTensor calls.

    The result is new, and the stream has waited for it.
    """
    name = func._schema.name.partition("::")[2]
    tensor = args[0]
    if name in ("_wrap_tensor_autograd", "wait_tensor"):
        return tensor
    group = distributed_c10d._resolve_process_group(args[-1])
    if name == "all_gather_into_tensor":
        gathered = tensor.new_empty(len(tensor) * args[1], *tensor.shape[1:])
        dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=group)
        return gathered
    if name == "all_reduce":
        summed = tensor.clone()
        dist.all_reduce(summed, getattr(dist.ReduceOp, args[1].upper()), group)
        return summed
    raise NotImplementedError(f"pretended NCCL has no {func}")


def by_gloo(func, values, used):
    """gloo takes tensors on GPUs too, and ranks may share one; its `wait` holds the host up."""
    key = current_stream(used[0][0].device).key
    with LOCK:
        clock = queue_work(key)
        for tensor, writes in used:
            tensor.use(key, clock, writes, place())
    result = func(**tree_map(tensors.bare, values))
    same = {id(tensor.raw): tensor for tensor, _ in used}
    return tree_map(lambda value: same.get(id(value), value), result)


def is_group(value):
    """Return whether an argument is a process group."""
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())


def bare_call(func, raw):
    """Return the call of an operator on bare values; it returns gloo's work."""

    def call():
        result = func(**raw)
        return dist.Work.unbox(result[-1] if isinstance(result, (tuple, list)) else result)

    return call


def queue(communicator, call, used, func, values, batch):
    """Queue a call; return what the operator returns, with the tensors and the work of the GPU."""
    stream = communicator.stream
    with LOCK:
        stream.wait_stream(current_stream(stream.device))
        clock = queue_work(stream.key)
        where = place()
        for tensor, writes in used:
            tensor.use(stream.key, clock, writes, where)
    before = [message for tensor, _ in used for message in tensor.unfinished()]
    if batch is None:
        task = communicator.begin(before)
    else:
        task = batch.setdefault(communicator, None) or communicator.begin([])
        batch[communicator] = task
        # A batch may send the same bytes to several ranks: it does not wait for itself.
        task.before += [message for message in before if message.task is not task]
    task.calls.append(call)
    task.receives |= "recv" in func._schema.name
    with LOCK:
        for tensor, _ in used:
            tensor.block.messages.append(Message(task, *tensor.span()))
    if batch is None:
        communicator.queue.put(task)
    results = [tensor for tensor, writes in used if writes] or [tensor for tensor, _ in used]
    work = Queued(stream, task, results, [tensor.block for tensor, _ in used])
    alive.append(work)
    if func._schema.name == "c10d::barrier":
        host_waits(clocks[stream.key], "barrier")
        task.finish()
    returns = func._schema.returns
    if len(returns) == 1:
        return work.boxed()
    outputs = [values[name] for name in values if name not in READ_ONLY][: len(returns) - 1]
    return (*outputs, work.boxed())


@contextmanager
def one_batch():
    """Make all messages in this block one piece of work."""
    local.batch = {}
    try:
        yield
        for communicator, task in local.batch.items():
            communicator.queue.put(task)
    finally:
        local.batch = None


def batched(original):
    """`dist.batch_isend_irecv`, which on NCCL is one call."""

    @wraps(original)  # An exercise may forbid it, and looks for torch's own.
    def batch_isend_irecv(operations):
        if not any(isinstance(each.tensor, tensors.PretendTensor) for each in operations):
            return original(operations)
        with one_batch():
            works = original(operations)
        return works[-1:]

    return batch_isend_irecv


def init_group(original):
    """`dist.init_process_group`, which notes on which GPU this rank is."""

    @wraps(original)
    def init_process_group(*args, **kwargs):
        original(*args, **kwargs)
        if dist.get_world_size() > 1 and contexts:
            note("own", str(physical(torch.cuda.current_device())))

    return init_process_group


def destroy_group(original):
    """`dist.destroy_process_group`, which notes that a process takes its leave."""

    @wraps(original)
    def destroy_process_group(group=None):
        original(group)
        note("farewell", str(group))

    return destroy_process_group


def install():
    """Put this in the place of torch's NCCL."""
    tensors.hooks["collective"] = collective
    tensors.hooks["functional"] = functional
    distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = PretendNCCL
    distributed_c10d._NCCL_AVAILABLE = True
    for module in (dist, distributed_c10d):
        module.batch_isend_irecv = batched(module.batch_isend_irecv)
        module.init_process_group = init_group(module.init_process_group)
        module.destroy_process_group = destroy_group(module.destroy_process_group)
