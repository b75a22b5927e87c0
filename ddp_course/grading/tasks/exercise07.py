"""Exercise 7: optimizer state split over the ranks, and the memory that it saves."""

import torch
import torch.distributed as dist

from ...running import wire
from ..probing import traffic_of, worlds
from . import Wrong, require, task
from .diagnose import close, compare_numbers, compare_ranks, kind_of, number, tensors
from .forbidden import COLLECTIVES, RING, SERVER


def greedy(sizes, world_size):
    """The owner of each parameter, as the docstring of the task says."""
    held, owners = [0] * world_size, []
    for size in sizes:
        owner = held.index(min(held))
        owners.append(owner)
        held[owner] += size
    return owners


@task("7.1", "assign_owners")
class AssignOwners:
    """Each parameter to the rank that has least."""

    def draw(random, hidden):
        """Sizes of parameters, with ties, fewer parameters than ranks, and one rank alone."""
        cases = [([random.randrange(1, 500) for _ in range(12)], k) for k in (2, 3, 4)]
        return {"cases": [([100, 60, 50, 40, 10, 5], 2), ([7, 7, 7, 7, 7], 3), *cases, ([5, 3], 4), ([9, 8, 7], 1)]}

    def probe(assign_owners, cases):
        """The owners in each case."""
        return [assign_owners(list(sizes), world_size) for sizes, world_size in cases]

    def judge_fewest(evidence, cases):
        """In order, each parameter to a rank that holds least so far."""
        check_owners(evidence, cases, fills_evenly)

    def judge_ties(evidence, cases):
        """Of ranks that hold equally few, the lowest gets it."""
        check_owners(evidence, cases, lambda sizes, world_size, found: found == greedy(sizes, world_size))

    parts = {"fewest so far": (1, judge_fewest), "lowest of equals": (1, judge_ties)}


def fills_evenly(sizes, world_size, owners):
    """Whether each parameter goes to one of the ranks that hold least so far."""
    held = [0] * world_size
    for size, owner in zip(sizes, owners, strict=True):
        if held[owner] > min(held):
            return False
        held[owner] += size
    return True


def check_owners(evidence, cases, good):
    """In each case a rank for each parameter, so that `good(sizes, world_size, owners)`."""
    for (sizes, world_size), found in zip(cases, evidence, strict=True):
        about = f"sizes {sizes} on {world_size} ranks"
        require(isinstance(found, list | tuple), f"{about}: a list of owners was expected, not {kind_of(found)}")
        each = "a rank for each parameter was expected"
        require(len(found) == len(sizes), f"{about}: {len(found)} owners for {len(sizes)} parameters; {each}")
        ranks = all(type(owner) is int and 0 <= owner < world_size for owner in found)
        require(ranks, f"{about}: {list(found)}: owners are ranks, from 0 to {world_size - 1}")
        if not good(sizes, world_size, list(found)):
            raise_wrong_owners(about, sizes, world_size, list(found))


def raise_wrong_owners(about, sizes, world_size, found):
    """Name what usually goes wrong with one case."""
    expected = greedy(sizes, world_size)
    held = [sum(s for s, o in zip(sizes, found, strict=True) if o == rank) for rank in range(world_size)]
    got = f"{about}: {found} gives {held} numbers a rank; {expected} was expected"
    in_turn = [index % world_size for index in range(len(sizes))]
    counted = greedy([1] * len(sizes), world_size)
    by_size = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    largest = dict(zip(by_size, greedy([sizes[i] for i in by_size], world_size), strict=True))
    mirrored = [world_size - 1 - owner for owner in found]
    require(
        found not in (in_turn, counted), f"{got}: they are dealt out in turn; look at how many numbers each rank has"
    )
    require(set(found) != {0}, f"{got}: rank 0 owns everything")
    require(mirrored != expected, f"{got}: of ranks that have equally few, the lowest comes first")
    require(
        found != sorted(found), f"{got}: neighbours were kept together; each goes to the rank that has least so far"
    )
    require(
        found != [largest[i] for i in range(len(sizes))],
        f"{got}: the parameters come in their own order, not the largest first",
    )
    raise Wrong(f"{got}: each parameter goes to the rank that has the fewest numbers so far, the lowest of equals")


SHAPES = [(6, 5), (9,), (4, 4), (3,), (7, 2)]


def start(values, owners, rank):
    """Parameters that are equal on all ranks, and an optimizer with momentum for those that `rank` owns."""
    parameters = [torch.nn.Parameter(one.clone()) for one in values]
    own = [p for p, owner in zip(parameters, owners, strict=True) if owner == rank]
    return parameters, torch.optim.SGD(own, lr=0.1, momentum=0.9) if own else None


def alone(values, gradients, rounds):
    """What one device with the same gradients gets: all parameters as one vector."""
    parameters = [torch.nn.Parameter(one.clone()) for one in values]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for turn in range(rounds):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient * (turn + 1)
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in parameters])


@task(
    "7.2",
    "sharded_step",
    ranks=4,
    forbidden=SERVER + RING + COLLECTIVES,
    hang="do all ranks go through the parameters in the same order?",
)
class ShardedStep:
    """Step what you own, then give it to the others."""

    def draw(random, hidden):
        """Parameters, gradients, and owners for 2, 3 and 4 ranks: everyone owns something."""
        make = [tensors(random, 1, *shape, dtype=torch.float64)[0] for shape in SHAPES]
        gradients = [tensors(random, 1, *shape, dtype=torch.float64)[0] for shape in SHAPES]
        owners = {size: [random.randrange(size) for _ in SHAPES[size:]] + list(range(size)) for size in (2, 3, 4)}
        return {"values": make, "gradients": gradients, "owners": {3: owners[3], 4: owners[4], 2: owners[2]}}

    def probe(sharded_step, values, gradients, owners):
        """Every rank's parameters after each of three steps, and what it sent."""
        evidence = {}
        for size, group in worlds(*owners):
            parameters, optimizer = start(values, owners[size], dist.get_rank())
            stepped, counts = [], wire.counting()
            with counts as traffic:
                for turn in range(3):
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.grad = gradient * (turn + 1)
                    sharded_step(parameters, owners[size], optimizer, group)
                    stepped.append(torch.cat([p.detach().reshape(-1) for p in parameters]))
            evidence[size] = {"steps": stepped, "traffic": traffic_of(traffic)}
        return evidence

    def judge_values(evidence, values, gradients, owners):
        """The parameters of an unsharded optimizer."""
        for size, of in owners.items():
            for turn in range(3):
                found = [evidence[rank][size]["steps"][turn] for rank in range(size)]
                expected = alone(values, gradients, turn + 1)
                before = alone(values, gradients, turn)
                mask = [
                    torch.cat([torch.full((v.numel(),), owner == rank) for v, owner in zip(values, of, strict=True)])
                    for rank in range(size)
                ]
                sent = (turn + 1) * torch.cat([gradient.reshape(-1) for gradient in gradients])
                guesses = [
                    (
                        "where a parameter should be is its gradient: send the parameter itself, after the step",
                        [torch.where(mask[r], expected, sent) for r in range(size)],
                    ),
                    (
                        "each rank has stepped only its own parameters: send them to the others",
                        [torch.where(mask[r], expected, before) for r in range(size)],
                    ),
                    ("the parameters have not changed: is there a step()?", [before] * size),
                    (
                        "what is sent are the values from before the step: step first",
                        [torch.where(mask[r], expected, before) for r in range(size)],
                    ),
                ]
                compare_ranks(
                    found,
                    [expected] * size,
                    f"with {size} ranks, after step {turn + 1}",
                    guesses,
                    1e-9,
                    "the single process",
                )

    def judge_bytes(evidence, values, gradients, owners):
        """(K-1) times the bytes that a rank owns leave it."""
        for size, of in owners.items():
            for rank in range(size):
                own = sum(8 * value.numel() for value, owner in zip(values, of, strict=True) if owner == rank)
                sent = evidence[rank][size]["traffic"]["bytes"] / 3
                require(
                    sent == own * (size - 1),
                    f"with {size} ranks: rank {rank} sends {sent:.0f} bytes a step; it owns {own} bytes, and K-1 others need them",
                )

    parts = {"values": (2, judge_values), "bytes": (1, judge_bytes)}


@task("7.3", "bytes_per_rank")
class BytesPerRank:
    """Memory of a rank with Adam in float32, by what is sharded."""

    def draw(random, hidden):
        """Parameters, world sizes and ZeRO levels."""
        return {
            "cases": [(840 * random.randrange(10**3, 10**6), k, level) for k in (3, 5, 7) for level in range(4)]
            + [(840, 1, 2)]
        }

    def probe(bytes_per_rank, cases):
        """The answer in each case."""
        return [bytes_per_rank(*case) for case in cases]

    def judge_whole(evidence, cases):
        """4 bytes of weight, 4 of gradient, 8 of Adam's state, where nothing is sharded."""
        check_memory(evidence, cases, {0})

    def judge_sharded(evidence, cases):
        """Each divided by K from its level on."""
        check_memory(evidence, cases, {1, 2, 3})

    parts = {"unsharded": (1, judge_whole), "sharded": (1, judge_sharded)}


def check_memory(evidence, cases, levels):
    """The bytes a rank at these levels; what is wrong with them is told from all."""

    def results(weights=4, gradients=4, state=8, shift=0):
        made = []
        for parameters, size, level in cases:
            shares = [1 / size if level + shift > least else 1 for least in (2, 1, 0)]
            made.append(parameters * sum(b * s for b, s in zip((weights, gradients, state), shares, strict=True)))
        return made

    faults = {
        "Adam keeps two numbers a parameter: 8 bytes of state": results(state=4),
        "where are the gradients?": results(gradients=0),
        "where are the parameters themselves?": results(weights=0),
        "float32 has four bytes": results(1, 1, 2),
        "level 0 shards nothing, level 1 the optimizer's state": results(shift=1),
        "nothing is sharded": [16 * parameters for parameters, _, _ in cases],
        "everything is divided by K at every level": [16 * parameters / size for parameters, size, _ in cases],
        "where is the optimizer's state?": results(state=0),
    }
    about = [f"{parameters} parameters, {size} ranks, level {level}" for parameters, size, level in cases]
    expected = [float(one) for one in results()]
    for found, right, what, (*_, level) in zip(evidence, expected, about, cases, strict=True):
        number(found, float, f"{what}: the result")
        if level in levels and not close(found, right):
            compare_numbers(evidence, expected, about, faults, "bytes")
