"""Virtual time: messages, collectives and threads at exact moments, whatever the machine does."""

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist

from manyranks import Link, clocks, launch
from manyranks.clocks.table import least, real_sleep

LINK = Link("8Mbit", latency="1ms")  # A byte takes a microsecond.
MS = 10**9  # A millisecond has so many picoseconds.


def a_message():
    clocks.advance(0.002 * dist.get_rank())
    tensor = torch.ones(250)
    act = dist.send if dist.get_rank() == 0 else dist.recv
    act(tensor, 1 - dist.get_rank())
    return clocks.moment()


def test_a_message_is_ready_with_the_later_side_and_arrives_a_latency_later():
    assert launch(a_message, world_size=2, link=LINK) == [3 * MS, 4 * MS]


def from_any():
    rank = dist.get_rank()
    if rank:
        clocks.advance(0.01 * (3 - rank))
        dist.send(torch.full((1,), float(rank)), 0)
        return []
    sources = []
    for _ in range(2):
        sources.append(dist.recv(torch.zeros(1)))
    return sources


def test_a_receive_from_any_rank_takes_the_oldest_message():
    assert launch(from_any, world_size=3, link=LINK)[0] == [2, 1]


def two_threads_from_any():
    rank = dist.get_rank()
    if rank:
        clocks.advance(0.01 * rank)
        real_sleep(0.3)  # Both threads wait before anything is posted.
        dist.send(torch.zeros(1), 0, tag=rank)
        return None
    sources = {}

    def receive(tag):
        sources[tag] = dist.recv(torch.zeros(1), tag=tag)

    threads = [threading.Thread(target=receive, args=(tag,)) for tag in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sources


def test_two_threads_of_a_rank_may_wait_for_any_rank():
    assert launch(two_threads_from_any, world_size=3, link=LINK)[0] == {1: 1, 2: 2}


def collectives():
    rank = dist.get_rank()
    size = dist.get_world_size()
    moments = []
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(tensor)
    moments.append(clocks.moment())
    dist.broadcast(tensor, 0)
    moments.append(clocks.moment())
    parts = [torch.zeros(500) for _ in range(size)]
    dist.all_to_all(parts, [torch.full((500,), float(rank * size + to)) for to in range(size)])
    moments.append(clocks.moment())
    dist.monitored_barrier()
    moments.append(clocks.moment())
    half = dist.new_group([0, 1])
    objects = [None] * 2
    if rank < 2:
        dist.all_gather_object(objects, {"rank": rank}, group=half)
    return tensor[0].item(), [part[0].item() for part in parts], moments, objects


def test_torchs_collectives_take_their_closed_forms():
    ranks = launch(collectives, world_size=4, link=LINK)
    ends = [12 * MS, 22 * MS, 31 * MS, 33 * MS]
    for rank, (total, parts, moments, objects) in enumerate(ranks):
        assert total == 6.0
        assert parts == [float(4 * source + rank) for source in range(4)]
        assert moments == ends
        if rank < 2:
            assert objects == [{"rank": 0}, {"rank": 1}]


def in_two_groups():
    rank = dist.get_rank()
    groups = [dist.new_group([1, 2]), dist.new_group([0, 1])]
    dist.barrier()
    began = clocks.moment()
    works = []
    for group, elements in zip(groups, (3000, 1000), strict=True):
        if rank in dist.get_process_group_ranks(group):
            works.append(dist.all_reduce(torch.ones(elements), group=group, async_op=True))
    ends = []
    for work in works:
        work.wait()
        ends.append(clocks.moment() - began)
    return ends


def test_of_two_collectives_at_one_moment_that_of_the_group_made_first_is_first():
    first = 14 * MS
    second = 20 * MS
    assert launch(in_two_groups, world_size=3, link=LINK) == [[second], [first, second], [first]]


def only_one_sends(late):
    rank = dist.get_rank()
    if rank == late:
        real_sleep(0.3)
    elements = 1000 * rank
    received = torch.zeros(1000 - elements)
    work = dist.all_to_all_single(
        received, torch.ones(elements), [0, len(received)], [elements, 0], async_op=True
    )
    messages = [dist.irecv(torch.ones(250), 1 - rank), dist.isend(torch.ones(250), 1 - rank)]
    for each in (*messages, work):
        each.wait()
    return clocks.moment()


@pytest.mark.parametrize("late", (0, 1))
def test_a_collective_in_which_only_one_rank_has_bytes_uses_the_links_whoever_comes_first(late):
    assert launch(only_one_sends, late, world_size=2, link=LINK) == [5 * MS, 5 * MS]


def not_waited_for():
    dist.all_reduce(torch.ones(1000), async_op=True)
    dist.all_reduce(torch.ones(1000))
    return clocks.moment()


def test_a_collective_for_which_nobody_waits_takes_its_time():
    assert launch(not_waited_for, world_size=2, link=LINK) == [12 * MS, 12 * MS]


def hand_overs():
    """Return what threads of one rank give each other, with the moments."""
    jobs = queue.Queue()
    seen = []
    lock = threading.Lock()

    def work(number):
        time.sleep(0.001 * number)
        with lock:
            time.sleep(0.005)
            jobs.put((number, clocks.moment()))

    threads = [threading.Thread(target=work, args=(number,)) for number in (3, 2, 1)]
    for thread in threads:
        thread.start()
    for _ in threads:
        seen.append((*jobs.get(), clocks.moment()))
    for thread in threads:
        thread.join()
    with ThreadPoolExecutor(1) as pool:
        futures = [pool.submit(time.sleep, 0.01) for _ in range(2)]
        for future in futures:
            future.result()
    try:
        jobs.get(timeout=0.004)
    except queue.Empty:
        seen.append(clocks.moment())
    return seen


def test_threads_hand_over_in_the_order_of_virtual_time():
    """The pool asks once whether a worker is idle, which costs 10 microseconds."""
    first, second = launch(hand_overs, world_size=2, link=LINK)
    assert first[:3] == [(n, (1 + 5 * n) * MS, (1 + 5 * n) * MS) for n in (1, 2, 3)]
    assert first[3] == pytest.approx(40.01 * MS, abs=2)
    assert first == second


def a_place_that_is_given_again():
    """Start a third thread that takes the first one's place in the table, but not its place in the
    order.
    """
    order = []

    def come(name, seconds):
        time.sleep(seconds)
        with lock:
            order.append(name)

    lock = threading.Lock()
    first = threading.Thread(target=time.sleep, args=(0.001,))
    second = threading.Thread(target=come, args=("second", 0.01))
    first.start()
    second.start()
    first.join()
    third = threading.Thread(target=come, args=("third", 0.009))
    third.start()
    second.join()
    third.join()
    return order


def test_of_two_threads_that_come_at_one_moment_the_one_that_started_first_is_first():
    assert launch(a_place_that_is_given_again, world_size=1, link=LINK) == [["second", "third"]]


def ask_until_completed():
    if dist.get_rank():
        clocks.advance(0.001)
        dist.send(torch.zeros(1000), 0)
        return 0
    work = dist.irecv(torch.zeros(1000), 1)
    questions = 1
    while not work.is_completed():
        questions += 1
    return questions


def test_a_loop_of_questions_comes_to_an_end():
    assert launch(ask_until_completed, world_size=2, link=LINK)[0] == 601


class MovesOn(np.ndarray):
    """Clocks of which the first moves on to 20 right after anybody has looked at all of them."""

    def min(self):
        """Return the smallest number, as numpy does."""
        return self.look(np.min)

    def argmin(self):
        """Return the place of the smallest number, as numpy does."""
        return self.look(np.argmin)

    def look(self, at):
        """Return what `at` finds before the first clock moves on."""
        found = at(np.array(self))
        self[0] = 20
        return found


def test_a_clock_that_moves_on_meanwhile_hides_no_other_one():
    clocks_of_two = np.array([5, 10]).view(MovesOn)
    assert least(clocks_of_two) <= 10
    assert least(clocks_of_two) == 10
