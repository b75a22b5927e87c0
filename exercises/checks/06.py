"""Exercise 6: what a real DDP needs: no_sync, unused parameters, buffers, a hook that compresses,
real scripts, a reducer, and replicas that part.

A task's `draw`, `probe` and `read` are what `ddp_exercises.tasks.Task` says.
"""

import copy
import os
import tempfile
from contextlib import ExitStack
from itertools import chain, pairwise
from operator import itemgetter
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from ddp_course import wire
from ddp_course.stage4_ring import reduce_scatter, ring_all_reduce, whole_gradient_ring
from ddp_course.stage6_ddp import DistributedDataParallel
from ddp_exercises.attempt import COLLECTIVES
from ddp_exercises.errors import Wrong
from ddp_exercises.tasks import load_tasks, task
from manyranks.errors import MismatchError
from manyranks.torch_inside import around

from .shared import (
    LAST_THREE,
    NO_TENSOR,
    NOTHING_RETURNED,
    RING,
    SERVER,
    addresses,
    as_it_is,
    copied_gradient,
    fault_of_group,
    form_of_explanation,
    in_words,
    noted_messages,
    noted_ring,
    nothing,
    require,
    require_written,
    tensors,
    unequal_lengths,
    worlds,
)

BRACKETS = "no_sync is a function that returns a context: with parallel.no_sync():, with brackets"
# Before Python 3.11 a missing context says __enter__.
NO_BRACKETS = {"context manager protocol": BRACKETS, "__enter__": BRACKETS}
SHUFFLED_TWICE = {
    "mutually exclusive with shuffle": "a DataLoader with a sampler is told no shuffle: DistributedSampler"
    " shuffles by itself, anew for each set_epoch"
}
SYNCHRONISE = "do all ranks synchronise in the same micro-batch?"
ONE = load_tasks(1)  # Exercise 1 has a little net.
FOUR = load_tasks(4)  # Exercise 4 has a ring under torch's class.


@task(
    "6.1",
    "accumulate",
    {"bytes": 1, "weights": 1.5, "memory": 0.5},
    ranks=4,
    bound=1e-9,
    hang=SYNCHRONISE,
)
class AccumulateUnsynchronised:
    """Several micro-batches in room for one, one synchronisation, and the weights of one step on all
    samples of all ranks.
    """

    def draw(random):
        count = random.randrange(4, 6)
        return {
            "seed": random.randrange(10**6),
            "batches": [ONE.batches_of(random, count, ONE.SAMPLES) for _ in range(4)],
        }

    def probe(accumulate, seed, batches):
        for size, group in worlds(2, 4):
            # Two ranks have a micro-batch less, so no fixed number is theirs in both worlds.
            count = len(batches[0])
            if size == 2:
                count -= 1
            of_ranks = [of_rank[:count] for of_rank in batches[:size]]
            mine = of_ranks[dist.get_rank()]
            model, optimizer = ONE.small_model(seed)
            all_reduce, sums = noted_ring(group)
            parallel = DistributedDataParallel(model, process_group=group, all_reduce=all_reduce)
            # In a first pass DDP sends more than in all others: that is not the answer's doing.
            inputs, targets = mine[0]
            nn.functional.cross_entropy(parallel(inputs), targets).backward()
            sums.clear()
            forward_passes = forward_passes_of(parallel)
            before = ONE.weights(model)
            goal = ONE.after_one_step(model, list(chain.from_iterable(of_ranks)))
            with ONE.RoomForOne(model, len(inputs)) as room, in_words(NO_BRACKETS):
                accumulate(parallel, optimizer, mine)
            about = f"with {size} ranks"
            wrong_size = ONE.size_of_update(before, ONE.weights(model), goal)
            yield "bytes", f"{about}, synchronisations for {len(mine)} micro-batches", len(sums)
            yield "weights", f"{about}, one step", wrong_size
            yield "weights", f"{about}, the weights after one step", ONE.weights(model)
            yield "memory", f"{about}, what is kept", room.fault()
            yield "the wrapper", f"{about}, its forward passes", len(forward_passes)


def forward_passes_of(module):
    """Return a list that gets one more item, the arguments, in each forward pass of a module."""
    passes = []

    def note(_, arguments):
        passes.append(arguments)

    module.register_forward_pre_hook(note)
    return passes


@task(
    "6.2",
    "used_anywhere",
    {"union": 1, "one all-reduce": 1},
    ranks=4,
    forbidden=COLLECTIVES,
)
class UsedAnywhere:
    """Which parameters were used on some rank: bools, by one all-reduce, and the input
    unchanged.
    """

    def draw(random):
        columns = [  # Each is a parameter: whether each of four ranks used it.
            (0, 0, 0, 0),
            (1, 1, 1, 1),
            (1, 0, 0, 0),
            (0, 0, 0, 1),
            (0, 1, 1, 0),
            (0, 1, 0, 0),
        ]
        for _ in range(305):
            columns.append([random.randrange(2) for _ in range(4)])
        return {"used": list(torch.tensor(columns, dtype=torch.bool).T.contiguous())}

    def probe(used_anywhere, used):
        for size, group in worlds(4, 3, 2):
            mine = used[dist.get_rank()].clone()
            all_reduce, calls = noted_ring(group)
            with in_words(NOTHING_RETURNED):
                result = used_anywhere(mine, all_reduce)
            about = f"with {size} ranks"
            dtypes = [dtype for dtype, _ in calls]
            yield "union", f"{about}, whether bools are added up", "bool" in dtypes
            yield "union", about, result
            unchanged = mine.equal(used[dist.get_rank()])
            yield "one all-reduce", f"{about}, whether the input is as it was", unchanged
            yield "one all-reduce", f"{about}, all-reduces", len(calls)


def model_with_buffers(seed, rank):
    """Return a model with buffers of several dtypes; they and its parameters differ from rank to
    rank.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
        model.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        model.register_buffer("mask", torch.zeros(5), persistent=False)
    for index, buffer in enumerate(model.buffers()):
        buffer.add_(10 * (rank + 1) + index)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += rank
    return model


NUMBERS = (
    "in a group of ranks 1, 2 and 3 of the job, `src` is a number within the group, from 0 on, as in"
    " dist.get_rank(group): wire.send and wire.recv take the job's, wire.global_rank(src, group)"
)


@task(
    "6.3",
    "share_buffers",
    {"buffers": 1, "bytes": 1},
    ranks=4,
    forbidden=(*SERVER, *RING, *COLLECTIVES, "ddp_course.stage6_ddp.buffers.broadcast_tensors"),
    hang="does every receive have its send, and every send its receive, on all ranks? "
    + NUMBERS[0].upper()
    + NUMBERS[1:],
)
class ShareBuffers:
    """Every rank gets rank src's buffers, in place; parameters stay, and (K-1) times the bytes
    leave the source.
    """

    def draw(random):
        return {
            "seed": random.randrange(10**6),
            "sources": {3: 2, 4: random.randrange(1, 4), 2: 0, 1: 0, LAST_THREE: 1},
        }

    def probe(share_buffers, seed, sources):
        for world, source in sources.items():
            for size, group in worlds(world):
                yield from ShareBuffers.in_group(share_buffers, seed, size, group, source)

    def in_group(share_buffers, seed, size, group, source):
        """Yield what an answer does in one group, whose first rank may not be the job's."""
        model = model_with_buffers(seed, dist.get_rank())
        before = addresses(model.buffers())
        about = f"with {size} ranks, source {source}"
        causes = NO_TENSOR
        if dist.get_global_rank(group, 0) > 0:
            about = f"with ranks 1 to {size} as a group, source {source}"
            causes = {"": NUMBERS}  # Whatever fails here has not failed in the other groups.
        with noted_messages(group) as (events, astray), in_words(causes):
            share_buffers(model, source, group)
        for index, buffer in enumerate(model.buffers()):
            dtype = str(buffer.dtype).removeprefix("torch.")
            yield "buffers", f"{about}, buffer {index} ({dtype})", buffer
        yield "buffers", f"{about}, the parameters", ONE.weights(model)
        in_place = before == addresses(model.buffers())
        yield "buffers", f"{about}, whether buffers are the tensors that they were", in_place
        sent = sum(event.bytes for event in events if event.kind == "send")
        yield "bytes", f"{about}, bytes sent", sent
        yield "bytes", f"{about}, lengths of messages", unequal_lengths(events, group)
        yield "bytes", f"{about}, their group", fault_of_group(astray)


LARGE = 6  # A gradient of 6.4 begins with so many large numbers.


@task(
    "6.4",
    "compressed_average",
    {"sent in half": 1, "mean": 1},
    ranks=4,
    bound=4e-3,
    forbidden=COLLECTIVES,
)
class CompressedAverage:
    """A communication hook that sends half the bytes: reduced once, in float16, and the mean in
    float32.
    """

    def draw(random):
        values = [tensor * 100 for tensor in tensors(random, 4, 40)]
        for tensor in values:
            # A float16 holds each of these, but not their sum: it ends at 65,504.
            tensor[:LARGE] = torch.tensor([random.uniform(40_000, 64_000) for _ in range(LARGE)])
        return {"values": values}

    def probe(compressed_average, values):
        for size, group in worlds(3, 4, 2):
            flat = values[dist.get_rank()].clone()
            all_reduce, calls = noted_ring(group)
            with in_words(NOTHING_RETURNED):
                mean = compressed_average(flat, all_reduce, size)
            about = f"with {size} ranks"
            dtypes = [dtype for dtype, _ in calls]
            yield "sent in half", f"{about}, all_reduce was called with", dtypes
            numbers = sum(count for _, count in calls)
            left_out = ""
            if calls and numbers < len(flat):
                left_out = f"{numbers} of {len(flat)} numbers travel: hand over the whole gradient"
            yield "mean", f"{about}, what is averaged", left_out
            yield "mean", f"{about}, the mean", mean
            # Beside the large numbers the bound would hide any fault of the others.
            small = mean[LARGE:] if isinstance(mean, torch.Tensor) else None
            yield "mean", f"{about}, the mean of the small numbers", small
            was = values[dist.get_rank()]
            yield "mean", f"{about}, `flat` afterwards", fault_of_input(flat, was, mean)


def fault_of_input(flat, was, mean):
    """Return in words that a gradient is neither what it `was` nor the `mean`; else ""."""
    if flat.equal(was) or mean is flat:
        return ""
    if isinstance(mean, torch.Tensor) and flat.equal(mean):
        return ""
    return (
        "it holds neither the gradient nor the mean: compress a copy, such as flat / world_size, and"
        " leave `flat` as it is"
    )


@task(
    "6.5",
    "main",
    {"shares": 1, "epochs": 1, "weights": 1, "one writer": 1, "names": 1},
    ranks=4,
    hang="do all ranks take equally many steps?",
    seconds=10,
)
class RealScript:
    """Five usual mistakes of a script, mended; any order and any way to share the samples will do."""

    def draw(random):
        samples = 38
        (inputs,) = tensors(random, 1, samples, 3)
        return {
            "seed": random.randrange(10**6),
            "inputs": inputs,
            "targets": torch.arange(samples) % 3,
        }

    def probe(main, seed, inputs, targets):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        seen, uncleared = watch_training(model, inputs)
        before = ONE.weights(model)
        data = torch.utils.data.TensorDataset(inputs, targets)
        torch.manual_seed(seed + dist.get_rank())  # Ranks shuffle differently, as processes do.
        through_wrapper = []

        def wrap(module, *args, **kwargs):
            parallel = nn.parallel.DistributedDataParallel(module, *args, **kwargs)
            through_wrapper.append(forward_passes_of(parallel))
            return parallel

        with tempfile.TemporaryDirectory() as folder:
            no_module = 'the checkpoint\'s "model" is its state_dict(), no module'
            with in_words({"pickle": no_module, **SHUFFLED_TWICE}):
                main(folder, wrap, model, data, 2)
            files = sorted(os.listdir(folder))
            state = torch.load(os.path.join(folder, files[0])) if files else {}
        after = ONE.weights(model)
        yield from shares_and_epochs(seen)
        pile_up = ""
        if any(uncleared):
            pile_up = "the gradients of the step before are still there: is there a zero_grad()?"
        yield "weights", "when a backward pass begins", pile_up
        yield "weights", "whether training changes the weights", not after.equal(before)
        of_ranks = gathered(after)
        alike = all(of_rank.allclose(after) for of_rank in of_ranks)
        yield "weights", "whether all ranks have the same weights at the end", alike
        by_hand = ""
        if alike and not any(through_wrapper):
            by_hand = (
                "no forward pass goes through what `wrap` returned: it averages while backward runs, and"
                " by hand nothing is hidden"
            )
        yield "weights", "who averages the gradients", by_hand
        yield "one writer", "the files that a rank leaves", files
        if dist.get_rank() == 0:
            yield from what_a_checkpoint_holds(state, after)


def watch_training(model, samples):
    """Return two lists that grow when the model is trained: the numbers of the samples that it
    sees, and for each backward pass whether gradients of another one were still there.
    """
    seen = []
    uncleared = []

    def note_samples(_, arguments):
        (batch,) = arguments
        if torch.is_grad_enabled():
            seen.extend(torch.cdist(batch, samples).argmin(dim=1).tolist())

    def look_at_gradients(_):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        uncleared.append(any(gradient.any() for gradient in gradients))

    def before_backward(_, arguments, outputs):
        if outputs.requires_grad:
            outputs.register_hook(look_at_gradients)

    model.register_forward_pre_hook(note_samples)
    model.register_forward_hook(before_backward)
    return seen, uncleared


def gathered(thing):
    """Return what all ranks have, in a list."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, thing)
    return of_ranks


def shares_and_epochs(seen):
    """Yield evidence of how the ranks share the samples of two epochs, from the numbers of those
    that this rank has seen.
    """
    first = seen[: len(seen) // 2]
    second = seen[len(seen) // 2 :]
    by_any_rank = set(chain.from_iterable(gathered(first)))
    yield "shares", "samples that a rank sees in the first epoch", len(set(first))
    yield "shares", "samples that some rank sees in it", len(by_any_rank)
    yield "epochs", "whether the second epoch has another order", first != second
    yield "epochs", "samples that a rank sees in the second epoch", len(second)


def what_a_checkpoint_holds(state, weights):
    """Yield evidence of a checkpoint: its names, and whether it has the `weights` after
    training.
    """
    state = state if isinstance(state, dict) else {}
    saved = dict(state.get("model", {}))
    yield "names", 'tensors in the checkpoint\'s "model"', sorted(map(str, saved))
    yield "names", 'whether the checkpoint has an "epoch"', "epoch" in state
    too_early = ""
    all_there = len(saved) == 4  # The model has two layers with a weight and a bias each.
    if all_there and not torch.cat([t.reshape(-1) for t in saved.values()]).equal(weights):
        too_early = "these are not the weights after the last epoch: save when it is over"
    yield "names", 'the values in the checkpoint\'s "model"', too_early


USUAL = {
    "sampler": "the ranks saw the same samples",
    "epoch": "both epochs have the same order",
    "wrapper": "the weights differ from rank to rank",
    "writers": "more than one rank wrote a checkpoint",
    "names": 'names begin with "module."',
}


def symptoms(random, mistakes, size, alone=False):
    """What is known after a run with these mistakes: samples, weights, saved.

    One rank has the checkpoint, and its weights differ; where two ranks write, rank 0 is the other.
    With `alone`, of five ranks, this one alone has the same order in both epochs, and only it and
    rank 1 see the same samples. It is neither the first rank nor the last, nor a neighbour of rank 1.
    """
    odd = 3 if alone else 1
    of_all_ranks = samples_of_one if alone else samples_of_all
    samples = of_all_ranks(random, mistakes, size)
    sums = [random.uniform(-3, 3)] * size
    if "wrapper" in mistakes:
        sums[odd] += 0.01
    prefix = "module." if "names" in mistakes else ""
    names = [prefix + name for name in ("0.weight", "0.bias", "submodule.weight")]
    writers = (0, odd) if "writers" in mistakes else (odd,)
    saved = [[] for _ in range(size)]
    for writer in writers:
        saved[writer] = names
    return samples, sums, saved


def orders_of_epochs(random, size):
    """Return the order of all samples in each of two epochs. A share has more samples than there are
    ranks, and the last one is filled up with the first sample.
    """
    count = size * (size + 7) - 1
    orders = [random.sample(range(count), count) for _ in range(2)]
    return [order + order[:1] for order in orders]


def samples_of_all(random, mistakes, size):
    """The samples of each rank in two epochs; all ranks make the same mistakes. Ranks that all see
    all samples shuffle them differently.
    """
    first, second = orders_of_epochs(random, size)
    if "epoch" in mistakes:
        second = first
    samples = []
    for rank in range(size):
        places = range(rank, len(first), size)
        if "sampler" in mistakes:
            places = random.sample(range(len(first) - 1), len(first) - 1)
        of_places = itemgetter(*places)
        samples.append([list(of_places(first)), list(of_places(second))])
    return samples


def samples_of_one(random, mistakes, size):
    """The samples of each rank in two epochs; rank 3 alone makes the mistakes. Each rank keeps its
    share, in another order.
    """
    order, _ = orders_of_epochs(random, size)
    samples = []
    for rank in range(size):
        start = rank
        if rank == 3 and "sampler" in mistakes:
            start = 1
        share = order[start::size]
        epochs = [random.sample(share, len(share)) for _ in range(2)]
        if rank == 3 and "epoch" in mistakes:
            epochs[1] = epochs[0]
        samples.append(epochs)
    return samples


@task("6.6", "mistakes", {"samples": 1, "weights and files": 1})
class FromSymptoms:
    """Which of the five mistakes a run has made, from what it leaves."""

    def draw(random):
        runs = [({mistake}, 3) for mistake in USUAL]  # Each has its mistakes, and its ranks.
        combinations = [set(), set(USUAL), {"sampler", "epoch"}]
        for _ in range(3):
            combinations.append(set(random.sample(list(USUAL), random.randrange(2, 5))))
        for mistakes in combinations:
            runs.append((mistakes, random.choice((2, 3, 8))))
        left_behind = [symptoms(random, mistakes, size) for mistakes, size in runs]
        # Here the mistake is of one rank alone.
        for mistake in USUAL:
            left_behind.append(symptoms(random, {mistake}, 5, alone=True))
        random.shuffle(left_behind)
        return {"runs": left_behind}

    def probe(mistakes, runs):
        for number, (samples, sums, saved) in enumerate(runs, 1):
            words = mistakes(samples, sums, saved)
            is_collection = isinstance(words, set | frozenset | list | tuple)
            require(is_collection, f"a set of words was expected, not {type(words).__name__}")
            unknown = sorted(set(map(str, words)) - set(USUAL))
            require(not unknown, f"{unknown[:1]} is none of {', '.join(USUAL)}")
            for word, symptom in USUAL.items():
                part = "samples" if word in ("sampler", "epoch") else "weights and files"
                named = "named" if word in words else "not named"
                yield part, f'run {number}, on {len(samples)} ranks: "{word}" ({symptom})', named


NO_BUCKET = -1  # This is the number of a sum that is none of a bucket.


def numbers_by_length(buckets):
    """Return {numbers in a message: the number of its bucket}. Each bucket has a length of its
    own, and for each parameter one number more may travel with it, which says who used it.
    """
    number_of = {}
    for number, bucket in enumerate(buckets):
        length = sum(parameter.numel() for parameter in bucket)
        number_of[length] = number
        number_of[length + len(bucket)] = number
    return number_of


class Branches(nn.Module):
    """A trunk and four branches of one size; a pass uses some of them, in an order that differs
    from rank to rank.
    """

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(
            nn.Linear(inputs, 4, bias=False).double() for inputs in (3, 4, 4, 4, 4)
        )

    def forward(self, x, order, silent):
        """(N, 3) to (N, 4); `order` are numbers of branches, of which the last one's gradient is
        ready first. The branch `silent` is used, but adds only zeros; with 0 none is silent.
        """
        x = self.layers[0](x).tanh()
        for number in order:
            branch = self.layers[number](x).tanh()
            if number == silent:
                branch = 0 * branch
            x = branch + x
        return x


def in_one_order(tensor, group):
    """Sum a tensor on the ring; say what it means if another rank sums another one."""
    try:
        ring_all_reduce(tensor, group)
    except MismatchError as error:
        raise Wrong(
            "the ranks do not start the same sums in the same order: a bucket that is full waits"
            " until the one before it has left"
        ) from error


# The branches that even ranks use, in their order, and those that odd ranks use.
PASSES = {
    "pass 1, all branches used": ([1, 2, 3, 4], [4, 3, 2, 1]),
    "pass 2, branch 1 used by even ranks, 2 by odd ones, 4 by nobody": ([1, 3], [3, 2]),
    "pass 3, branch 4 used by even ranks only": ([1, 2, 3, 4], [3, 2, 1]),
    "pass 4, all used again, branch 2 with a gradient of zeros": ([4, 3, 2, 1], [1, 2, 3, 4]),
}


def of_five(Reducer):
    """Return the gradient of a weight after a reducer of five ranks, of which the others have
    zeros.
    """
    layer = nn.Linear(3, 1, bias=False)
    reducer = Reducer([[layer.weight]], lambda tensor: lambda: None, 5)
    layer(torch.ones(1, 3)).sum().backward()
    with in_words(NOTHING_RETURNED):
        reducer.finish()
    return copied_gradient(layer.weight)


@task(
    "6.7",
    "Reducer",
    {"mean": 2, "unused": 1, "order": 1},
    ranks=3,
    hang="do all ranks start the same sums, also of buckets that were not used there? After backward"
    " what is missing counts as ready",
)
class AReducer:
    """Buckets leave in order while backward runs; a parameter that is not ready at its end was not
    used.
    """

    def draw(random):
        inputs = [tensors(random, 4, 4, 3, dtype=torch.float64) for _ in range(3)]
        return {"seed": random.randrange(10**6), "inputs": inputs}

    def probe(Reducer, seed, inputs):
        ((size, group),) = worlds(3)
        require_written(Reducer.ready, Reducer.finish)
        rank = dist.get_rank()
        model = Branches(seed)
        weights = [layer.weight for layer in model.layers]
        buckets = [[weights[4]], [weights[3], weights[2], weights[1]], [weights[0]]]
        number_of = numbers_by_length(buckets)
        started = []  # Each is the number of a bucket.
        there = []  # These gradients have come in this pass.
        there_at_start = []  # So many had come when each sum started.
        waits = 0
        for weight in weights:
            weight.register_post_accumulate_grad_hook(there.append)

        def start(tensor):
            started.append(number_of.get(tensor.numel(), NO_BUCKET))
            there_at_start.append(len(there))

            def wait():
                nonlocal waits
                waits += 1
                in_one_order(tensor, group)

            return wait

        yield (
            "mean",
            "if world_size is 5, and the other ranks have nothing to add",
            of_five(Reducer),
        )
        reducer = Reducer(buckets, start, size)
        for (about, orders), x in zip(PASSES.items(), inputs[rank], strict=True):
            started.clear()
            there.clear()
            there_at_start.clear()
            waits = 0
            model.zero_grad()
            silent = 2 if "zeros" in about else 0
            model(x, orders[rank % 2], silent).square().sum().backward()
            yield "order", f"{about}, sums that are started in backward", list(started)
            case = f"{about}, gradients that have come when each of these sums starts"
            yield "order", case, list(there_at_start)
            yield "order", f"{about}, waits in backward", waits
            reducer.finish()
            leaving = sorted(number for number in started if number != NO_BUCKET)
            yield "order", f"{about}, the same buckets leave", leaving
            by_rank = gathered(list(started))
            unlike = ""
            if any(of_rank != started for of_rank in by_rank):
                unlike = (
                    "the ranks start sums in different orders (bucket, or -1 for something else):"
                    f" {by_rank}; rank by rank the same was expected"
                )
            yield "order", f"{about}, all sums", unlike
            part = "unused" if "nobody" in about else "mean"
            for index, weight in enumerate(weights):
                yield part, f"{about}, gradient {index}", copied_gradient(weight)


@task(
    "6.8",
    "mended_training",
    {"group": 1, "device": 1, "shares": 1, "epochs": 0.5, "gradients": 1},
    ranks=4,
    hang="do all ranks take equally many steps?",
    seconds=10,
)
class PublishedScript:
    """A blog post's script, mended: each process has its own rank, device and samples."""

    def draw(random):
        samples = 38
        inputs, targets = tensors(random, 2, samples, 3)
        return {"seed": random.randrange(10**6), "inputs": inputs, "targets": targets}

    def probe(mended_training, seed, inputs, targets):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        seen, uncleared = watch_training(model, inputs)
        before = ONE.weights(model)
        torch.manual_seed(seed + dist.get_rank())  # Ranks shuffle differently, as processes do.
        data = torch.utils.data.TensorDataset(inputs, targets)
        joined = []
        placed = []
        on_device = []  # It gets an item when a gradient comes to a tensor that was placed.
        passes = noted_passes(model, inputs)
        through_wrapper = []

        def place(thing, number):
            placed.append((isinstance(thing, nn.Module), number))
            if isinstance(thing, nn.Module):
                return thing
            # As `.to` does, this makes another tensor.
            moved_tensor = thing.clone().requires_grad_() * 1
            moved_tensor.register_hook(on_device.append)
            return moved_tensor

        def wrap(module, *args, **kwargs):
            parallel = nn.parallel.DistributedDataParallel(module, *args, **kwargs)
            through_wrapper.append(forward_passes_of(parallel))
            return parallel

        with as_torchrun_starts_it(joined), in_words(SHUFFLED_TWICE):
            mended_training(place, wrap, model, data, 2)
        after = ONE.weights(model)
        require(joined, "no process group was made: dist.init_process_group is missing")
        for name, value in joined[0].items():
            yield "group", name, value
        models = [number for is_model, number in placed if is_model]
        yield "device", "the devices that get the model", models
        yield "device", "the devices that this rank uses", sorted({number for _, number in placed})
        left_behind = 2 * len(uncleared) - len(on_device)
        yield "device", "what a loss is computed from", fault_of_device(left_behind)
        yield from shares_and_epochs(seen)
        pile_up = ""
        if any(uncleared):
            pile_up = "the gradients of the step before are still there: is there a zero_grad()?"
        yield "gradients", "when a backward pass begins", pile_up
        yield "gradients", "whether training changes the weights", not after.equal(before)
        alike = all(of_rank.allclose(after) for of_rank in gathered(after))
        yield "gradients", "whether all ranks have the same weights at the end", alike
        yield "gradients", "whether forward passes go through the wrapper", any(through_wrapper)
        largest = max((len(numbers) for _, numbers in passes), default=0)
        yield "gradients", "samples in the largest batch", largest
        if alike and any(through_wrapper) and not pile_up:
            fault = fault_of_steps(model, passes, after, inputs, targets)
            yield "gradients", "the steps", fault


def noted_passes(model, samples):
    """Return a list that gets, in each forward pass of a model in training, its weights and the
    numbers of the samples that it sees.
    """
    passes = []

    def note(_, arguments):
        (batch,) = arguments
        if torch.is_grad_enabled():
            numbers = torch.cdist(batch, samples).argmin(dim=1)
            passes.append((ONE.weights(model).clone(), numbers.tolist()))

    model.register_forward_pre_hook(note)
    return passes


def fault_of_device(left_behind):
    """Return in words that so many tensors of losses were not on this device; else ""."""
    if left_behind <= 0:
        return ""
    return (
        f"{left_behind} times inputs or labels that are not on this device: place both, and keep what"
        " `place` returns, inputs = place(inputs, device)"
    )


PUBLISHED_RATE = 0.05


def fault_of_steps(model, passes, after, inputs, targets):
    """Return in words that a step is not one of MSELoss and plain SGD on the batches of all ranks;
    else "". `passes` are as noted, and `after` are the weights at the end.
    """
    of_ranks = gathered([numbers for _, numbers in passes])
    if len({len(numbers) for numbers in of_ranks}) > 1:
        return ""
    weights = [before for before, _ in passes] + [after]
    for step, (before, following) in enumerate(pairwise(weights)):
        ahead = copy.deepcopy(model)
        nn.utils.vector_to_parameters(before, ahead.parameters())
        losses = []
        for numbers in of_ranks:
            batch = numbers[step]
            losses.append(nn.functional.mse_loss(ahead(inputs[batch]), targets[batch]))
        gradients = torch.autograd.grad(sum(losses) / len(losses), list(ahead.parameters()))
        right = -PUBLISHED_RATE * torch.cat([gradient.reshape(-1) for gradient in gradients])
        fault = fault_of_update(following - before, right)
        if fault:
            return f"step {step + 1}: {fault}"
    return ""


def fault_of_update(update, right):
    """Return in words how an update differs from the right one; "" if it does not."""
    rounding = 1e-3 * right.abs().max()
    if (update - right).abs().max() <= rounding:
        return ""
    factor = (update @ right / (right @ right)).item()
    if (update - factor * right).abs().max() <= abs(factor) * rounding:
        return (
            f"the update is {factor:.4g} times as large as it should be: the script's learning rate is"
            f" {PUBLISHED_RATE}, and its loss is a mean"
        )
    return (
        "the update is another one than that of the script's MSELoss and plain SGD, averaged over the"
        " ranks: keep both as they are"
    )


def as_torchrun_starts_it(joined):
    """Within this block a rank is a process of torchrun's, one of two on its host. It has a group
    already: `joined` gets what it asks for when it makes one.
    """
    rank = dist.get_rank()
    place = {"RANK": rank, "WORLD_SIZE": dist.get_world_size(), "LOCAL_RANK": rank % 2}
    environ = {name: str(value) for name, value in place.items()}

    def join(run, backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, **more):
        if rank < 0:  # init_process_group then reads both from the environment.
            rank = place["RANK"]
        if world_size < 0:
            world_size = place["WORLD_SIZE"]
        joined.append(
            {
                "where the ranks meet": init_method or "env://",
                "the rank": rank,
                "the world size": world_size,
            }
        )

    block = ExitStack()
    block.enter_context(mock.patch.dict(os.environ, environ))
    block.enter_context(around(dist, "init_process_group", join))
    block.enter_context(around(dist, "destroy_process_group", lambda run, *group: None))
    return block


def faulty_rings():
    """{what it is: an all-reduce}: rings with faults, and one without."""

    def one_step_short(tensor, group=None):
        rank, size, left, right = wire.neighbours(group)
        chunks = tensor.view(-1).tensor_split(size)
        reduce_scatter(chunks, group)
        for step in range(size - 2):
            target = chunks[(rank - step) % size]
            wire.exchange(chunks[(rank + 1 - step) % size], right, target, left, group)

    def wrong_chunk(tensor, group=None):
        rank, size, left, right = wire.neighbours(group)
        chunks = tensor.view(-1).tensor_split(size)
        reduce_scatter(chunks, group)
        for step in range(size - 1):
            target = chunks[(rank - step - 1) % size]
            wire.exchange(chunks[(rank - step) % size], right, target, left, group)

    def whole_gradients(tensor, group=None):
        tensor.copy_(whole_gradient_ring(tensor, group))

    def too_little(tensor, group=None):
        ring_all_reduce(tensor, group)
        if dist.get_rank(group) == 3:
            tensor += 1e-300  # Only a gradient of 0 changes, and no weight.

    return {
        "a right ring": ring_all_reduce,
        "a ring whose fault is too small to change a weight": too_little,
        "a ring one step short": one_step_short,
        "a ring of whole gradients": whole_gradients,
        "a ring that hands out another chunk than the one it has summed": wrong_chunk,
    }


@task(
    "6.9",
    "first_difference",
    {"they differ": 1, "they are equal": 1},
    ranks=4,
    seconds=15.0,
    hang="do all ranks stop after the same step?",
)
class FirstDifference:
    """torch's DDP over rings with faults: after which step the replicas differ."""

    def draw(random):
        batches = [ONE.batches_of(random, 5, 4) for _ in range(4)]
        for inputs, _ in chain.from_iterable(batches):
            inputs[:, 2] = 0  # So the gradients of some weights are 0.
        return {
            "seed": random.randrange(10**6),
            "batches": batches,
            "lr": random.randrange(1, 5) / 10,
            "late": random.randrange(2, 5),
        }

    def probe(first_difference, seed, batches, lr, late):
        forward_passes = []
        summed = []

        def noted(forward, *arguments, **named):
            forward_passes.append(None)
            return forward(*arguments, **named)

        def spoils(rank, place):
            """Return a ring that makes one number a little larger on one rank, from a step on."""

            def ring(tensor, group=None):
                ring_all_reduce(tensor, group)
                if len(forward_passes) >= late and dist.get_rank(group) == rank:
                    tensor.view(-1)[place] *= 1 + 1e-6

            return ring

        rings = faulty_rings()
        rings[f"a ring that spoils its first number on rank 3 from step {late} on"] = spoils(3, 0)
        rings[f"a ring that spoils its last number on rank 2 from step {late} on"] = spoils(2, -1)
        for name, ring in rings.items():
            forward_passes.clear()
            summed.clear()
            model, _ = ONE.small_model(seed)

            def all_reduce(tensor, group=None, ring=ring):
                summed.append(tensor.numel())
                ring(tensor, group)

            forward = around(nn.parallel.DistributedDataParallel, "forward", noted)
            with forward, FOUR.backend_before_group():
                step = first_difference(all_reduce, model, batches[dist.get_rank()], lr)
            require(forward_passes, FOUR.NO_TORCH)
            require(summed, FOUR.NOT_CALLED)
            is_equal = name.startswith(("a right", "a ring that hands", "a ring whose"))
            part = "they are equal" if is_equal else "they differ"
            yield part, name, step


@task("6.10", "explain_figure", {"text": 1, "ticks": 1})
class ExplainFigure:
    """A figure in the learner's own words, and which points the learner ticks; a teacher reads it."""

    draw = nothing
    probe = as_it_is
    read = form_of_explanation
