"""Schedules as data: a list of instructions for each rank.

A schedule is a function of the number of ranks K and of micro-batches M. Any other function that
returns such lists can be given to `Pipeline`, which refuses those that cannot work.
"""

from collections import deque
from itertools import zip_longest

from .instructions import Backward, BackwardInput, BackwardWeight, Forward


def gpipe(ranks, microbatches):
    """Return the GPipe schedule: all forward passes, then all backward passes."""
    schedule = []
    for rank in range(ranks):
        forward = [Forward(m, rank) for m in range(microbatches)]
        backward = [Backward(m, rank) for m in range(microbatches)]
        schedule.append(forward + backward)
    return schedule


def one_forward_one_backward(ranks, microbatches):
    """Return the 1F1B schedule: as few forward passes ahead as keep all ranks busy."""
    schedule = []
    for rank in range(ranks):
        places = [(m, rank) for m in range(microbatches)]
        schedule.append(alternate(places, places, ahead=ranks - 1 - rank))
    return schedule


def interleaved(ranks, microbatches, chunks=2):
    """Return the interleaved schedule: 1F1B with `chunks` stages on every rank.

    Groups of K micro-batches go around all ranks once for each chunk. Raises ValueError unless the
    number of micro-batches is a multiple of K.
    """
    if microbatches % ranks:
        raise ValueError(
            f"{microbatches} micro-batches cannot go around {ranks} ranks; use a multiple of "
            f"{ranks}"
        )
    order = []  # pairs (micro-batch, chunk)
    for first in range(0, microbatches, ranks):
        for chunk in range(chunks):
            order += [(m, chunk) for m in range(first, first + ranks)]
    schedule = []
    for rank in range(ranks):
        forward = [(m, rank + ranks * chunk) for m, chunk in order]
        backward = [(m, rank + ranks * (chunks - 1 - chunk)) for m, chunk in order]
        # As in Megatron-LM, a rank is ahead by the first group's passes through all chunks but the
        # last, and by two more for each rank behind this one.
        ahead = ranks * (chunks - 1) + 2 * (ranks - 1 - rank)
        schedule.append(alternate(forward, backward, ahead))
    return schedule


def alternate(forward, backward, ahead):
    """Return one rank's instructions from two lists of (micro-batch, stage).

    After `ahead` forward passes, forward and backward passes take turns.
    """
    row = [Forward(*place) for place in forward[:ahead]]
    for forward_place, backward_place in zip_longest(forward[ahead:], backward):
        if forward_place is not None:
            row.append(Forward(*forward_place))
        row.append(Backward(*backward_place))
    return row


def zero_bubble(ranks, microbatches, schedule=one_forward_one_backward):
    """Return the zero-bubble schedule: `schedule` with its backward passes split.

    Rank r computes the weights' gradients r micro-batches later, which fills the time in which the
    rank would wait for a gradient. With 1F1B this is ZB-H1 of the paper.
    """
    rows = []
    for rank, whole in enumerate(schedule(ranks, microbatches)):
        row = []
        later = deque()
        for instruction in whole:
            if isinstance(instruction, Backward):
                row.append(BackwardInput(instruction.microbatch, instruction.stage))
                later.append(BackwardWeight(instruction.microbatch, instruction.stage))
            else:
                row.append(instruction)
            if len(later) > rank:
                row.append(later.popleft())
        rows.append([*row, *later])
    return rows


def bubble(ranks, microbatches, chunks=1):
    """Return the share (0 to 1) of time that a rank idles in GPipe, 1F1B and interleaved 1F1B."""
    return (ranks - 1) / (chunks * microbatches + ranks - 1)
