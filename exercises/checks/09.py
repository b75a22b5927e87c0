"""Exercise 9: slices of a gated MLP, and all that tensor parallelism asks for.

The tasks are the functions around split layers, the mesh, a plan for a machine, a split sequence,
and a split vocabulary. A task's `draw`, `probe` and `read` are what `ddp_exercises.tasks.Task`
says.
"""

import math

import torch
import torch.distributed as dist

from ddp_course.stage4_ring import ring_all_reduce
from ddp_exercises.attempt import COLLECTIVES
from ddp_exercises.errors import Wrong
from ddp_exercises.tasks import task

from .shared import (
    as_it_is,
    form_of_explanation,
    in_words,
    nothing,
    require,
    several,
    tensors,
    worlds,
)


@task("9.1", "my_slices", {"sum": 2, "sizes": 1})
class MySlices:
    """Rows of both halves and the columns that belong to them, split evenly over the ranks."""

    def draw(random):
        shapes = [
            (8, 4, 2),
            (10, 5, 4),  # `chunk` would make 3, 3, 3 and 1 of these.
            (random.randrange(5, 20) * 2 + 1, 6, random.choice((2, 4))),
            (7, 3, 1),
            (11, 6, 4),  # Three are left over.
        ]
        generator = torch.Generator().manual_seed(random.randrange(2**31))
        how = {"generator": generator, "dtype": torch.float64}
        cases = []
        for hidden_width, width, ranks in shapes:
            gate_and_up = torch.randn(2 * hidden_width, width, **how)
            down = torch.randn(width, hidden_width, **how)
            x = torch.randn(3, width, **how)
            cases.append((gate_and_up, down, x, ranks))
        return {"cases": cases}

    def probe(my_slices, cases):
        for gate_and_up, down, x, ranks in cases:
            total = torch.zeros_like(x)
            sizes = []
            misfit = ""
            for rank in range(ranks):
                fused, back = my_slices(gate_and_up.clone(), down.clone(), rank, ranks)
                sizes.append(fused.numel() + back.numel())
                if not misfit:
                    misfit = fault_of_slices(rank, fused, back, gate_and_up, down)
                if len(fused) == 2 * back.shape[1]:
                    gate, up = (x @ fused.T).chunk(2, dim=-1)
                    total = total + (torch.nn.functional.silu(gate) * up) @ back.T
            case = f"H = {down.shape[1]}, {ranks} ranks: "
            yield "sum", case + "two rows for each column", misfit
            yield "sum", case + "the sum of all ranks' y", total
            yield "sizes", case + "numbers on each rank, most first", sorted(sizes, reverse=True)


def fault_of_slices(rank, fused, back, gate_and_up, down):
    """Return in words that a rank's rows and columns do not belong to the same units; else ""."""
    if len(fused) != 2 * back.shape[1]:
        return (
            f"rank {rank} has {len(fused)} rows for {back.shape[1]} columns of down; each column"
            " belongs to two rows: one of the gate's half and the same one of up's"
        )
    units_of_down = places_in(back.T, down.T)
    rows = places_in(fused, gate_and_up)
    units_of_gate = rows[: len(units_of_down)]
    units_of_up = []
    for row in rows[len(units_of_down) :]:
        units_of_up.append(None if row is None else row - down.shape[1])
    if units_of_gate == units_of_up == units_of_down:
        return ""
    if None in units_of_down or None in rows:
        return f"rank {rank} has rows or columns that are none of the whole matrices': slice, and change nothing"
    return (
        f"rank {rank} has the units {units_of_gate} of the gate, {units_of_up} of up (below zero: rows of the gate again), and"
        f" the columns {units_of_down} of down: they must be of the same units"
    )


def places_in(rows, whole):
    """Return where each row stands in a matrix; None if it is not there."""
    places = []
    for row in rows:
        place = None
        if row.shape == whole[0].shape:
            equal_rows = (whole == row).all(dim=1).nonzero()
            if len(equal_rows):
                place = int(equal_rows[0])
        places.append(place)
    return places


@task("9.2", ("Enter", "Leave"), {"Enter": 1, "Leave": 1})
class EnterAndLeave:
    """Enter does nothing forward and sums backward; Leave does the opposite."""

    def draw(random):
        generator = torch.Generator().manual_seed(random.randrange(2**31))
        return {
            "x": torch.randn(4, 5, generator=generator),
            "gradient": torch.randn(4, 5, generator=generator),
        }

    def probe(Enter, Leave, x, gradient):
        for function in (Enter, Leave):
            for base in function.__mro__:
                require(
                    not base.__module__.startswith("ddp_course."),
                    f"{function.__name__} is the course's own {base.__name__}: write it yourself",
                )
        yield from one_function("Enter", Enter, x, gradient)
        yield from one_function("Leave", Leave, x, gradient)


def one_function(name, function, x, gradient):
    """Yield evidence of what one of the two functions does with `x`, and with a gradient.

    Its all-reduce acts as if there were three ranks with the same numbers.
    """
    calls = 0

    def all_reduce(tensor):
        nonlocal calls
        calls += 1
        return tensor.mul_(3)

    given = x.clone().requires_grad_()
    inside = given * 1  # A leaf cannot be changed in place; this can, and it is to be seen.
    output = function.apply(inside, all_reduce)
    in_forward = calls
    incoming = gradient.clone()
    (of_x,) = torch.autograd.grad(output, given, incoming)
    yield name, f"{name}, forward: the output", output.detach()
    yield name, f"{name}, forward: all-reduces", in_forward
    yield name, f"{name}, backward: the gradient of x", of_x
    yield name, f"{name}, backward: all-reduces", calls - in_forward
    yield name, f"{name}, forward: x afterwards", inside.detach()
    yield name, f"{name}, backward: the gradient that came in, afterwards", incoming


class MadeGroup:
    """What `new_group` gives: its ranks, and in which of this rank's calls it was made."""

    def __init__(self, call, ranks):
        self.call = call
        self.ranks = ranks


@task("9.3", "make_mesh", {"groups": 2, "order": 2})
class MakeMesh:
    """All lines of the grid along each axis become groups, on all ranks in one order."""

    def draw(random):
        meshes = [
            {"data": 2, "tensor": 2},
            {"data": 3, "pipeline": 2, "tensor": 4},
            {"pipeline": 1, "tensor": 3},
            {axis: random.randrange(2, 4) for axis in ("data", "pipeline", "tensor")},
        ]
        return {"meshes": meshes}

    def probe(make_mesh, meshes):
        for sizes in meshes:
            about = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
            calls_by_rank = []
            groups_by_rank = []
            for rank in range(math.prod(sizes.values())):
                groups, made = groups_of_rank(make_mesh, rank, sizes, about)
                calls_by_rank.append([group.ranks for group in made])
                groups_by_rank.append(groups)
                for axis in sizes:
                    case = f'{about}, rank {rank}: the ranks of "{axis}"'
                    yield "groups", case, ranks_of(groups, axis, case)
            yield "", f"{about}: how many groups", [len(calls) for calls in calls_by_rank]
            yield "order", f"{about}: all ranks make the same groups", unequal_calls(calls_by_rank)
            yield "order", f"{about}: one group for all its ranks", twins(groups_by_rank)


def groups_of_rank(make_mesh, rank, sizes, about):
    """Return what `make_mesh` returns on a rank, and all groups that it makes, in their order."""
    made = []

    def new_group(ranks):
        group = MadeGroup(len(made), [int(rank) for rank in ranks])
        made.append(group)
        return group

    try:
        return make_mesh(rank, dict(sizes), new_group), made
    except KeyError as error:
        raise Wrong(
            f"{about}: KeyError: {error}: a mesh may have other axes: take their names,"
            " their number and their order from `sizes`"
        ) from error
    except (RuntimeError, ValueError) as error:
        if made:
            raise
        raise Wrong(
            f"{about}: {error}: `new_group` makes the groups, and which ones is for you to say"
        ) from error


def ranks_of(groups, axis, case):
    """Return the ranks of a rank's group along an axis."""
    require(
        isinstance(groups, dict) and axis in groups,
        f"{case}: a dict with a group for each axis was expected, also for an axis of size 1; each rank is"
        " in one line along each axis",
    )
    require(
        isinstance(groups[axis], MadeGroup),
        f"{case}: what new_group returned was expected, not {groups[axis]!r:.60}",
    )
    return groups[axis].ranks


def unequal_calls(calls_by_rank):
    """Return in words the first call of new_group that a rank makes differently from rank 0."""
    rule = "every rank makes every group, also those that it is not in, in the same order"
    for rank, calls in enumerate(calls_by_rank):
        for number, (first, other) in enumerate(zip(calls_by_rank[0], calls, strict=False)):
            if first != other:
                return f"call {number} of rank 0 is for {first}, of rank {rank} for {other}: {rule}"
        if len(calls) != len(calls_by_rank[0]):
            return f"rank 0 makes {len(calls_by_rank[0])} groups, rank {rank} {len(calls)}: {rule}"
    return ""


def twins(groups_by_rank):
    """Return in words two ranks whose groups have the same members but other calls; else ""."""
    first_of = {}  # {(axis, its ranks): (the first rank with such a group, the call that made it)}
    for rank, groups in enumerate(groups_by_rank):
        for axis, group in groups.items():
            members = (axis, tuple(group.ranks))
            first, call = first_of.setdefault(members, (rank, group.call))
            if call != group.call:
                return (
                    f'ranks {first} and {rank} have different groups of {group.ranks} as "{axis}",'
                    f" from the calls {call} and {group.call}: in neither of them does anybody"
                    " answer; make each group once"
                )
    return ""


# The best plans of the first two have 12 ranks to a layer, on two hosts, and three stages: no powers
# of two. In the third one every term of the table decides.
ODD_JOBS = [
    {
        "gpus": 24,
        "per_host": 6,
        "memory": 80e9,
        "parameters": 9.6e9,
        "activations": 480e9,
        "summed": 7.2e9,
        "compute": 122.4,
        "microbatches": 16,
        "fast": 300e9,
        "slow": 100e9,
    },
    {
        "gpus": 24,
        "per_host": 8,
        "memory": 80e9,
        "parameters": 36e9,
        "activations": 240e9,
        "summed": 72e9,
        "compute": 62.4,
        "microbatches": 16,
        "fast": 300e9,
        "slow": 50e9,
    },
    {
        "gpus": 48,
        "per_host": 8,
        "memory": 80e9,
        "parameters": 52.8e9,
        "activations": 960e9,
        "summed": 48e9,
        "compute": 129.6,
        "microbatches": 2,
        "fast": 300e9,
        "slow": 10e9,
    },
]


@task("9.4", "plan", {"fits": 1, "seconds": 3})
class Plan:
    """The shortest step of all plans that fit."""

    def draw(random):
        jobs = []
        for gpus in (8, 16, 32, 64, 64, 128):
            jobs.append(
                {
                    "gpus": gpus,
                    "per_host": 8,
                    "memory": 80e9,
                    "parameters": random.randrange(8, 20) / 10 * gpus * 1e9,
                    "activations": random.randrange(4, 10) * gpus * 1e9,
                    "summed": random.randrange(10, 40) * gpus * 1e9,
                    "compute": random.randrange(20, 60) * gpus / 10,
                    "microbatches": random.choice((8, 16, 32)),
                    "fast": 300e9,
                    "slow": random.choice((10e9, 25e9, 50e9)),
                }
            )
        return {"cases": [(job,) for job in [*jobs, *ODD_JOBS]]}

    def probe(plan, cases):
        for number, (job,) in enumerate(cases):
            try:
                yield "", number, plan(dict(job))
            except (TypeError, ValueError) as error:
                raise Wrong(
                    f"{job['gpus']} GPUs, {job['per_host']} in a host: {error}: is there no plan, if none of"
                    " your plans fits? T may be larger than a host, and D, T and P are any divisors"
                ) from error

    def read(returned, cases):
        for (job,), plan in zip(cases, returned, strict=True):
            about = f"{job['gpus']} GPUs, {job['parameters'] / 1e9:.0f} billion parameters: "
            data, tensor, pipeline = several(plan, 3, f"{about}return (data, tensor, pipeline)")
            require(
                data * tensor * pipeline == job["gpus"] and min(data, tensor, pipeline) > 0,
                f"{about}{data} x {tensor} x {pipeline} is not {job['gpus']}",
            )
            needed = 16 * job["parameters"] / (tensor * pipeline)
            needed += job["activations"] / (data * tensor)
            too_large = ""
            if needed > job["memory"]:
                too_large = f"it needs {needed / 1e9:.0f} GB"
            yield "fits", f"{about}the plan fits into {job['memory'] / 1e9:.0f} GB", too_large
            seconds = seconds_of_step(job, data, tensor, pipeline)
            yield "seconds", f"{about}seconds of a step", round(seconds, 6)


def seconds_of_step(job, data, tensor, pipeline):
    """Return the table of 9.4: computing with its bubble, sums of layers, and of gradients."""
    seconds = job["compute"] / job["gpus"] * (1 + (pipeline - 1) / job["microbatches"])
    link = job["fast"] if tensor <= job["per_host"] else job["slow"]
    seconds += 2 * (tensor - 1) / tensor * job["summed"] / (data * pipeline) / link
    link = job["fast"] if job["gpus"] <= job["per_host"] else job["slow"]
    gradient_bytes = 4 * job["parameters"] / (tensor * pipeline)
    return seconds + 2 * (data - 1) / data * gradient_bytes / link


class CountedCollectives:
    """An allgather and a reduce-scatter along the first dimension, which count their calls.

    Both are made of an all-reduce.
    """

    def __init__(self, group, size):
        self.group = group
        self.size = size
        self.calls = {"allgathers": 0, "reduce-scatters": 0}

    def sum_over_ranks(self, tensor):
        total = tensor.detach().clone().contiguous()
        ring_all_reduce(total, self.group)
        return total

    def allgather(self, tensor):
        self.calls["allgathers"] += 1
        whole = torch.zeros(self.size * len(tensor), *tensor.shape[1:], dtype=tensor.dtype)
        start = dist.get_rank() * len(tensor)
        whole[start : start + len(tensor)] = tensor.detach()
        return self.sum_over_ranks(whole)

    def reduce_scatter(self, tensor):
        require(
            len(tensor) % self.size == 0,
            f"reduce_scatter got {len(tensor)} rows, which {self.size} ranks cannot share: it is for"
            " the whole sequence, and a part of it is for allgather",
        )
        self.calls["reduce-scatters"] += 1
        return self.sum_over_ranks(tensor).chunk(self.size)[dist.get_rank()].clone()


@task(
    "9.5",
    ("Gather", "Scatter"),
    {"forward": 1, "backward": 2, "calls": 1},
    ranks=3,
    forbidden=COLLECTIVES,
    every_order="forward",
    hang="does each rank make the same calls, in both passes?",
)
class SequenceParallel:
    """Gather is an allgather forward and a reduce-scatter backward; Scatter the other way round."""

    def draw(random):
        return {
            "x": tensors(random, 3, 2, 4, dtype=torch.float64),
            "first": tensors(random, 3, 5, 4, dtype=torch.float64),
            "second": tensors(random, 3, 4, 5, dtype=torch.float64),
            "slopes": tensors(random, 3, 2, 4, dtype=torch.float64),
        }

    def probe(Gather, Scatter, x, first, second, slopes):
        rank = dist.get_rank()
        for size, group in worlds(3, 2):
            collectives = CountedCollectives(group, size)
            both = (collectives.allgather, collectives.reduce_scatter)
            own = {
                "x": x[rank].clone().requires_grad_(),
                "first": first[rank].clone().requires_grad_(),
                "second": second[rank].clone().requires_grad_(),
            }
            inside = (Gather.apply(own["x"], *both) @ own["first"].T).tanh()
            output = Scatter.apply(inside @ own["second"].T, *both)
            about = f"with {size} ranks"
            yield "forward", f"{about}, this rank's part of the output", output.detach()
            yield "calls", f"{about}, calls in the forward pass", dict(collectives.calls)
            try:
                (output * slopes[rank]).sum().backward()
            except RuntimeError as error:
                if "incorrect number of gradients" in str(error):
                    raise Wrong(
                        f"{about}: {error}: backward returns one for each argument of forward, None"
                        " for the two functions"
                    ) from error
                if "invalid gradient" in str(error):
                    raise Wrong(
                        f"{about}: {error}: what forward makes longer or shorter, backward makes as"
                        " long as it was: each pass has one of the two calls"
                    ) from error
                raise
            for name, tensor in own.items():
                yield "backward", f"{about}, the gradient of {name}", tensor.grad
            yield "calls", f"{about}, calls in both passes", dict(collectives.calls)


class CountedSums:
    """The largest and the sum over the ranks, and how many numbers went into both."""

    def __init__(self, group, size):
        self.group = group
        self.size = size
        self.numbers = 0

    def all_sum(self, tensor):
        self.numbers += tensor.numel()
        total = tensor.detach().clone().contiguous()
        ring_all_reduce(total, self.group)
        return total

    def all_max(self, tensor):
        self.numbers += tensor.numel()
        rows = torch.zeros(self.size, *tensor.shape, dtype=tensor.dtype)
        rows[dist.get_rank()] = tensor.detach()
        ring_all_reduce(rows, self.group)
        return rows.amax(0)


WORDS = 11  # The vocabulary of 9.6 has so many words, and its text so many tokens.
TOKENS = 7
UNEQUAL = (
    "the ranks' tensors differ in shape, or a rank makes another call: a rank may have fewer columns"
    " than another, so take the largest, or the sum, of its own columns first, and give all_max or all_sum"
    " one number per token"
)


@task(
    "9.6",
    "SplitLoss",
    {"loss": 2, "gradient": 2, "numbers sent": 1},
    ranks=4,
    forbidden=COLLECTIVES,
    hang="does each rank make the same calls, also a rank whose columns have no target?",
)
class LossOfSplitVocabulary:
    """Torch's cross entropy of the whole logits and its gradient, from three numbers per token."""

    def draw(random):
        (logits,) = tensors(random, 1, TOKENS, WORDS, dtype=torch.float64)
        # Exponentials of such numbers overflow, or are all 0, unless each token's own largest
        # logit is subtracted.
        logits += torch.tensor([2000.0, -2000, 0, 0, 900, -900, 0], dtype=torch.float64)[:, None]
        # Rank 1 of four has none of these words.
        targets = [0, WORDS - 1, -100, random.choice((1, 2)), 9, -100, random.choice((0, 10))]
        return {"logits": logits, "targets": targets, "slope": random.randrange(2, 9)}

    def probe(SplitLoss, logits, targets, slope):
        targets = torch.tensor(targets)
        for size, group in worlds(4, 3, 2, 1):
            sums = CountedSums(group, size)
            words = torch.arange(WORDS).tensor_split(size)[dist.get_rank()]
            own = logits[:, words].clone().requires_grad_()
            inside = own * 1  # A leaf cannot be changed in place; this can, and it is to be seen.
            first = int(words[0])
            about = f"with {size} ranks" if size > 1 else "on one rank"
            try:
                with in_words({"all ranks must call the same collective": UNEQUAL}):
                    loss = SplitLoss.apply(
                        inside, targets.clone(), first, sums.all_max, sums.all_sum
                    )
            except IndexError as error:
                raise Wrong(
                    f"{about}: {error}: a target may be in another rank's columns"
                ) from error
            yield "loss", f"{about}, the loss is a number", overflow(loss)
            yield "loss", f"{about}, the loss", loss.detach()
            yield "loss", f"{about}, the logits afterwards", inside.detach()
            (loss * slope).backward()
            yield "gradient", f"{about}, the gradient has numbers", overflow(own.grad)
            yield "gradient", f"{about}, the gradient of this rank's logits", own.grad
            yield "numbers sent", f"{about}, numbers in both passes", too_many(sums.numbers)


def overflow(tensor):
    """Return in words why there are infinite numbers in a tensor, or things that are none."""
    if tensor.isfinite().all():
        return ""
    return (
        "exponentials of large logits overflow, or those of small ones are all 0, unless each"
        " token's own largest logit is subtracted, the largest on all ranks"
    )


def too_many(numbers):
    """Return in words that too many numbers were summed or compared; "" if not.

    Two more than three per token are allowed, for what all tokens share.
    """
    if numbers <= 3 * TOKENS + 2:
        return ""
    return (
        f"{numbers} numbers of {TOKENS} tokens were summed or compared: three per token are enough, the"
        " largest logit, the sum of exponentials and the target's logit"
    )


@task("9.7", "explain_figure", {"text": 1, "ticks": 1})
class ExplainFigure:
    """A figure in the learner's own words, and which points the learner ticks; a teacher reads it."""

    draw = nothing
    probe = as_it_is
    read = form_of_explanation
