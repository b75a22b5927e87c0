"""Faults that no operation of torch's shows, and right programs that look like them."""

import _thread
import copy
import ctypes
import io
import pickle
import random
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn


def sent_while(touch, size=4):
    """Send a tensor from rank 0, and touch it there before the wait."""
    tensor = torch.ones(size)
    if dist.get_rank() == 0:
        work = dist.isend(tensor, 1)
        touch(tensor)
        work.wait()
    else:
        dist.recv(tensor, 0)
    return tensor


def received_while(touch, size=4):
    """Add up a tensor on both ranks, and touch it before the wait."""
    tensor = torch.ones(size)
    work = dist.all_reduce(tensor, async_op=True)
    touched = touch(tensor)
    work.wait()
    return touched


# Writes that no operation's schema shows.


def batch_norm_writes_its_mean():
    norm = nn.BatchNorm1d(3)
    work = dist.broadcast(norm.running_mean, 0, async_op=True)
    if dist.get_rank() == 0:
        norm(torch.full((4, 3), 8.0))
    work.wait()


def instance_norm_writes_its_variance():
    norm = nn.InstanceNorm1d(3, track_running_stats=True)
    work = dist.broadcast(norm.running_var, 0, async_op=True)
    if dist.get_rank() == 0:
        norm(torch.randn(2, 3, 4))
    work.wait()


def numpy_writes():
    sent_while(lambda tensor: tensor.numpy().fill(7))


def numpy_writes_by_an_older_view():
    tensor = torch.ones(4)
    view = tensor.numpy()
    work = dist.broadcast(tensor, 0, async_op=True)
    view[1] = 7
    work.wait()


def dlpack_writes():
    tensor = torch.ones(4)
    view = np.from_dlpack(tensor)
    work = dist.broadcast(tensor, 0, async_op=True)
    ctypes.memset(view.ctypes.data, 1, 4)
    work.wait()


def native_code_writes():
    sent_while(lambda tensor: ctypes.memset(tensor.data_ptr(), 1, 4))


def a_storage_is_filled():
    sent_while(lambda tensor: tensor.untyped_storage().fill_(0))


def native_code_writes_what_arrives():
    received_while(lambda tensor: ctypes.memset(tensor.data_ptr(), 1, 4))


def a_thread_below_threading_writes():
    done = []

    def touch(tensor):
        _thread.start_new_thread(lambda: (tensor.mul_(5), done.append(1)), ())
        while not done:
            time.sleep(0.001)

    sent_while(touch)


WRITES = (
    batch_norm_writes_its_mean,
    instance_norm_writes_its_variance,
    numpy_writes,
    numpy_writes_by_an_older_view,
    dlpack_writes,
    native_code_writes,
    a_storage_is_filled,
    native_code_writes_what_arrives,
    a_thread_below_threading_writes,
)

# Reads that are no operation.


def torch_saves_it():
    received_while(lambda tensor: torch.save({"weights": [tensor]}, io.BytesIO()))


def a_state_is_saved():
    model = nn.Linear(2, 2)
    work = dist.broadcast(model.weight.data, 0, async_op=True)
    torch.save(model.state_dict(), io.BytesIO())
    work.wait()


def it_is_pickled():
    received_while(pickle.dumps)


def a_parameter_is_pickled():
    received_while(lambda tensor: pickle.dumps(nn.Parameter(tensor)))


def it_is_copied():
    received_while(copy.deepcopy)


def numpy_reads():
    received_while(lambda tensor: np.asarray(tensor).sum())


def dlpack_reads():
    received_while(lambda tensor: np.from_dlpack(tensor).sum())


def batch_norm_reads_its_weight():
    norm = nn.BatchNorm1d(3)
    work = dist.broadcast(norm.weight.data, 0, async_op=True)
    norm(torch.randn(4, 3))
    work.wait()


READS = (
    torch_saves_it,
    a_state_is_saved,
    it_is_pickled,
    a_parameter_is_pickled,
    it_is_copied,
    numpy_reads,
    dlpack_reads,
    batch_norm_reads_its_weight,
)

# Memory that goes, and memory that is there twice.


def what_is_sent_is_freed():
    sent_while(lambda tensor: tensor.untyped_storage().resize_(0), size=1000)


def what_arrives_is_freed():
    received_while(lambda tensor: tensor.untyped_storage().resize_(0), size=1000)


def what_is_sent_grows():
    sent_while(lambda tensor: tensor.resize_(100_000))


def old_memory_is_read_by_a_view():
    tensor = torch.ones(4)
    view = tensor.view(2, 2)
    work = dist.all_reduce(tensor, async_op=True)
    tensor.data = torch.zeros(4)
    view.sum()
    work.wait()


def old_memory_is_read_after_set():
    tensor = torch.ones(4)
    view = tensor.view(2, 2)
    work = dist.all_reduce(tensor, async_op=True)
    tensor.set_(torch.zeros(4))
    view.sum()
    work.wait()


def a_part_arrives_where_another_is_sent_from():
    tensor = torch.ones(2)
    parts = [torch.zeros(2), tensor]
    if dist.get_rank():
        parts.reverse()
    dist.all_gather(parts, tensor)


def all_parts_arrive_where_one_is_sent_from():
    whole = torch.ones(4)
    other = 1 - dist.get_rank()
    dist.all_gather_into_tensor(whole, whole[2 * other : 2 * other + 2])


MEMORY = (
    what_is_sent_is_freed,
    what_arrives_is_freed,
    what_is_sent_grows,
    old_memory_is_read_by_a_view,
    old_memory_is_read_after_set,
    a_part_arrives_where_another_is_sent_from,
    all_parts_arrive_where_one_is_sent_from,
)

# What one run cannot see.


def it_asks_a_store():
    store = dist.distributed_c10d._get_default_store()
    store.set(f"key {dist.get_rank()}", "words")


def it_writes_a_file():
    with tempfile.TemporaryFile("w") as file:
        file.write("words")


def it_saves_to_a_path():
    with tempfile.TemporaryDirectory() as folder:
        torch.save(torch.ones(1), str(Path(folder, "weights")))


def it_has_a_callback():
    order = []
    work = dist.all_reduce(torch.ones(4), async_op=True)
    work.get_future().then(lambda _: order.append(1)).wait()
    return len(order)


def it_starts_a_thread_below_threading():
    done = _thread.allocate_lock()
    done.acquire()
    _thread.start_new_thread(done.release, ())
    done.acquire()


def it_measures_time():
    began = time.perf_counter()
    dist.barrier()
    return {"seconds": time.perf_counter() - began, "one": 1}


def it_shares_memory_with_numpy():
    received_while(lambda tensor: None)
    tensor = torch.ones(4)
    tensor.numpy()
    dist.all_reduce(tensor)


DOUBTS = {
    it_asks_a_store: "it uses a store",
    it_writes_a_file: "it writes files",
    it_saves_to_a_path: "it writes files",
    it_has_a_callback: "a callback runs",
    it_starts_a_thread_below_threading: "below threading",
    it_measures_time: "it asks a clock",
    it_shares_memory_with_numpy: "NumPy or other code",
}

# What is right, with values that differ from run to run, or have none.


class Result:
    """An object with values."""

    def __init__(self, value):
        self.value = value


RUNS: list = []


def in_a_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()


def right_with_a_thread():
    """Return numbers without a seed, two objects, a counter of runs, and a clock."""
    RUNS.append(1)
    drawn = torch.randn(3) + random.random() + float(np.random.rand())
    in_a_thread(dist.broadcast, drawn, 0)
    return {
        "drawn": drawn,
        "object": Result(drawn.sum().item()),
        "runs": len(RUNS),
        "nothing": object(),
        "now": time.time(),
    }


def right_in_one_run():
    """Touch no memory, or only memory that may be touched."""
    tensor = torch.zeros(4)
    other = torch.empty(0)
    work = dist.all_reduce(tensor, async_op=True)
    other.resize_as_(tensor)
    tensor.data = torch.ones(4)
    total = tensor.sum().item()
    work.wait()
    whole = torch.ones(4)
    rank = dist.get_rank()
    dist.all_gather_into_tensor(whole, whole[2 * rank : 2 * rank + 2])
    parts = [torch.zeros(2), torch.zeros(2)]
    parts[rank].fill_(rank + 1)
    dist.all_gather(parts, parts[rank])
    sparse = torch.sparse_coo_tensor([[rank]], torch.ones(1), (4,)).coalesce()
    dist.all_reduce(sparse)
    sent_while(pickle.dumps)
    dist.all_gather_object([None, None], {"rank": rank})
    norm = nn.BatchNorm1d(3)
    dist.broadcast(norm.running_mean, 0, async_op=True).wait()
    norm(torch.randn(4, 3))
    assert parts[1][0] == 2
    assert sparse.to_dense().tolist() == [1, 1, 0, 0]
    return total


def right_where_it_asks():
    """Receive from any rank before its send, and ask until something has arrived."""
    received = torch.zeros(1)
    work = dist.irecv(received)
    dist.send(torch.full((1,), 5.0), 1 - dist.get_rank())
    work.wait()
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        pass
    return received, tensor


# Races that a text of the result would not show.


def raced():
    """Return who of two threads is last in reading what both have summed up."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    last = []

    def add_up(number):
        dist.all_reduce(torch.ones(1), group=groups[number])
        last.append(number)

    threads = [threading.Thread(target=add_up, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return float(last[-1])


def hidden_in_a_long_array():
    array = torch.zeros(3000)
    array[1500] = raced()
    return array.numpy()


def hidden_in_a_model():
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, raced())
    return model


def hidden_in_an_object():
    return [Result({"deep": (Result(raced()),)})]


def hidden_in_a_small_difference():
    return torch.tensor([1 + 1e-7 * raced()], dtype=torch.float64)


def hidden_in_what_numpy_has_read():
    """Read by NumPy's view before the wait: what is there depends on the order."""
    tensor = torch.ones(4)
    view = tensor.numpy()
    work = dist.all_reduce(tensor, async_op=True)
    total = float(view.sum())
    work.wait()
    return total


HIDDEN = (
    hidden_in_a_long_array,
    hidden_in_a_model,
    hidden_in_an_object,
    hidden_in_a_small_difference,
    hidden_in_what_numpy_has_read,
)
