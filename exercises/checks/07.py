"""Exercise 7: optimizer state split over the ranks, the memory that it saves, and prefetch in
little room.
"""

import torch
import torch.distributed as dist

from ddp_course.checking.attempt import COLLECTIVES
from ddp_course.checking.checks import load_tasks, task
from ddp_course.running import wire

from .shared import RING, SERVER, require, several, tensors, worlds

SCHEDULES = load_tasks(8)


@task("7.1", "assign_owners", {"fewest so far": 1, "lowest of equals": 1})
class AssignOwners:
    """In order, each parameter to a rank that holds least so far, the lowest of equals."""

    def draw(random, hidden):
        cases = [([random.randrange(1, 500) for _ in range(12)], k) for k in (2, 3, 4)]
        return {
            "cases": [
                ([100, 60, 50, 40, 10, 5], 2),
                ([7, 7, 7, 7, 7], 3),
                *cases,
                ([5, 3], 4),
                ([9, 8, 7], 1),
            ]
        }

    def probe(assign_owners, cases):
        for sizes, world_size in cases:
            owners = assign_owners(list(sizes), world_size)
            about = f"sizes {sizes} on {world_size} ranks"
            each = (
                f"{about}: a rank for each parameter was expected, from 0 to {world_size - 1}, not"
                f" {owners}"
            )
            require(
                all(owner in range(world_size) for owner in several(owners, len(sizes), each)), each
            )
            yield "fewest so far", about, balance(sizes, world_size, owners)
            yield "lowest of equals", f"{about}, the owners", list(owners)


def balance(sizes, world_size, owners):
    """In words, what the ranks hold in the end if a parameter went to a rank that did not hold
    least.
    """
    held, least = [0] * world_size, True
    for size, owner in zip(sizes, owners, strict=True):
        least &= held[owner] == min(held)
        held[owner] += size
    return "" if least else f"{list(owners)} gives {held} numbers per rank"


SHAPES = [(6, 5), (9,), (4, 4), (3,), (7, 2)]
SAME_ORDER = "do all ranks go through the parameters in the same order?"
LOOP = {"ranks": 4, "forbidden": SERVER + RING + COLLECTIVES, "hang": SAME_ORDER, "bound": 1e-9}


@task("7.2", "sharded_step", {"values": 2, "bytes": 1}, **LOOP)
class ShardedStep:
    """Each rank steps the parameters that it owns, then sends them to the others."""

    def draw(random, hidden):
        values, gradients = (
            [tensors(random, 1, *shape, dtype=torch.float64)[0] for shape in SHAPES] for _ in "ab"
        )
        owners = {
            size: [random.randrange(size) for _ in SHAPES[size:]] + list(range(size))
            for size in (2, 3, 4)
        }
        return {
            "values": values,
            "gradients": gradients,
            "owners": {size: owners[size] for size in (3, 4, 2)},
        }

    def probe(sharded_step, values, gradients, owners):
        for size, group in worlds(*owners):
            parameters = [torch.nn.Parameter(value.clone()) for value in values]
            own = [
                p
                for p, owner in zip(parameters, owners[size], strict=True)
                if owner == dist.get_rank()
            ]
            optimizer = torch.optim.SGD(own, lr=0.1, momentum=0.9)
            with wire.counting() as traffic:
                for turn in range(3):
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.grad = gradient * (turn + 1)
                    sharded_step(parameters, owners[size], optimizer, group)
                    row = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
                    yield "values", f"with {size} ranks, after step {turn + 1}", row
            case = f"with {size} ranks, bytes sent per step, when K-1 others need what a rank owns"
            yield "bytes", case, traffic.bytes_sent // 3


@task("7.3", "fewest_ranks", {"enough": 1, "never enough": 1})
class FewestRanks:
    """16 bytes per parameter, of which 16, 4, 2 or 0 stay whole, by the level: what is left of the
    memory is for shards.
    """

    def draw(random, hidden):
        for level, whole in enumerate((16, 4, 2, 0)):
            parameters = 840 * random.randrange(10**3, 10**6)
            shared = (16 - whole) * parameters
            ranks = [random.randrange(2, 9), random.randrange(9, 90)] if level else []
            enough = [whole * parameters + 2 * shared // (2 * k - 1) for k in ranks] + [
                17 * parameters
            ]
            for memory in [*enough, *[whole * parameters * 3 // 4] * (whole > 0)]:
                case = f"{parameters:,} parameters, {memory:,} bytes of memory, level {level}"
                yield (
                    "enough" if memory in enough else "never enough",
                    case,
                    (parameters, memory, level),
                )


TICKS = {"gather": 2, "reduce": 2, "forward": 1, "backward": 2}


def play(order, blocks, fit):
    """Play the order tick by tick, with room for `fit` blocks: the ticks it takes, or in words what
    waits for ever.
    """
    queues = {"network": list(order), "compute": [("forward", block) for block in range(blocks)]}
    queues["compute"] += [("backward", block) for block in reversed(range(blocks))]
    taken, whole, done, running, now = 0, set(), set(), {}, 0
    while running or any(queues.values()):
        for lane, queue in queues.items():
            if not queue or lane in running:
                continue
            kind, block = queue[0]
            ready = {
                "gather": taken < fit and block not in whole,
                "reduce": ("backward", block) in done,
            }.get(kind, block in whole)
            if ready:
                running[lane] = (now + TICKS[kind], queue.pop(0))
                taken += kind == "gather"
        if not running:
            return waiting(queues, whole)
        now = min(end for end, _ in running.values())
        for lane in [lane for lane, (end, _) in running.items() if end == now]:
            _, (kind, block) = running.pop(lane)
            done.add((kind, block))
            if kind == "gather":
                whole.add(block)
            elif kind == "reduce" or (kind == "forward" and ("gather", block) in queues["network"]):
                whole.discard(block)
                taken -= 1
    return now


def waiting(queues, whole):
    """In words, what the network and the computation wait for when neither can go on."""
    network, compute = (
        " of block ".join(map(str, queue[0])) if queue else "" for queue in queues.values()
    )
    network = (
        f"{network} waits for ever while blocks {sorted(whole)} are whole"
        if network
        else "nothing is gathered"
    )
    return f"{network}, and {compute or 'nothing'} is next to compute"


@task("7.4", "network_order", {"valid": 1, "memory": 1, "prefetch": 1, "the best": 1})
class NetworkOrder:
    """Gathers and reduces in little room: at best the network never rests from the first backward
    pass on.
    """

    def draw(random, hidden):
        shapes = [
            (6, 3),
            (4, 2),
            (5, 5),
            (random.randrange(6, 10), random.randrange(2, 6)),
            *[(24, 7)] * hidden,
        ]
        return {
            "cases": [
                (n, size, fit * size + size // 2)
                for n, fit in shapes
                for size in [random.randrange(50, 99)]
            ]
        }

    def probe(network_order, cases):
        for blocks, size, cap in cases:
            about = f"{blocks} blocks of {size} MB, {cap} MB of room"
            order = SCHEDULES.steps_of(network_order(blocks, size, cap), about, "gather", "reduce")
            gathered, reduced = (
                sorted(block for kind, block in order if kind == lane)
                for lane in ("gather", "reduce")
            )
            gathered = [block for block in sorted(set(gathered)) if gathered.count(block) <= 2]
            yield (
                "valid",
                f"{about}, blocks that are gathered once, if they stay, or twice",
                gathered,
            )
            yield "valid", f"{about}, blocks whose gradients are reduced", reduced
            valid = gathered == reduced == list(range(blocks))
            took = play(order, blocks, cap // size) if valid else "this order is not valid"
            plain, best = 8 * blocks, 6 * blocks - 2 * (cap // size) + 3
            slow = (
                f"{plain} without prefetch in backward: what can be gathered while a block"
                " computes?"
            )
            idle = f"{best} is possible: does the network wait, or gather what could have stayed?"
            ends = type(took) is int
            yield "memory", f"{about}, waiting", "" if ends else took
            yield "prefetch", f"{about}, ticks ({slow})", "fewer" if ends and took < plain else took
            yield "the best", f"{about}, ticks ({idle})", took
