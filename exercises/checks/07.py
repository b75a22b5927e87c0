"""Exercise 7: optimizer state split over the ranks, and the memory that it saves."""

import torch
import torch.distributed as dist

from ddp_course.grading.attempt import COLLECTIVES, RING, SERVER, tensors, worlds
from ddp_course.grading.checks import require, task
from ddp_course.running import wire


@task("7.1", "assign_owners", {"fewest so far": 1, "lowest of equals": 1})
class AssignOwners:
    """In order, each parameter to a rank that holds least so far, the lowest of equals."""

    def draw(random, hidden):
        """Sizes of parameters, with ties, fewer parameters than ranks, and one rank alone."""
        cases = [([random.randrange(1, 500) for _ in range(12)], k) for k in (2, 3, 4)]
        return {"cases": [([100, 60, 50, 40, 10, 5], 2), ([7, 7, 7, 7, 7], 3), *cases, ([5, 3], 4), ([9, 8, 7], 1)]}

    def probe(assign_owners, cases):
        """Whether each parameter went to a rank that had the fewest numbers, and the owners themselves."""
        evidence = {"fewest so far": {}, "lowest of equals": {}}
        for sizes, world_size in cases:
            owners = assign_owners(list(sizes), world_size)
            about = f"sizes {sizes} on {world_size} ranks"
            require(isinstance(owners, list | tuple), f"{about}: a list of owners was expected, not {type(owners)}")
            each = f"{about}: {len(owners)} owners for {len(sizes)} parameters; a rank for each parameter was expected"
            require(len(owners) == len(sizes), each)
            ranks = all(type(owner) is int and 0 <= owner < world_size for owner in owners)
            require(ranks, f"{about}: {list(owners)}: owners are ranks, from 0 to {world_size - 1}")
            evidence["fewest so far"][about] = balance(sizes, world_size, owners)
            evidence["lowest of equals"][f"{about}, the owners"] = list(owners)
        return evidence


def balance(sizes, world_size, owners):
    """In words, whether each parameter went to a rank that held least, and else what the ranks hold in the end."""
    held, least = [0] * world_size, True
    for size, owner in zip(sizes, owners, strict=True):
        least &= held[owner] == min(held)
        held[owner] += size
    return (
        "each goes to a rank that has the fewest numbers" if least else f"{list(owners)} gives {held} numbers per rank"
    )


SHAPES = [(6, 5), (9,), (4, 4), (3,), (7, 2)]
SAME_ORDER = "do all ranks go through the parameters in the same order?"
LOOP = {"ranks": 4, "forbidden": SERVER + RING + COLLECTIVES, "hang": SAME_ORDER, "bound": 1e-9}


@task("7.2", "sharded_step", {"values": 2, "bytes": 1}, **LOOP)
class ShardedStep:
    """Step what you own, then give it to the others."""

    def draw(random, hidden):
        """Parameters, gradients, and owners for 2, 3 and 4 ranks: everyone owns something."""
        values, gradients = ([tensors(random, 1, *shape, dtype=torch.float64)[0] for shape in SHAPES] for _ in "ab")
        owners = {size: [random.randrange(size) for _ in SHAPES[size:]] + list(range(size)) for size in (2, 3, 4)}
        return {"values": values, "gradients": gradients, "owners": {size: owners[size] for size in (3, 4, 2)}}

    def probe(sharded_step, values, gradients, owners):
        """Every rank's parameters after each of three steps, and the bytes that it sent per step."""
        evidence = {"values": {}, "bytes": {}}
        for size, group in worlds(*owners):
            parameters = [torch.nn.Parameter(value.clone()) for value in values]
            own = [p for p, owner in zip(parameters, owners[size], strict=True) if owner == dist.get_rank()]
            optimizer = torch.optim.SGD(own, lr=0.1, momentum=0.9)
            with wire.counting() as traffic:
                for turn in range(3):
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.grad = gradient * (turn + 1)
                    sharded_step(parameters, owners[size], optimizer, group)
                    row = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
                    evidence["values"][f"with {size} ranks, after step {turn + 1}"] = row
            case = f"with {size} ranks, bytes sent per step, when K-1 others need what a rank owns"
            evidence["bytes"][case] = traffic.bytes_sent // 3
        return evidence


@task("7.3", "bytes_per_rank", {"unsharded": 1, "sharded": 1})
class BytesPerRank:
    """Memory of a rank with Adam in float32: 4 bytes of weight, 4 of gradient, 8 of state, by what is sharded."""

    def draw(random, hidden):
        """Parameters, world sizes and ZeRO levels."""
        levels = [(840 * random.randrange(10**3, 10**6), k, level) for k in (3, 5, 7) for level in range(4)]
        return {"cases": [*levels, (840, 1, 2)]}

    def probe(bytes_per_rank, cases):
        """The bytes in each case."""
        evidence = {"unsharded": {}, "sharded": {}}
        for parameters, size, level in cases:
            count = bytes_per_rank(parameters, size, level)
            case = f"{parameters} parameters, {size} ranks, level {level}, bytes"
            evidence["sharded" if level else "unsharded"][case] = float(count) if type(count) is int else count
        return evidence
