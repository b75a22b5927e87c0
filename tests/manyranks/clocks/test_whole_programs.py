"""What whole programs do under virtual time: threads that send, receives from any rank, callbacks.

Each program runs on all ranks, and returns nothing where it was right. Programs of one kind run one
after the other in one launch.
"""

import asyncio
import multiprocessing
import os
import selectors
import subprocess
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import reduce_scatter_tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from manyranks import Device, Link, clocks, launch
from manyranks.clocks import clock
from manyranks.clocks.table import MOST_GROUPS, real_sleep
from manyranks.errors import DeadlockError

LINK = Link("8Mbit", latency="1ms")  # A byte takes a microsecond.


def run_all(programs):
    """Run programs on a rank, one after the other; return what each returned."""
    outcomes = {}
    for program in programs:
        dist.barrier()
        outcomes[program.__name__] = program()
    return outcomes


def faults_of(programs, world_size=2, **settings):
    """Launch programs; return what those say that are wrong, by rank and name."""
    settings = {"link": LINK, "timeout": 120, **settings}
    wrong = {}
    for rank, outcomes in enumerate(launch(run_all, programs, world_size=world_size, **settings)):
        wrong |= {(rank, name): said for name, said in outcomes.items() if said is not None}
    return wrong


def number(value):
    return torch.tensor([float(value)])


def together(*functions):
    """Run functions in a thread each."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def received(count=2, **source):
    """Return the values of the next messages from rank 0."""
    values = []
    for _ in range(count):
        tensor = torch.zeros(1)
        dist.recv(tensor, 0, **source)
        values.append(tensor.item())
    return values


def expect(found, expected):
    return None if found == expected else f"{found}, not {expected}"


# Threads of a rank post in the order of virtual time.


def spin():
    """Take real time, in which no virtual time passes."""
    sum(range(1_000_000))


def send_late(value=1, **how):
    time.sleep(1)
    dist.send(number(value), 1, **how)


def send_early(value=2, **how):
    spin()
    dist.send(number(value), 1, **how)


def the_late_sender_starts_first():
    if dist.get_rank() == 0:
        together(send_late, send_early)
        return None
    return expect(received(), [2, 1])


def the_early_sender_computes_for_long():
    if dist.get_rank() == 0:
        together(send_early, send_late)
        return None
    return expect(received(), [2, 1])


def sends_in_a_group_of_their_own():
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        together(lambda: send_late(group=group), lambda: send_early(group=group))
        return None
    return expect(received(group=group), [2, 1])


def receives_of_two_threads():
    if dist.get_rank() == 0:
        dist.send(number(1), 1)
        dist.send(number(2), 1)
        return None
    got = {}

    def late():
        time.sleep(1)
        got["late"] = received(1)

    def early():
        spin()
        got["early"] = received(1)

    together(late, early)
    return expect(got, {"early": [1], "late": [2]})


def sums_of_two_threads():
    got = {}

    def late():
        tensor = number(10)
        time.sleep(1)
        dist.all_reduce(tensor)
        got["late"] = tensor.item()

    def early():
        spin()
        tensor = number(1)
        dist.all_reduce(tensor)
        got["early"] = tensor.item()

    together(*sorted((early, late), key=lambda each: each.__name__, reverse=dist.get_rank() == 0))
    return expect(got, {"early": 2, "late": 20})


def a_pool_and_the_main_thread():
    if dist.get_rank() == 0:
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(send_early)
            send_late()
            sending.result()
        return None
    return expect(received(), [2, 1])


def a_timer_sends_between():
    if dist.get_rank() == 0:
        timer = threading.Timer(0.5, dist.send, (number(3), 1))
        timer.start()
        together(send_late, send_early)
        return None
    return expect(received(3), [2, 3, 1])


def threads_at_one_moment_go_by_number():
    if dist.get_rank() == 0:

        def slow():
            spin()
            dist.send(number(1), 1)

        together(slow, lambda: dist.send(number(2), 1), lambda: dist.send(number(3), 1))
        return None
    return expect(received(3), [1, 2, 3])


def what_follows_a_sum_comes_by_its_end():
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    ended = []

    def small():
        dist.all_reduce(torch.ones(1), group=groups[0])
        real_sleep(0.1)
        ended.append("small")

    def large():
        dist.all_reduce(torch.ones(1000), group=groups[1])
        ended.append("large")

    together(small, large)
    return expect(ended, ["small", "large"])


THREADS = (
    the_late_sender_starts_first,
    the_early_sender_computes_for_long,
    sends_in_a_group_of_their_own,
    receives_of_two_threads,
    sums_of_two_threads,
    a_pool_and_the_main_thread,
    a_timer_sends_between,
    threads_at_one_moment_go_by_number,
    what_follows_a_sum_comes_by_its_end,
)


def test_threads_post_in_the_order_of_virtual_time():
    assert not faults_of(THREADS)


# A receive from any rank does not wait.


def neighbours():
    rank = dist.get_rank()
    size = dist.get_world_size()
    return rank, (rank + 1) % size, (rank - 1) % size


def posted_before_the_send():
    rank, right, left = neighbours()
    tensor = torch.zeros(1)
    work = dist.irecv(tensor)
    dist.send(number(rank), right)
    work.wait()
    return expect((tensor.item(), work._source_rank()), (left, left))


def several_are_waited_for_backwards():
    """The first one posted gets the first message, whichever is waited for first."""
    _, right, _ = neighbours()
    tensors = [torch.zeros(1) for _ in range(3)]
    works = [dist.irecv(tensor) for tensor in tensors]
    for value in range(3):
        dist.send(number(value), right)
    for work in reversed(works):
        work.wait()
    return expect([tensor.item() for tensor in tensors], [0, 1, 2])


def each_tag_has_its_own():
    rank, right, left = neighbours()
    tensors = [torch.zeros(1) for _ in range(2)]
    works = [dist.irecv(tensor, tag=tag) for tag, tensor in enumerate(tensors)]
    for tag in (1, 0):
        dist.send(number(10 * rank + tag), right, tag=tag)
    for work in works:
        work.wait()
    return expect([tensor.item() for tensor in tensors], [10 * left, 10 * left + 1])


def everyone_receives_from_all():
    """Messages come by the clocks of their sends; the later the rank, the earlier it sends."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    tensors = [torch.zeros(1) for _ in range(size - 1)]
    works = [dist.irecv(tensor) for tensor in tensors]
    time.sleep(size - rank)
    leaving = [dist.isend(number(rank), peer) for peer in range(size) if peer != rank]
    for work in works + leaving:
        work.wait()
    others = [float(peer) for peer in reversed(range(size)) if peer != rank]
    return expect([tensor.item() for tensor in tensors], others)


def asked_until_it_has_come():
    rank, right, left = neighbours()
    tensor = torch.zeros(1)
    work = dist.irecv(tensor)
    leaving = dist.isend(number(rank), right)
    while not work.is_completed():
        pass
    leaving.wait()
    return expect(tensor.item(), left)


def in_a_group_of_two():
    group = dist.new_group([1, 2])
    rank = dist.get_rank()
    if rank not in (1, 2):
        return None
    tensor = torch.zeros(1)
    work = dist.irecv(tensor, group=group)
    dist.send(number(rank), 3 - rank, group=group)
    work.wait()
    source = dist.get_group_rank(group, 3 - rank)
    return expect((tensor.item(), work._source_rank()), (3 - rank, source))


def a_named_receive_follows():
    """Once the receive from any rank has its message, the next one is for the named receive."""
    _, right, left = neighbours()
    tensors = [torch.zeros(1) for _ in range(2)]
    leaving = [dist.isend(number(value), right) for value in range(2)]
    dist.barrier()
    works = [dist.irecv(tensors[0]), dist.irecv(tensors[1], left)]
    for work in works + leaving:
        work.wait()
    return expect([tensor.item() for tensor in tensors], [0, 1])


def a_named_receive_would_be_a_guess():
    _, right, left = neighbours()
    work = dist.irecv(torch.zeros(1))
    with pytest.raises(RuntimeError, match="open which message"):
        dist.irecv(torch.zeros(1), left)
    dist.barrier()
    dist.send(number(0), right)
    work.wait()


def a_message_takes_its_time():
    """Posted at 0, sent at 2 ms: it leaves 4 ms later, and arrives a latency later."""
    rank = dist.get_rank()
    began = clocks.moment()
    if rank == 0:
        work = dist.irecv(torch.zeros(1000))
        work.wait()
        return expect(clocks.moment() - began, 7 * 10**9)
    if rank == 1:
        clocks.advance(0.002)
        dist.send(torch.zeros(1000), 0)
        return expect(clocks.moment() - began, 6 * 10**9)
    return None


def each_message_gives_its_row_back():
    """Receive 60 messages; the table of a launch has no room for thousands at once."""
    tensor = torch.ones(2)
    for _ in range(30):
        if dist.get_rank():
            dist.send(tensor, 0)
        else:
            dist.recv(tensor)
            dist.irecv(tensor).wait()
    rows = int((clock.process.table.rows["key"] != 0).sum())
    return None if rows < 20 else f"{rows} rows are taken"


ANY = (
    posted_before_the_send,
    several_are_waited_for_backwards,
    each_tag_has_its_own,
    everyone_receives_from_all,
    asked_until_it_has_come,
    in_a_group_of_two,
    a_named_receive_follows,
    a_named_receive_would_be_a_guess,
    a_message_takes_its_time,
    each_message_gives_its_row_back,
)


def test_a_receive_from_any_rank_does_not_wait():
    assert not faults_of(ANY, world_size=3)


# The transport's own threads have no clock.


def every_collective_with_copies():
    """Call each collective that copies in gloo's threads, and an operation of the device after
    it.
    """
    ranks = dist.get_world_size()
    tensor = torch.ones(1000)
    parts = [torch.zeros(1000) for _ in range(ranks)]
    moments = [clocks.moment()]
    for collective in (
        lambda: dist.all_gather(parts, tensor),
        lambda: dist.all_gather_into_tensor(torch.zeros(ranks * 1000), tensor),
        lambda: dist.gather(tensor, parts if dist.get_rank() == 0 else None),
        lambda: dist.scatter(tensor, parts if dist.get_rank() == 0 else None),
        lambda: dist.all_reduce(tensor, dist.ReduceOp.AVG),
        lambda: dist.all_gather_object([None] * ranks, "some words"),
        lambda: dist.all_to_all(parts, [tensor] * ranks),
    ):
        collective()
        tensor.add(1)
        moments.append(clocks.moment())
    took = [after - before for before, after in pairwise(moments)]
    return None if max(took) < 10**11 else f"{took} picoseconds"


def test_what_the_transport_copies_takes_no_time_of_the_device():
    assert not faults_of([every_collective_with_copies], device=Device("1GFLOP/s", "1GB/s"))


def several_are_scattered_in_one_call():
    one = torch.arange(4.0)
    two = torch.full((2,), 10.0)
    parts = [torch.zeros(2), torch.zeros(1)]
    begun = clocks.moment()
    with _coalescing_manager():
        dist.reduce_scatter_tensor(parts[0], one)
        dist.reduce_scatter_tensor(parts[1], two)
    took = clocks.moment() - begun
    ended = reduce_scatter_tensor(one, "sum", 0, dist.group.WORLD).tolist()
    rank = dist.get_rank()
    sums = [4.0 * rank, 4.0 * rank + 2]
    # A message has a latency of a millisecond, and takes a microsecond for each of its 12 bytes.
    expected = [sums, [20.0], sums, 1_012_000_000]
    return expect([*(part.tolist() for part in parts), ended, took], expected)


def test_several_tensors_are_scattered_in_one_call():
    assert not faults_of([several_are_scattered_in_one_call])


# Futures and limits of waits.


def summed(value=1.0, **how):
    """Return a sum that has begun, and its tensor."""
    tensor = torch.full((1000,), value)
    return dist.all_reduce(tensor, async_op=True, **how), tensor


def a_callback_runs_if_only_the_work_is_waited_for():
    got = []
    work, _ = summed()
    work.get_future().then(lambda future: got.append(future.value()[0][0].item()))
    work.wait()
    return expect(got, [2])


def a_callback_runs_if_nobody_waits():
    """Leave a sum alone: its callback runs at the moment of the end, after 2 steps of 2 ms and 1 ms
    each.
    """
    began = clocks.moment()
    moments = []
    work, _ = summed()
    work.get_future().then(lambda _: moments.append(clocks.moment() - began))
    time.sleep(1)
    dist.barrier()
    return expect(moments, [6 * 10**9])


def a_callback_sets_what_is_waited_for():
    began = clocks.moment()
    done = threading.Event()
    work, _ = summed()
    work.get_future().then(lambda _: done.set())
    done.wait()
    return expect(clocks.moment() - began, 6 * 10**9)


def callbacks_of_two_groups_run_by_their_ends():
    group = dist.new_group([0, 1])
    order = []
    dist.barrier()
    first = dist.all_reduce(torch.zeros(10_000), async_op=True)
    second = dist.broadcast(torch.zeros(1), 0, group=group, async_op=True)
    for name, work in (("long", first), ("short", second)):
        work.get_future().then(lambda _, name=name: order.append((clocks.now(), name)))
    time.sleep(1)
    dist.barrier()
    return expect([name for _, name in sorted(order)], [name for _, name in order])


def a_chain_of_callbacks():
    work, _ = summed()
    future = work.get_future().then(lambda future: future.value()[0] * 2)
    return expect(future.then(lambda future: future.value()[0].item() + 1).wait(), 5)


def all_futures_are_collected():
    begun = [summed(float(value)) for value in range(3)]
    futures = [work.get_future() for work, _ in begun]
    torch.futures.collect_all(futures).wait()
    return expect([tensor[0].item() for _, tensor in begun], [0, 2, 4])


def all_futures_are_waited_for():
    begun = [summed(float(value)) for value in range(3)]
    torch.futures.wait_all([work.get_future() for work, _ in begun])
    return expect([tensor[0].item() for _, tensor in begun], [0, 2, 4])


def all_futures_have_a_callback():
    done = threading.Event()
    begun = [summed(float(value)) for value in range(3)]
    whole = torch.futures.collect_all([work.get_future() for work, _ in begun])
    whole.then(lambda _: done.set())
    done.wait()
    return expect([tensor[0].item() for _, tensor in begun], [0, 2, 4])


def a_future_that_a_thread_sets():
    began = clocks.moment()
    future = torch.futures.Future()

    def work():
        time.sleep(1)
        dist.barrier()
        future.set_result(7)

    thread = threading.Thread(target=work)
    thread.start()
    value = future.wait()
    took = clocks.moment() - began
    thread.join()
    return expect((value, took), (7, 1001 * 10**9))


def a_wait_with_a_limit():
    """Wait with a limit, which ends the wait; a second one, with more time, ends with the
    message.
    """
    if dist.get_rank() == 0:
        time.sleep(5)
        dist.send(number(3), 1)
        return None
    began = clocks.moment()
    tensor = torch.zeros(1)
    work = dist.irecv(tensor, 0)
    with pytest.raises(RuntimeError, match="timed out after 1 s of virtual time"):
        work.wait(timedelta(seconds=1))
    waited = clocks.moment() - began
    work.wait(timedelta(seconds=100))
    return expect((waited, tensor.item()), (10**12, 3))


def a_limit_while_it_is_on_its_way():
    """Wait with a limit for a message whose end is known, and later than the limit."""
    work, tensor = summed()
    with pytest.raises(RuntimeError, match=r"timed out after 0.002 s"):
        work.wait(timedelta(milliseconds=2))
    work.wait()
    return expect(tensor[0].item(), 2)


FUTURES = (
    a_callback_runs_if_only_the_work_is_waited_for,
    a_callback_runs_if_nobody_waits,
    a_callback_sets_what_is_waited_for,
    callbacks_of_two_groups_run_by_their_ends,
    a_chain_of_callbacks,
    all_futures_are_collected,
    all_futures_are_waited_for,
    all_futures_have_a_callback,
    a_future_that_a_thread_sets,
    a_wait_with_a_limit,
    a_limit_while_it_is_on_its_way,
)


def test_futures_and_limits():
    assert not faults_of(FUTURES)


# Whole programs wait for more than messages.


def an_event_loop_sleeps():
    async def sleep():
        await asyncio.sleep(1000)

    began = clocks.moment()
    asyncio.run(sleep())
    return expect((clocks.moment() - began) // 10**12, 1000)


def an_event_loop_and_a_thread():
    async def add_up():
        tensor = torch.full((1000,), 1.0)
        await asyncio.gather(asyncio.to_thread(dist.all_reduce, tensor), asyncio.sleep(0.001))
        return tensor[0].item()

    began = clocks.moment()
    total = asyncio.run(add_up())
    return expect((total, (clocks.moment() - began) // 10**9), (2, 6))


def an_event_loop_gives_up():
    async def wait():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 2)

    began = clocks.moment()
    asyncio.run(wait())
    return expect((clocks.moment() - began) // 10**12, 2)


def a_child_process_takes_no_time():
    began = clocks.moment()
    subprocess.run(["sleep", "0.1"], timeout=20, check=True)
    done = subprocess.run(["echo", "words"], capture_output=True, timeout=20, check=True)
    return expect((done.stdout, clocks.moment() - began), (b"words\n", 0))


def a_child_process_is_given_up():
    began = clocks.moment()
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(["sleep", "100"], timeout=0.1)
    return expect(clocks.moment() - began, 0)


def a_process_is_joined_with_a_limit():
    process = multiprocessing.get_context("fork").Process(target=real_sleep, args=(100,))
    process.start()
    process.join(timeout=0.1)
    alive = process.is_alive()
    process.kill()
    process.join()
    return expect(alive, True)


def a_selector_and_a_timer():
    began = clocks.moment()
    reading, writing = os.pipe()
    selector = selectors.DefaultSelector()
    selector.register(reading, selectors.EVENT_READ)
    timer = threading.Timer(1.0, os.write, (writing, b"x"))
    timer.start()
    ready = selector.select(5)
    took = clocks.moment() - began
    timer.join()
    return expect((len(ready), took), (1, 10**12))


def timers_call_at_their_moment():
    """A third one is cancelled."""
    began = clocks.moment()
    called = []
    timers = [
        threading.Timer(seconds, lambda: called.append(clocks.moment() - began))
        for seconds in (2, 1, 3)
    ]
    for timer in timers:
        timer.start()
    time.sleep(2.5)
    timers[2].cancel()
    for timer in timers:
        timer.join()
    return expect(called, [10**12, 2 * 10**12])


def pools_of_processes_are_refused():
    for pool in (ProcessPoolExecutor, multiprocessing.Pool):
        with pytest.raises(RuntimeError, match="cannot be used where time is virtual"):
            pool(1)


def a_sparse_sum():
    rank = dist.get_rank()
    tensor = torch.sparse_coo_tensor([[rank]], torch.ones(1), (4,)).coalesce()
    dist.all_reduce(tensor)
    return expect(tensor.to_dense().tolist(), [1, 1, 0, 0])


WHOLE = (
    an_event_loop_sleeps,
    an_event_loop_and_a_thread,
    an_event_loop_gives_up,
    a_child_process_takes_no_time,
    a_child_process_is_given_up,
    a_process_is_joined_with_a_limit,
    a_selector_and_a_timer,
    timers_call_at_their_moment,
    pools_of_processes_are_refused,
    a_sparse_sum,
)


def test_whole_programs():
    assert not faults_of(WHOLE)


def sum_of_ones():
    time.sleep(3)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def a_launch_within_a_rank():
    """It has clocks of its own, and takes no time of this rank's."""
    began = clocks.moment()
    sums = launch(sum_of_ones, world_size=2, link=LINK)
    return expect((sums, clocks.moment() - began), ([2, 2], 0))


@pytest.mark.slow
def test_a_launch_within_a_rank():
    assert not faults_of([a_launch_within_a_rank], world_size=1)


def beat():
    while True:
        time.sleep(1)


def a_deadlock_beside_a_heartbeat():
    threading.Thread(target=beat, daemon=True).start()
    dist.recv(torch.zeros(1), 1 - dist.get_rank())


def ticks_by_an_event():
    threading.Thread(target=lambda: [threading.Event().wait(60) for _ in range(1000)]).start()
    late = threading.Thread(target=beat, daemon=True)
    late.start()
    dist.recv(torch.zeros(1), 1 - dist.get_rank())


@pytest.mark.parametrize("program", [a_deadlock_beside_a_heartbeat, ticks_by_an_event])
def test_a_thread_that_ticks_hides_no_deadlock(program):
    with pytest.raises(DeadlockError, match="rank 0 waits to receive from rank 1"):
        launch(program, world_size=2, link=LINK)


def a_daemon_helps_after_a_day():
    """It is no deadlock while only threads of a rank wait for each other."""
    done = threading.Event()
    threading.Thread(target=lambda: (time.sleep(86_400), done.set()), daemon=True).start()
    done.wait()


def test_a_daemon_that_takes_a_day_is_no_deadlock():
    assert not faults_of([a_daemon_helps_after_a_day])


def too_many_groups():
    table = clock.process.table
    table.head.groups = MOST_GROUPS
    with pytest.raises(RuntimeError, match="more than 1024 process groups"):
        dist.new_group([0, 1])


def test_a_group_too_many_is_refused_in_words():
    assert not faults_of([too_many_groups])
