"""`every_order` finds each planted fault, with both lines, and blames nothing that is right."""

import random
import re

import faults
import pytest
import torch
import torch.distributed as dist
from interleavings import all_interleavings, play, right_program, starting_buffers, with_fault

from ddp_course import every_order
from ddp_course.errors import RankError

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
    faults.all_reduce_is_read_before_the_wait: EARLY,
    faults.reads_the_neighbouring_chunk: EARLY,
    faults.overwrites_what_it_sends: OVERWRITTEN,
    faults.an_optimizer_overwrites_what_is_sent: OVERWRITTEN,
    faults.nobody_waits: NOT_WAITED,
}


@pytest.mark.parametrize("program", FAULTS, ids=lambda program: program.__name__)
def test_a_fault_is_found_in_one_run_with_the_lines_of_both_sides(program, capsys):
    verdict = every_order(program, world_size=3)
    assert (verdict.ok, verdict.kind, verdict.runs) == (False, FAULTS[program], 1)
    assert verdict.ranks
    assert verdict.lines
    assert all(line.startswith("faults.py line ") for line in verdict.lines), verdict.lines
    if verdict.kind in (EARLY, OVERWRITTEN):
        posted, touched = (re.search(r"line (\d+)", line) for line in verdict.lines)
        assert int(posted[1]) < int(touched[1])
    verdict.show()
    assert "rank 0: post" in capsys.readouterr().out


RIGHT = [
    faults.reads_what_it_sends_and_other_columns,
    faults.another_thread_gets_it_after_the_wait,
]


@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
def test_what_is_right_is_proved_right_in_one_run(program):
    verdict = every_order(program, world_size=3)
    assert (verdict.ok, verdict.runs) == (True, 1)
    assert verdict.proof.startswith("right in every order")


@pytest.mark.parametrize(
    "program, reason",
    [
        (faults.sum_of_whoever_comes, "receives from any rank"),
        (faults.asks_until_it_has_arrived, "asks whether a message has arrived"),
    ],
    ids=["any", "asks"],
)
def test_outside_the_argument_orders_are_drawn_and_the_proof_says_less(program, reason):
    verdict = every_order(program, world_size=3)
    assert (verdict.ok, verdict.runs) == (True, 21), verdict
    assert "proves less" in verdict.proof
    assert reason in verdict.proof


@pytest.mark.parametrize(
    "program", [faults.first_come_first_served, faults.two_threads_use_one_group]
)
def test_results_that_depend_on_the_order_are_found_among_those_that_are_drawn(program):
    verdict = every_order(program, world_size=3)
    assert (verdict.ok, verdict.kind) == (False, "unlike results"), verdict


def test_an_error_of_the_program_itself_is_raised_as_by_a_launch():
    with pytest.raises(RankError, match="KeyError"):
        every_order(raise_key_error)


def raise_key_error():
    raise KeyError("mine")


# Random programs

RANKS = 3


def program_with(number, faulty):
    """The random program with this number."""
    draw = random.Random(f"program {number}")
    program = right_program(draw)
    return with_fault(draw, program) if faulty else program


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
    programs = [program_with(number, faulty=False) for number in range(500)]
    verdict = every_order(really_played, programs, world_size=RANKS)
    assert (verdict.ok, verdict.runs) == (True, 1), verdict


def interleaved(numbers):
    """The verdicts of one run and of all interleavings, for programs of which half were changed."""
    for number in numbers:
        program = program_with(number, faulty=number % 2 == 1)
        outcome = all_interleavings(program)
        yield number, every_order(really_played, [program], world_size=RANKS), outcome


def compare(numbers):
    """What one run says stands for all interleavings."""
    harmless = 0
    for number, verdict, outcome in interleaved(numbers):
        assert verdict.runs == 1
        if verdict.ok:
            assert outcome.right, f"program {number} is right in one run only: {outcome}"
        elif outcome.right:
            # A touch before the wait, of a message that cannot be on its way yet: against the rule.
            assert verdict.kind in (EARLY, OVERWRITTEN), f"program {number}: {verdict}"
            harmless += 1
    assert harmless <= len(numbers) / 50


def test_one_run_says_what_all_interleavings_say():
    compare(range(1, 24, 2))


@pytest.mark.weekly
def test_one_run_says_what_all_interleavings_say_of_two_hundred_programs():
    compare(range(200))
