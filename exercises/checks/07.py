"""Exercise 7: optimizer state split over the ranks, the memory that it saves, prefetch in little
room, parameters that come and go, the norm of what no rank has, and the smallest batch.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist

from ddp_course.checking.attempt import COLLECTIVES
from ddp_course.checking.tasks import each_case, load_tasks, task
from ddp_course.errors import Wrong
from ddp_course.running import wire
from ddp_course.stage4_ring import ring_all_reduce

from .shared import (
    OTHER_ALGORITHMS,
    SERVER,
    in_words,
    noted_ring,
    require,
    several,
    tensors,
    worlds,
)

SCHEDULES = load_tasks(8)


@task("7.1", "assign_owners", {"fewest so far": 1, "lowest of equals": 1})
class AssignOwners:
    """In order, each parameter to a rank that holds least so far, the lowest of equals."""

    def draw(random):
        cases = []
        for k in (2, 3, 4):
            sizes = [random.randrange(1, 500) for _ in range(12)]
            cases.append((sizes, k))
        return {
            "cases": [
                ([100, 60, 50, 40, 10, 5], 2),
                ([7, 7, 7, 7, 7], 3),
                *cases,
                ([5, 3], 4),
                ([9, 8, 7], 1),
            ]
        }

    def read(returned, cases):
        for (sizes, world_size), owners in zip(cases, returned, strict=True):
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
    """In words, which parameter went to a rank that did not hold least, and what ranks held then;
    "" if none did.
    """
    held = [0] * world_size
    for place, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        if held[owner] > min(held):
            return (
                f"parameter {place} goes to rank {owner}, when ranks hold {held} numbers:"
                f" {list(owners)}"
            )
        held[owner] += size
    return ""


SAME_ORDER = "do all ranks call reduce_scatter and allgather equally often, in the same order?"
WHOLE = OTHER_ALGORITHMS + tuple(
    f"ddp_course.stage4_ring.{name}"
    for name in ("ring_all_reduce", "whole_gradient_ring", "average_on_ring")
)
LOOP = {"ranks": 4, "forbidden": SERVER + WHOLE + COLLECTIVES, "hang": SAME_ORDER, "bound": 1e-9}


@task("7.2", "sharded_step", {"weights": 2, "bytes": 1}, **LOOP)
class ShardedStep:
    """ZeRO-1: reduce-scatter of the gradients, a step of the own chunk, allgather of the weights."""

    def draw(random):
        length = random.randrange(20, 40)
        (start,) = tensors(random, 1, length, dtype=torch.float64)
        return {"start": start, "gradients": tensors(random, 4, length, dtype=torch.float64)}

    def probe(sharded_step, start, gradients):
        for size, group in worlds(3, 4, 2):
            flat = start.clone()
            weights = list(flat.tensor_split(size))
            update = MomentumStep()
            with wire.counting() as traffic:
                for turn in (1, 2, 3):
                    own = gradients[dist.get_rank()] * turn
                    chunks = list(own.tensor_split(size))
                    try:
                        sharded_step(weights, chunks, update, group)
                    except IndexError as error:
                        raise Wrong(
                            f"with {size} ranks: {error}: the last rank has the sum of chunk 0,"
                            " so its index is (rank + 1) % K; and are rank, K and both collectives"
                            " those of `group`?"
                        ) from error
                    yield "weights", f"with {size} ranks, after step {turn}", flat.clone()
            sent = torch.tensor([traffic.bytes_sent // 3])
            ring_all_reduce(sent, group)
            case = f"with {size} ranks, bytes that all ranks together send in a step"
            yield "bytes", case, sent.item()
            calls = f"with {size} ranks, steps of a rank's optimizer, when it steps one chunk"
            yield "weights", calls, update.calls // 3


class MomentumStep:
    """SGD with momentum 0.9 for the one chunk that it is called with; a chunk's state is its own."""

    def __init__(self):
        self.velocities = {}
        self.calls = 0

    def __call__(self, weights, gradient):
        require(
            weights.shape == gradient.shape,
            f"update() got {len(weights)} weights and {len(gradient)} gradients: it takes one chunk of"
            " both, that of index (rank + 1) % K; are rank and K those of `group`?",
        )
        place = weights.data_ptr()
        velocity = self.velocities.setdefault(place, torch.zeros_like(gradient))
        velocity.mul_(0.9).add_(gradient)
        weights -= 0.1 * velocity
        self.calls += 1


NOTHING_LEFT = (
    "division by zero: what stays whole takes all of the memory, and nothing is left for a share"
)


@task("7.3", "fewest_ranks", {"enough": 1, "never enough": 1})
class FewestRanks:
    """16 bytes per parameter, of which 16, 4, 2 or 0 stay whole, by the level: what is left of the
    memory is for shards.
    """

    def draw(random):
        for level, whole in enumerate((16, 4, 2, 0)):
            parameters = 840 * random.randrange(10**3, 10**6)
            shared = (16 - whole) * parameters
            exactly = random.randrange(2, 9) if level else 1
            enough = [17 * parameters, whole * parameters + shared // exactly]
            if level:
                ranks = [
                    random.randrange(2, 9),
                    random.randrange(9, 90),
                    random.randrange(2000, 9000),
                ]
                enough += [whole * parameters + 2 * shared // (2 * k - 1) for k in ranks]
            never = [whole * parameters * 3 // 4] if whole else []
            for memory in enough + never:
                part = "enough"
                case = f"{parameters:,} parameters, {memory:,} bytes of memory, level {level}"
                if memory in never:
                    part = "never enough"
                    case += ", too little for any number of ranks"
                yield part, case, (parameters, memory, level)

    def probe(fewest_ranks, rows):
        with in_words({"division": NOTHING_LEFT, "divide by zero": NOTHING_LEFT}):
            yield from each_case(fewest_ranks, rows)


TICKS = {"gather": 2, "reduce": 2, "forward": 1, "backward": 2}


def play(order, blocks, fit):
    """Play the order tick by tick, with room for `fit` blocks: the ticks it takes, or in words what
    waits for ever.
    """
    queues = {"network": list(order), "compute": [("forward", block) for block in range(blocks)]}
    queues["compute"] += [("backward", block) for block in reversed(range(blocks))]
    taken = 0
    whole = set()
    done = set()
    running = {}
    now = 0
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


def first_in(queue):
    """In words, what comes next in a queue, such as "gather of block 2"; "" if nothing does."""
    return " of block ".join(map(str, queue[0])) if queue else ""


def waiting(queues, whole):
    """In words, what the network and the computation wait for when neither can go on."""
    network, compute = map(first_in, queues.values())
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

    def draw(random):
        shapes = [
            (6, 3),
            (4, 2),
            (5, 5),
            (random.randrange(6, 10), random.randrange(2, 6)),
            (24, 7),
        ]
        cases = []
        for blocks, fit in shapes:
            size = random.randrange(50, 99)
            cases.append((blocks, size, fit * size + size // 2))
        return {"cases": cases}

    def read(returned, cases):
        for (blocks, size, cap), steps in zip(cases, returned, strict=True):
            about = f"{blocks} blocks of {size} MB, {cap} MB of room"
            order = SCHEDULES.steps_of(steps, about, "gather", "reduce")
            gathered = sorted(block for kind, block in order if kind == "gather")
            reduced = sorted(block for kind, block in order if kind == "reduce")
            gathered = [block for block in sorted(set(gathered)) if gathered.count(block) <= 2]
            yield (
                "valid",
                f"{about}, blocks that are gathered once, if they stay, or twice",
                gathered,
            )
            yield "valid", f"{about}, blocks whose gradients are reduced", reduced
            valid = gathered == reduced == list(range(blocks))
            took = play(order, blocks, cap // size) if valid else "this order is not valid"
            plain = 8 * blocks
            best = 6 * blocks - 2 * (cap // size) + 3
            slow = (
                f"{plain} without prefetch in backward: what can be gathered while a block"
                " computes?"
            )
            idle = f"{best} is possible: does the network wait, or gather what could have stayed?"
            ends = type(took) is int
            waits = "" if ends else took
            yield "memory", f"{about}, waiting", waits
            prefetched = "fewer" if ends and took < plain else took
            yield "prefetch", f"{about}, ticks ({slow})", prefetched
            yield "the best", f"{about}, ticks ({idle})", took


class Layer:
    """A linear layer whose weight comes and goes, as 7.5 describes it."""

    def __init__(self, weight, group):
        self.parameter = torch.nn.Parameter(weight.bfloat16())
        self.group = group
        self.coming = None
        whole = self.parameter.data.view(-1)
        size = dist.get_world_size(group)
        self.chunks = whole.tensor_split(size)
        self.index = (dist.get_rank(group) + 1) % size
        self.own = torch.nn.Parameter(weight.view(-1).tensor_split(size)[self.index].clone())
        self.storage = whole.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.storage.resize_(0)


def a_moment_later(function, *arguments):
    """Call a function, so late that whoever does not wait for its end meets the old numbers."""
    time.sleep(0.001)
    return function(*arguments)


class CountingThread:
    """The one thread that sends messages, how often it was asked to, and for which of its futures
    a caller has waited.
    """

    def __init__(self):
        self.executor = ThreadPoolExecutor(1)
        self.submitted = 0
        self.last = None
        self.waited_for = set()

    def submit(self, function, *arguments):
        self.submitted += 1
        future = self.executor.submit(a_moment_later, function, *arguments)
        result = future.result

        def noted_result(timeout=None):
            self.waited_for.add(future)
            return result(timeout)

        future.result = noted_result
        self.last = future
        return future

    def wait(self):
        """Return when all transfers so far have ended."""
        self.executor.submit(lambda: None).result()


FAULTS = {
    "data is not allocated": "the memory of the whole parameter was given back: take it again, by"
    " storage.resize_(nbytes), before anything is written into it",
    "not callable": "submit takes the function and its arguments: do not call it there",
    "assign a gradient": "`own` is float32, and so is its gradient: make the gradients float32 before"
    " they are summed",
}


class HookedModel:
    """Linear layers with a tanh between them; hooks call the learner's three functions."""

    def __init__(self, functions, weights, group, thread):
        self.fetch, self.free, self.finish = functions
        self.thread = thread
        self.layers = [Layer(weight, group) for weight in weights]
        self.most_whole = 0
        self.fault = ""
        self.stepped = False
        for layer in self.layers:
            layer.parameter.register_post_accumulate_grad_hook(partial(self.reduce, layer))

    def reduce(self, layer, _):
        """Hand a layer whose gradient is there to `finish`."""
        self.thread.wait()  # A sum in this thread must not meet a gather in the other one.
        submitted = self.thread.submitted
        require(
            layer.storage.nbytes() > 0,
            "a layer was freed before its gradient was there: only `finish` frees it in the backward"
            " pass",
        )
        with in_words(FAULTS):
            self.finish(layer, self.thread)
        require(
            self.thread.submitted > submitted,
            "finish sums in its own thread, while a gather may run in the other one, and their"
            " messages meet: give the sum to `thread`, too",
        )
        last = self.thread.last
        require(
            last is None or last in self.thread.waited_for or last.done(),
            "finish does not wait for the sum: it takes its chunk before that is there",
        )

    def compute(self, number, following):
        """Have layer `number` whole, and the next one on its way."""
        for ahead in (number, following):
            if 0 <= ahead < len(self.layers):
                before = self.thread.last
                with in_words(FAULTS):
                    future = self.fetch(self.layers[ahead], self.thread)
                if self.thread.last is not before and self.thread.last in self.thread.waited_for:
                    self.fault = (
                        "fetch waits for its gather, so nothing computes under it: return the"
                        " future at once"
                    )
                require(
                    hasattr(future, "result"),
                    f"fetch returned {future!r}; the future of thread.submit was expected",
                )
                if ahead == number:
                    with in_words(FAULTS):
                        future.result()
                    require(
                        self.layers[number].storage.nbytes() > 0,
                        f"layer {number} is about to compute and has no memory: after free, fetch"
                        " takes it again and gathers; is `coming` None then?",
                    )
                    layer = self.layers[number]
                    require(
                        self.stepped
                        or torch.equal(layer.chunks[layer.index], layer.own.detach().bfloat16()),
                        f"layer {number} computes with something else than `own` in this rank's chunk:"
                        " the memory holds anything when it comes back, so copy `own` into it before"
                        " the gather",
                    )
        whole = sum(layer.storage.nbytes() > 0 for layer in self.layers)
        self.most_whole = max(self.most_whole, whole)

    def __call__(self, x):
        for number, layer in enumerate(self.layers):
            self.compute(number, number + 1)
            x = torch.nn.functional.linear(x, layer.parameter).tanh()
            self.thread.wait()  # A transfer that nobody waits for must not write into freed memory.
            self.free(layer)
            x.register_hook(lambda _, number=number: self.compute(number, number - 1))
        return x


@task(
    "7.5",
    ("fetch", "free", "finish"),
    {"weights": 2, "accumulation": 1, "bytes": 1, "memory": 1},
    ranks=3,
    bound=1e-3,
    seconds=10.0,
    every_order="weights",
    forbidden=SERVER + WHOLE + COLLECTIVES,
    hang="does every rank gather and reduce the same layers, in the same order?",
)
class FetchFreeFinish:
    """FSDP's three functions: on float32 masters, with gathers in bfloat16, in two layers' room."""

    def draw(random):
        width = 10
        return {
            "weights": tensors(random, 4, width, width),
            "inputs": [tensors(random, 3, 5, width) for _ in range(3)],
        }

    def probe(fetch, free, finish, weights, inputs):
        for size, group in worlds(3, 2):
            thread = CountingThread()
            model = HookedModel((fetch, free, finish), weights, group, thread)
            optimizer = torch.optim.SGD([layer.own for layer in model.layers], lr=0.2)
            about = f"with {size} ranks"
            in_forward = 0
            with wire.counting() as traffic:
                for step, micro_batches in enumerate(((0,), (1, 2)), start=1):
                    optimizer.zero_grad()
                    for number in micro_batches:
                        before = traffic.bytes_sent
                        outputs = model(inputs[dist.get_rank()][number].bfloat16())
                        in_forward += traffic.bytes_sent - before
                        outputs.float().sum().backward()
                    part = "weights" if step == 1 else "accumulation"
                    passes = "one backward pass" if step == 1 else "two backward passes"
                    yield part, f"{about}, the gradients after {passes}", gradients_of(model)
                    case = f"{about}, whole gradients that are kept after {passes}"
                    yield "memory", case, kept_gradients(model)
                    optimizer.step()
                    model.stepped = True
                    masters = torch.cat([layer.own.detach() for layer in model.layers])
                    yield part, f"{about}, the masters after step {step}", masters
            sent = torch.tensor([in_forward // 3, traffic.bytes_sent // 3])
            ring_all_reduce(sent, group)
            yield "bytes", f"{about}, bytes that all ranks send in a forward pass", sent[0].item()
            yield "bytes", f"{about}, bytes that all ranks send in both passes", sent[1].item()
            case = f"{about}, transfers given to the thread in a pass: two gathers and a reduce"
            yield "bytes", f"{case} per layer", thread.submitted // 3
            yield "bytes", f"{about}, who waits for a transfer", model.fault
            left = sum(layer.storage.nbytes() > 0 for layer in model.layers)
            yield "memory", f"{about}, layers that are whole at the same time", model.most_whole
            yield "memory", f"{about}, layers that are still whole after a step", left
            thread.executor.shutdown()


def gradients_of(model):
    """The gradients of all masters, end to end, zeros where there is none."""
    gradients = []
    for layer in model.layers:
        gradient = layer.own.grad
        missing = torch.zeros_like(layer.own)
        gradients.append(missing if gradient is None else gradient.detach().float().clone())
    return torch.cat(gradients)


def kept_gradients(model):
    """How many whole gradients still take memory, as themselves or behind a chunk of them."""
    count = 0
    for layer in model.layers:
        count += layer.parameter.grad is not None
        gradient = layer.own.grad
        if gradient is not None:
            count += gradient.untyped_storage().nbytes() > gradient.numel() * 4
    return count


NO_SHARDS = "a rank may have no shards at all: begin its sum with torch.zeros(())"
EMPTY = {
    "non-empty": NO_SHARDS,
    "int64": NO_SHARDS,
    "has no attribute": NO_SHARDS,
    "is ring_all_reduce of": "what the ranks sum has not the same shape and dtype on all: give"
    " all_reduce one number, their sum of squares, also where there are no shards",
}


@task(
    "7.6",
    "global_norm",
    {"norm": 2, "one sum": 1},
    ranks=4,
    bound=1e-5,
    hang="ranks have different numbers of shards: is all_reduce called once on each of them?",
)
class GlobalNorm:
    """Squares of shards are summed over the ranks, those of replicated gradients count once."""

    def draw(random):
        shards = [tensors(random, 2, 7 + rank) for rank in range(4)]
        shards[2] = shards[2][:1]
        shards[3] = []
        return {"shards": shards, "replicated": tensors(random, 2, 5)}

    def probe(global_norm, shards, replicated):
        own = shards[dist.get_rank()]
        for size, group in worlds(4, 3, 2):
            for name, whole in (("nothing", []), ("two gradients", replicated)):
                all_reduce, calls = noted_ring(group)
                given = [tensor.clone() for tensor in [*own, *whole]]
                with in_words(EMPTY):
                    norm = global_norm(given[: len(own)], given[len(own) :], all_reduce)
                about = f"with {size} ranks, {name} replicated"
                if isinstance(norm, torch.Tensor):
                    norm = norm.detach().float().reshape(-1)
                yield "norm", f"{about}, the norm", norm
                yield "one sum", f"{about}, all-reduces", len(calls)
                after = torch.cat([torch.zeros(1), *given])
                yield "one sum", f"{about}, the gradients afterwards", after


@task("7.7", "smallest_batch", {"GPUs": 1, "tokens": 1})
class SmallestBatch:
    """16 n bytes need so many GPUs, and these so many tokens that neither pass waits: n cancels."""

    def draw(random):
        cases = []
        for gpus, sizes in ((1, (2, 2)), (6, (2, 2)), (9, (1, 4)), (80, (4, 2)), (800, (2, 4))):
            memory = random.randrange(16, 80) * 10**9
            halves = 2 * gpus if gpus == 6 else 2 * gpus - 1  # On six GPUs it fits exactly.
            parameters = halves * memory // 32
            rate = random.randrange(50, 900) * 10**12
            bandwidth = random.randrange(2, 60) * 10**9 + 1
            cases.append((parameters, memory, rate, bandwidth, *sizes))
        return {"cases": cases}

    def read(returned, cases):
        for case, answer in zip(cases, returned, strict=True):
            parameters, memory, rate, bandwidth, weight_bytes, gradient_bytes = case
            both = "two numbers were expected: GPUs, and tokens of the whole batch"
            gpus, tokens = several(answer, 2, f"{both}; not {answer}")
            model = f"{parameters:,} parameters, {memory / 1e9:g} GB on each GPU"
            yield "GPUs", f"{model}, GPUs", gpus
            machine = (
                f"{rate / 1e12:g} TFLOP/s, {bandwidth / 1e9:.3g} GB/s, {weight_bytes} bytes per weight,"
                f" {gradient_bytes} per gradient"
            )
            yield "tokens", f"{model}, {machine}, tokens", tokens
