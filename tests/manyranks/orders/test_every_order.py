"""`every_order` finds each planted fault, with both lines, and blames nothing that is right."""

import os
import random
import re
import subprocess
import sys
from functools import partial

import faults
import pytest
import torch
import torch.distributed as dist
from interleavings import (
    all_interleavings,
    play,
    right_program,
    starting_buffers,
    with_fault,
    with_race,
)
from rings import ring_all_reduce

from manyranks import every_order
from manyranks.errors import RankError

DEADLOCK = "deadlock"
EARLY = "touched too early"
OVERWRITTEN = "overwritten too early"
NOT_WAITED = "not waited for"
FAULTS = {
    faults.both_send_first: DEADLOCK,
    faults.waits_in_an_order_that_needs_buffers: DEADLOCK,
    faults.collectives_in_another_order: DEADLOCK,
    faults.reads_before_the_wait: EARLY,
    faults.reads_a_slice_of_a_view: EARLY,
    faults.reads_by_numpy: EARLY,
    faults.another_thread_reads: EARLY,
    faults.another_thread_sleeps_and_reads: EARLY,
    faults.a_barrier_instead_of_a_wait: EARLY,
    faults.all_reduce_is_read_before_the_wait: EARLY,
    faults.reads_the_neighbouring_chunk: EARLY,
    faults.overwrites_what_it_sends: OVERWRITTEN,
    faults.overwrites_a_slice_of_a_view_of_what_it_sends: OVERWRITTEN,
    faults.another_thread_overwrites: OVERWRITTEN,
    faults.an_optimizer_overwrites_what_is_sent: OVERWRITTEN,
    faults.nobody_waits: NOT_WAITED,
}


@pytest.mark.parametrize("program", FAULTS, ids=lambda program: program.__name__)
def test_a_fault_is_found_in_one_run_with_the_lines_of_both_sides(program):
    verdict = every_order(program, world_size=3)
    assert (verdict.ok, verdict.kind, verdict.runs) == (False, FAULTS[program], 1)
    assert verdict.ranks
    assert verdict.lines
    assert all(line.startswith("faults.py line ") for line in verdict.lines), verdict.lines
    if verdict.kind in (EARLY, OVERWRITTEN):
        posted, touched = (re.search(r"line (\d+)", line) for line in verdict.lines)
        assert int(posted[1]) < int(touched[1])
    # Where all ranks make the same mistake at one moment, any of them may be named.
    assert f"rank {min(verdict.ranks)}: post" in verdict.text()


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_an_optimizer_that_takes_lists_of_tensors_is_seen_as_well(kind):
    program = partial(faults.an_optimizer_overwrites_what_is_sent, **{kind: True})
    verdict = every_order(program, world_size=3)
    assert (verdict.ok, verdict.kind, verdict.runs) == (False, OVERWRITTEN, 1)


def test_what_is_right_is_proved_right_in_one_run():
    verdict = every_order(faults.reads_what_it_sends_and_other_columns, world_size=3)
    assert (verdict.ok, verdict.runs) == (True, 1)
    assert verdict.proof == (
        "right in every order: no buffer was needed, no memory was touched on its way"
    )


@pytest.mark.parametrize(
    "program, reason",
    [
        (faults.sum_of_whoever_comes, "receives from any rank"),
        (faults.asks_until_it_has_arrived, "asks whether a message has arrived"),
        (faults.another_thread_gets_it_after_the_wait, "several threads"),
    ],
    ids=["any", "asks", "threads"],
)
def test_outside_the_argument_orders_are_drawn_and_the_proof_says_less(program, reason):
    verdict = every_order(program, world_size=3)
    assert (verdict.ok, verdict.runs) == (True, 21), verdict
    assert "every order" not in verdict.proof
    assert "proves less" in verdict.proof
    assert reason in verdict.proof


@pytest.mark.parametrize(
    "program", [faults.first_come_first_served, faults.two_threads_use_one_group]
)
def test_results_that_depend_on_the_order_are_found_among_those_that_are_drawn(program):
    verdict = every_order(program, world_size=3)
    assert (verdict.ok, verdict.kind) == (False, "unlike results"), verdict
    assert verdict.ranks
    assert all(line.startswith("faults.py line ") for line in verdict.lines), verdict.lines


def test_an_error_of_the_program_itself_is_raised_as_by_a_launch():
    with pytest.raises(RankError, match="KeyError"):
        every_order(raise_key_error)


def raise_key_error():
    raise KeyError("mine")


ORDINARY = """
import faults
from manyranks import Link, launch
for link in (None, Link("100Mbit")):
    print(launch(faults.modules_and_hooks, world_size=2, device="cpu", link=link)[0])
"""


def test_an_ordinary_launch_pays_nothing():
    """Where nobody asks for every order, nothing of it is imported, and nothing is hooked.

    A process of its own launches: here other tests may have asked before.
    """
    done = subprocess.run(
        [sys.executable, "-c", ORDINARY],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == ["([], [])"] * 2, done.stderr
    assert every_order(faults.pays_for_its_hooks).ok


def test_the_ring_is_proved_right():
    assert every_order(summed_by_the_ring, world_size=3).ok


def summed_by_the_ring():
    return ring_all_reduce(torch.arange(23.0) * (dist.get_rank() + 1))


# The tests below play random programs.

RANKS = 3


def program_with(number):
    """Return the random program with this number.

    Odd ones have a fault, every fourth is as it was drawn, and the others have a change that all
    interleavings say is harmless.
    """
    draw = random.Random(f"program {number}")
    if number % 4 == 0:
        return right_program(draw)
    program = with_fault(draw, right_program(draw))
    while all_interleavings(program).right == bool(number % 2):
        program = with_fault(draw, right_program(draw))
    return program


def really_played(programs):
    """Play programs one after the other on this rank."""
    rank = dist.get_rank()
    for program in programs:
        dist.barrier()
        if rank < program.ranks:
            buffers = [torch.tensor([float(value)]).double() for value in starting_buffers(rank)]
            play(
                program, rank, dist.isend, dist.irecv, buffers, torch.zeros(1, dtype=torch.float64)
            )


def test_five_hundred_random_programs_without_a_fault_are_not_blamed():
    programs = [right_program(random.Random(f"clean {number}")) for number in range(500)]
    verdict = every_order(really_played, programs, world_size=RANKS)
    assert (verdict.ok, verdict.runs) == (True, 1), verdict


def missed_races(numbers):
    """Plant a race into each of some random programs; return the verdicts that miss it."""
    missed = {}
    for number in numbers:
        draw = random.Random(f"race {number}")
        program = None
        while program is None:
            program = with_race(draw, right_program(draw))
        verdict = every_order(really_played, [program], world_size=RANKS)
        in_program = all(line.startswith("interleavings.py line ") for line in verdict.lines)
        if verdict.kind not in (EARLY, OVERWRITTEN) or verdict.runs != 1 or not in_program:
            missed[number] = verdict
    return missed


def test_ten_planted_races_are_found():
    assert not missed_races(range(0, 500, 50))


@pytest.mark.weekly
def test_five_hundred_planted_races_are_found():
    assert not missed_races(range(500))


def wrong_verdicts(numbers):
    """Return the verdicts of one run that all interleavings contradict, by the programs' numbers.

    Half of the programs have a fault. The others run in one launch, whose verdict is right only if
    all of them are.
    """
    right = []
    wrong = {}
    for number in numbers:
        program = program_with(number)
        outcome = all_interleavings(program)
        assert outcome.right == (number % 2 == 0)
        if outcome.right:
            right.append(program)
            continue
        verdict = every_order(really_played, [program], world_size=RANKS)
        if verdict.ok or verdict.runs != 1:
            wrong[number] = verdict, outcome
    verdict = every_order(really_played, right, world_size=RANKS)
    if not verdict.ok or verdict.runs != 1:
        wrong["the right ones"] = verdict
    return wrong


def test_one_run_says_what_all_interleavings_say():
    assert not wrong_verdicts(range(12))


@pytest.mark.weekly
def test_one_run_says_what_all_interleavings_say_of_two_hundred_programs():
    assert not wrong_verdicts(range(200))
