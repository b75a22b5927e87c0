"""Works out when each rank does what, and whether a schedule can work at all."""

from collections import deque
from typing import NamedTuple

from .instructions import Backward, BackwardInput, BackwardWeight, Forward

WHOLE = ["forward", "backward"]
IN_PARTS = ["forward", "input", "weight"]


class Candidate(NamedTuple):
    """When an instruction, the next one of `rank`, would start and end if it were carried out now.

    The end comes first, because candidates are compared by it.
    """

    end: float
    rank: int
    start: float


def timetable(schedule, forward=1.0, backward=2.0, message=0.0, latency=0.0):
    """Return when each rank does what: a list of (instruction, start, end) for each rank.

    `forward` and `backward` are the times of a pass, in any unit; each part of a split backward
    pass takes half of the latter. `message` is the time of a message's bytes on the link of a rank,
    which carries one message out and one in at a time, and `latency` passes on the way. The times
    of passes may be lists with one for each stage, and `message` a list with one for each cut.
    Raises ValueError for a schedule that cannot work.
    """
    homes = home_ranks(schedule)
    durations = durations_of(forward, backward, len(homes))
    message_times = as_list(message, len(homes))
    waiting = [deque(instructions) for instructions in schedule]
    rows = [[] for _ in schedule]
    free = [0.0 for _ in schedule]  # when each rank has done what it has begun
    arrivals = {None: 0.0}  # when each activation or gradient is where it is needed
    free_out = [0.0 for _ in schedule]  # when the way out of each rank is free again
    free_in = [0.0 for _ in schedule]  # when the way into it is
    while any(waiting):
        # Of all instructions that could be carried out now, the one that ends first is chosen: its
        # message then holds up later ones on the same links.
        ready = []
        for rank, queue in enumerate(waiting):
            if queue and needed(queue[0], homes) in arrivals:
                instruction = queue[0]
                start = max(free[rank], arrivals[needed(instruction, homes)])
                duration = durations[type(instruction)][instruction.stage]
                ready.append(Candidate(start + duration, rank, start))
        if not ready:
            places = [f"rank {rank} at {queue[0]}" for rank, queue in enumerate(waiting) if queue]
            words = ", ".join(places)
            raise ValueError(f"the ranks of this schedule wait for each other in a circle: {words}")
        end, rank, start = min(ready)
        instruction = waiting[rank].popleft()
        rows[rank].append((instruction, start, end))
        free[rank] = end
        result = given(instruction, homes)
        if result is None:
            continue
        arrivals[result] = end
        receiver = homes[result.user]
        if receiver != rank:
            duration = message_times[result.cut]
            departure = max(end, free_out[rank])
            free_out[rank] = departure + duration
            # The first byte comes after the latency, the last one a message's time later.
            arrivals[result] = max(departure + latency, free_in[receiver]) + duration
            free_in[receiver] = arrivals[result]
    return rows


def as_list(times, count):
    """Return a list of `count` times: `times` itself if it is a list, else this time for all."""
    return [times] * count if isinstance(times, int | float) else times


def durations_of(forward, backward, stages):
    """Return how long each class of instructions takes at each stage, as a list."""
    whole = as_list(backward, stages)
    half = [time / 2 for time in whole]
    return {
        Forward: as_list(forward, stages),
        Backward: whole,
        BackwardInput: half,
        BackwardWeight: half,
    }


def needed(instruction, homes):
    """Return the result for which `instruction` waits; None if no stage computes it."""
    needs = instruction.needs
    return needs if needs is not None and needs.source in homes else None


def given(instruction, homes):
    """Return the result of `instruction` that another stage needs; None if none does."""
    gives = instruction.gives
    return gives if gives is not None and gives.user in homes else None


def home_ranks(schedule):
    """Return the rank of every stage, by the stage's number.

    Raises ValueError unless each micro-batch runs once at every stage, forward before backward.
    """
    homes = {}
    for rank, instructions in enumerate(schedule):
        for instruction in instructions:
            homes[instruction.stage] = rank
    stages = range(max(homes) + 1)
    microbatches = {instruction.microbatch for instruction in schedule[0]}
    # This has the names of what runs at each (micro-batch, stage, rank). The rank of a stage that
    # no rank has is None, and nothing runs there.
    names_at = {(m, stage, homes.get(stage)): [] for m in microbatches for stage in stages}
    for rank, instructions in enumerate(schedule):
        for instruction in instructions:
            place = (instruction.microbatch, instruction.stage, rank)
            names_at.setdefault(place, []).append(instruction.name)
    for (microbatch, stage, _), names in names_at.items():
        if names not in (WHOLE, IN_PARTS):
            words = " and ".join(names) or "nothing"
            raise ValueError(
                f"micro-batch {microbatch} runs {words} at stage {stage}; it must run forward and "
                "then backward on one rank, or forward, input and weight"
            )
    return dict(sorted(homes.items()))
