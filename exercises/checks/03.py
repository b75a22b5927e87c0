"""Exercise 3: the server's two loops, the average, and the time it takes.

A task's `draw`, `probe` and `read` are what `ddp_exercises.tasks.Task` says.
"""

import torch.distributed as dist

from ddp_course import wire
from ddp_exercises.attempt import COLLECTIVES
from ddp_exercises.tasks import task

from .shared import (
    NO_TENSOR,
    RING,
    SERVER,
    as_sum,
    in_words,
    tensors,
    unequal_lengths,
    worlds,
)

LENGTH = 17
LOOP = {
    "ranks": 4,
    "every_order": "values",
    "forbidden": SERVER + RING + COLLECTIVES,
    "hang": "does each of the others send once, does the server receive once from each, and is `group`"
    " passed on?",
}
BACK = {
    **LOOP,
    "hang": "does the server send once to each of the others, does each of them receive once, and is"
    " `group` passed on?",
}


def draw_server(random, whole=True):
    """Return tensors that differ by rank, and a server for each world size.

    They are whole numbers, whose sums are exact, unless they are divided later.
    """
    servers = {3: random.randrange(1, 3), 4: random.randrange(4), 2: 1, 1: 0}
    return {"values": tensors(random, 4, LENGTH, whole=whole), "servers": servers}


def probe_server(function, values, servers):
    """Yield every rank's tensor after `function(tensor, server, group)`, and the bytes it sent.

    The worlds have 3, 4, 2 and 1 ranks.
    """
    for size, group in worlds(3, 4, 2, 1):
        server = servers[size]
        case = f"with {size} ranks and rank {server} as server"
        tensor = values[dist.get_rank()].clone()
        if size == 2:  # One world has another dtype.
            tensor = tensor.double()
            case += " (float64)"
        events = []
        with wire.observing(events.append), in_words(NO_TENSOR):
            function(tensor, server, group)
        sent = [event for event in events if event.kind == "send"]
        yield "values", f"{case}, the tensor as a sum", as_sum(tensor, values[:size])
        yield "values", case, tensor
        yield "bytes", f"{case}, ranks that it sends to", sorted({event.peer for event in sent})
        yield "bytes", f"{case}, bytes sent", sum(event.bytes for event in sent)
        yield "bytes", f"{case}, lengths of messages", unequal_lengths(events, group)


@task("3.1", "collect", {"values": 1, "bytes": 1}, **LOOP)
class Collect:
    """The first loop: the server has the sum; each other rank keeps its tensor, and sends once."""

    draw = draw_server
    probe = probe_server


@task("3.2", "send_back", {"values": 1, "bytes": 1}, **BACK)
class SendBack:
    """The second loop: all ranks have the server's tensor, and only the server sends."""

    draw = draw_server
    probe = probe_server


@task("3.3", "average", {"values": 1, "bytes": 1}, **LOOP)
class Average:
    """The mean on every rank: p bytes to the server, and p back to each."""

    def draw(random):
        return draw_server(random, whole=False)

    probe = probe_server


@task(
    "3.4",
    "ranks_that_pay",
    {"some of them": 1, "one or all": 1},
    forbidden=(
        "ddp_course.lab.measuring.theory.parameter_server",
        "ddp_course.lab.measuring.theory.seconds",
    ),
)
class RanksThatPay:
    """The least of c/K + 2 (K-1) p/b: neither one rank nor all, but on very slow or fast links."""

    def draw(random):
        # Computing/K + sending K is least at K = `best`. Of whole numbers 2 is best for 2.2, and 3
        # for 2.47, since that is beyond the root of 2 * 3: neither cutting off nor rounding always
        # finds it.
        bests = [*random.sample(range(2, 9), 3), random.randrange(15, 30), 2.2, 2.47]
        cases = [("some of them", best, int(4 * best)) for best in bests]
        cases += [("one or all", 0.3, 6), ("one or all", 40, 16)]
        for part, best, most in cases:
            parameters = random.randrange(1, 400) * 10**6
            bits = random.randrange(1, 100) * 10**8
            # In seconds: each further rank sends all gradients of 32 bits, and gets the sum.
            sending = 2 * 32 * parameters / bits
            computing = sending * best**2
            about = (
                f"{computing:.3g} s of computing, {parameters:,} parameters, {bits:,} bit/s, at"
                f" most {most} ranks"
            )
            yield part, about, (computing, parameters, bits, most)
