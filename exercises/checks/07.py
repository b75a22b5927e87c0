"""Exercise 7: optimizer state split over the ranks, and all that sharding asks for.

The tasks are the memory that it saves, prefetch in little room, parameters that come and go, the
norm of what no rank has, the smallest batch, and torch's own sharding over the two halves of a
ring. A task's `draw`, `probe` and `read` are what `ddp_exercises.tasks.Task` says.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist

from ddp_course import wire
from ddp_course.stage4_ring import allgather, reduce_scatter, ring_all_reduce
from ddp_exercises.attempt import COLLECTIVES
from ddp_exercises.errors import Wrong
from ddp_exercises.tasks import each_case, each_return, load_tasks, task
from manyranks.torch_inside import tree_leaves

from .shared import (
    OTHER_ALGORITHMS,
    SERVER,
    as_it_is,
    form_of_explanation,
    in_words,
    noted_ring,
    nothing,
    require,
    several,
    tensors,
    unequal_lengths,
    worlds,
)

ONE = load_tasks(1)  # Exercise 1 has a little net.
SCHEDULES = load_tasks(8)  # Exercise 8 reads a learner's schedule.


@task("7.1", "assign_owners", {"fewest so far": 1, "lowest of equals": 1})
class AssignOwners:
    """In order, each parameter to a rank that holds least so far, the lowest of equals."""

    def draw(random):
        cases = [([100, 60, 50, 40, 10, 5], 2), ([7, 7, 7, 7, 7], 3)]
        for world_size in (2, 3, 4):
            sizes = [random.randrange(1, 500) for _ in range(12)]
            cases.append((sizes, world_size))
        cases += [([5, 3], 4), ([9, 8, 7], 1)]
        return {"cases": cases}

    def read(returned, cases):
        for (sizes, world_size), owners in zip(cases, returned, strict=True):
            about = f"sizes {sizes} on {world_size} ranks"
            each = (
                f"{about}: a rank for each parameter was expected, from 0 to {world_size - 1}, not"
                f" {owners}"
            )
            several(owners, len(sizes), each)
            require(all(owner in range(world_size) for owner in owners), each)
            yield "fewest so far", about, fault_of_balance(sizes, world_size, owners)
            yield "lowest of equals", f"{about}, the owners", list(owners)


def fault_of_balance(sizes, world_size, owners):
    """Return in words which parameter went to a rank that did not hold least; "" if none did.

    The words also say what ranks held then.
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


# These would do for whole tensors what 7.2 and 7.5 do for chunks.
WHOLE_TENSORS = (
    *OTHER_ALGORITHMS,
    "ddp_course.stage4_ring.ring_all_reduce",
    "ddp_course.stage4_ring.whole_gradient_ring",
    "ddp_course.stage4_ring.average_on_ring",
)
FORBIDDEN = SERVER + WHOLE_TENSORS + COLLECTIVES
SAME_ORDER = "do all ranks call reduce_scatter and allgather equally often, in the same order?"
STEPS = 3


@task(
    "7.2",
    "sharded_step",
    {"weights": 2, "bytes": 1},
    ranks=4,
    forbidden=FORBIDDEN,
    hang=SAME_ORDER,
    bound=1e-9,
)
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
            events = []
            with wire.observing(events.append):
                for step in range(1, STEPS + 1):
                    gradient = gradients[dist.get_rank()] * step
                    chunks = list(gradient.tensor_split(size))
                    try:
                        sharded_step(weights, chunks, update, group)
                    except IndexError as error:
                        raise Wrong(
                            f"with {size} ranks: {error}: the last rank has the sum of chunk 0,"
                            " so its index is (rank + 1) % K; and are rank, K and both collectives"
                            " those of `group`?"
                        ) from error
                    yield "weights", f"with {size} ranks, after step {step}", flat.clone()
            all_bytes = sum(event.bytes for event in events if event.kind == "send")
            sent = torch.tensor([all_bytes // STEPS])
            ring_all_reduce(sent, group)
            case = f"with {size} ranks, bytes that all ranks together send in a step"
            yield "bytes", case, sent.item()
            lengths = unequal_lengths(events, group)
            yield "bytes", f"with {size} ranks, lengths of messages", lengths
            case = f"with {size} ranks, steps of a rank's optimizer, when it steps one chunk"
            yield "weights", case, update.calls // STEPS


class MomentumStep:
    """SGD with momentum 0.9 for the chunk that it is called with.

    Chunks differ by their memory, and each has a velocity of its own.
    """

    def __init__(self):
        self.velocities = {}
        self.calls = 0

    def __call__(self, weights, gradient):
        require(
            weights.shape == gradient.shape,
            f"update() got {len(weights)} weights and {len(gradient)} gradients: it takes one chunk of"
            " both, that of index (rank + 1) % K; are rank and K those of `group`?",
        )
        address = weights.data_ptr()
        velocity = self.velocities.setdefault(address, torch.zeros_like(gradient))
        velocity.mul_(0.9).add_(gradient)
        weights -= 0.1 * velocity
        self.calls += 1


NOTHING_LEFT = (
    "division by zero: what stays whole takes all of the memory, and nothing is left for a share"
)


@task("7.3", "fewest_ranks", {"enough": 1, "never enough": 1})
class FewestRanks:
    """16 bytes per parameter, of which 16, 4, 2 or 0 stay whole; shards get the other memory."""

    def draw(random):
        for level, whole in enumerate((16, 4, 2, 0)):
            parameters = 840 * random.randrange(10**3, 10**6)  # The numbers 2 to 8 divide 840.
            whole_bytes = whole * parameters
            shared_bytes = (16 - whole) * parameters
            ranks = random.randrange(2, 9) if level else 1
            enough = [17 * parameters, whole_bytes + shared_bytes // ranks]
            if level:
                for ranks in (
                    random.randrange(2, 9),
                    random.randrange(9, 90),
                    random.randrange(2000, 9000),
                ):
                    # Half a rank fewer would fill this memory.
                    enough.append(whole_bytes + 2 * shared_bytes // (2 * ranks - 1))
            never = [whole_bytes * 3 // 4] if whole else []
            about = f"{parameters:,} parameters"
            for memory in enough:
                case = f"{about}, {memory:,} bytes of memory, level {level}"
                yield "enough", case, (parameters, memory, level)
            for memory in never:
                case = (
                    f"{about}, {memory:,} bytes of memory, level {level}, too little for any number"
                    " of ranks"
                )
                yield "never enough", case, (parameters, memory, level)

    def probe(fewest_ranks, rows):
        with in_words({"division": NOTHING_LEFT, "divide by zero": NOTHING_LEFT}):
            yield from each_case(fewest_ranks, rows)


TICKS = {"gather": 2, "reduce": 2, "forward": 1, "backward": 2}


def play(order, blocks, fit):
    """Play the network's order tick by tick, with room for `fit` blocks, beside the computation.

    Returns the ticks that it takes, and in words what waits for ever, or "" if nothing does.
    """
    forward = [("forward", block) for block in range(blocks)]
    backward = [("backward", block) for block in reversed(range(blocks))]
    queues = {"network": list(order), "compute": forward + backward}
    room = fit
    whole = set()
    done = set()
    running = {}  # {lane: (the tick at which it ends, its step)}
    now = 0
    while running or any(queues.values()):
        for lane, queue in queues.items():
            if lane not in running and queue and can_start(queue[0], room, whole, done):
                kind, block = queue.pop(0)
                running[lane] = (now + TICKS[kind], (kind, block))
                if kind == "gather":
                    room -= 1
        if not running:
            return now, what_waits(queues, whole)
        now = min(end for end, _ in running.values())
        for lane, (end, (kind, block)) in list(running.items()):
            if end > now:
                continue
            del running[lane]
            done.add((kind, block))
            gathered_again = ("gather", block) in queues["network"]
            if kind == "gather":
                whole.add(block)
            elif kind == "reduce" or (kind == "forward" and gathered_again):
                whole.discard(block)
                room += 1
    return now, ""


def can_start(step, room, whole, done):
    """Return whether a step can start.

    A gather needs room for its block, a reduce the block's gradient, and a forward or backward pass
    the whole block.
    """
    kind, block = step
    if kind == "gather":
        return room > 0 and block not in whole
    if kind == "reduce":
        return ("backward", block) in done
    return block in whole


def what_waits(queues, whole):
    """Return in words what the network and the computation wait for when neither can go on."""
    network = "nothing is gathered"
    if queues["network"]:
        first = step_in_words(queues["network"][0])
        network = f"{first} waits for ever while blocks {sorted(whole)} are whole"
    compute = "nothing"
    if queues["compute"]:
        compute = step_in_words(queues["compute"][0])
    return f"{network}, and {compute} is next to compute"


def step_in_words(step):
    """Return a step as a message has it, such as "gather of block 2"."""
    kind, block = step
    return f"{kind} of block {block}"


@task("7.4", "network_order", {"valid": 1, "memory": 1, "prefetch": 1, "the best": 1})
class NetworkOrder:
    """Gathers and reduces in little room: at best the network never rests after forward."""

    def draw(random):
        of_chance = (random.randrange(6, 10), random.randrange(2, 6))
        cases = []
        for blocks, fit in ((6, 3), (4, 2), (5, 5), of_chance, (24, 7)):
            size = random.randrange(50, 99)
            cases.append((blocks, size, fit * size + size // 2))
        return {"cases": cases}

    def read(returned, cases):
        for (blocks, size, cap), steps in zip(cases, returned, strict=True):
            about = f"{blocks} blocks of {size} MB, {cap} MB of room"
            order = SCHEDULES.steps_of(steps, about, "gather", "reduce")
            gathers = [block for kind, block in order if kind == "gather"]
            gathered = [block for block in sorted(set(gathers)) if gathers.count(block) <= 2]
            case = f"{about}, blocks that are gathered once, if they stay, or twice"
            yield "valid", case, gathered
            reduced = sorted(block for kind, block in order if kind == "reduce")
            yield "valid", f"{about}, blocks whose gradients are reduced", reduced
            fit = cap // size
            ticks = None
            fault = "this order is not valid"
            if gathered == reduced == list(range(blocks)):
                ticks, fault = play(order, blocks, fit)
            yield "memory", f"{about}, waiting", fault
            # A block takes two ticks in the forward pass, and six in the backward pass, where it is
            # gathered, computes and is reduced.
            plain = 8 * blocks
            slow = (
                f"{plain} without prefetch in backward: what can be gathered while a block"
                " computes?"
            )
            outcome = fault if fault else ticks
            prefetched = "fewer" if not fault and ticks < plain else outcome
            yield "prefetch", f"{about}, ticks ({slow})", prefetched
            # The network gathers all blocks, rests for the last forward pass and the first backward
            # pass, three ticks, then gathers what had no room, and reduces all.
            best = 2 * blocks + 3 + 2 * (blocks - fit) + 2 * blocks
            idle = f"{best} is possible: does the network wait, or gather what could have stayed?"
            yield "the best", f"{about}, ticks ({idle})", outcome


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


PARTS_OF_LAYER = (
    "parameter",
    "group",
    "coming",
    "chunks",
    "index",
    "own",
    "storage",
    "nbytes",
)


def a_moment_later(function, *arguments):
    """Call a function, so late that whoever does not wait for its end meets the old numbers."""
    time.sleep(0.001)
    return function(*arguments)


class CountingThread:
    """The one thread that sends messages, and how it was used.

    It counts how often it was asked to send, and knows for which of its futures a caller has
    waited.
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
        self.fault_of_fetch = ""
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

    def prepare(self, number, following):
        """Have layer `number` whole, and layer `following` on its way, if there is one."""
        layer = self.layers[number]
        future = self.fetched(layer)
        with in_words(FAULTS):
            future.result()
        require(
            layer.storage.nbytes() > 0,
            f"layer {number} is about to compute and has no memory: after free, fetch"
            " takes it again and gathers; is `coming` None then?",
        )
        # After a step a layer that was never freed has old numbers, too; that it stays whole is
        # evidence of its own.
        require(
            self.stepped or torch.equal(layer.chunks[layer.index], layer.own.detach().bfloat16()),
            f"layer {number} computes with something else than `own` in this rank's chunk:"
            " the memory holds anything when it comes back, so copy `own` into it before"
            " the gather",
        )
        if 0 <= following < len(self.layers):
            self.fetched(self.layers[following])
        whole = sum(layer.storage.nbytes() > 0 for layer in self.layers)
        self.most_whole = max(self.most_whole, whole)

    def fetched(self, layer):
        """Return what `fetch` returns for a layer: the future of its gather."""
        before = self.thread.last
        with in_words(FAULTS):
            future = self.fetch(layer, self.thread)
        if self.thread.last is not before and self.thread.last in self.thread.waited_for:
            self.fault_of_fetch = (
                "fetch waits for its gather, so nothing computes under it: return the"
                " future at once"
            )
        require(
            hasattr(future, "result"),
            f"fetch returned {future!r}; the future of thread.submit was expected",
        )
        return future

    def __call__(self, x):
        for number, layer in enumerate(self.layers):
            self.prepare(number, number + 1)
            x = torch.nn.functional.linear(x, layer.parameter).tanh()
            self.thread.wait()  # A transfer that nobody waits for must not write into freed memory.
            self.free(layer)
            # The layer's backward pass begins when the gradient of its output is there.
            x.register_hook(lambda _, number=number: self.prepare(number, number - 1))
        return x


PASSES = 3  # Two steps of 7.5 have so many passes, forward and backward: one and two.


@task(
    "7.5",
    ("fetch", "free", "finish"),
    {"weights": 2, "accumulation": 1, "bytes": 1, "memory": 1},
    ranks=3,
    bound=1e-3,
    seconds=10.0,
    every_order="weights",
    forbidden=FORBIDDEN,
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
                for step, passes_of_step in enumerate(((0,), (1, 2)), start=1):
                    optimizer.zero_grad()
                    for number in passes_of_step:
                        before = traffic.bytes_sent
                        outputs = model(inputs[dist.get_rank()][number].bfloat16())
                        in_forward += traffic.bytes_sent - before
                        outputs.float().sum().backward()
                    part = "weights" if step == 1 else "accumulation"
                    passes = "one backward pass" if step == 1 else "two backward passes"
                    yield part, f"{about}, the gradients after {passes}", gradients_of(model)
                    case = f"{about}, whole gradients that are kept after {passes}"
                    yield "memory", case, kept_gradients(model)
                    case = f"{about}, attributes of layers that are kept after {passes}"
                    yield "memory", case, kept_attributes(model)
                    optimizer.step()
                    model.stepped = True
                    masters = torch.cat([layer.own.detach() for layer in model.layers])
                    yield part, f"{about}, the masters after step {step}", masters
            sent = torch.tensor([in_forward // PASSES, traffic.bytes_sent // PASSES])
            ring_all_reduce(sent, group)
            of_forward, of_both = sent.tolist()
            yield "bytes", f"{about}, bytes that all ranks send in a forward pass", of_forward
            yield "bytes", f"{about}, bytes that all ranks send in both passes", of_both
            case = f"{about}, transfers given to the thread in a pass: two gathers and a reduce"
            yield "bytes", f"{case} per layer", thread.submitted // PASSES
            yield "bytes", f"{about}, who waits for a transfer", model.fault_of_fetch
            still_whole = sum(layer.storage.nbytes() > 0 for layer in model.layers)
            yield "memory", f"{about}, layers that are whole at the same time", model.most_whole
            yield "memory", f"{about}, layers that are still whole after a step", still_whole
            thread.executor.shutdown()


def gradients_of(model):
    """Return the gradients of all masters, end to end, zeros where there is none."""
    gradients = []
    for layer in model.layers:
        gradient = layer.own.grad
        missing = torch.zeros_like(layer.own)
        gradients.append(missing if gradient is None else gradient.detach().float().clone())
    return torch.cat(gradients)


def kept_gradients(model):
    """Return how many whole gradients still take memory, by themselves or behind a chunk."""
    count = 0
    for layer in model.layers:
        if layer.parameter.grad is not None:
            count += 1
        chunk = layer.own.grad
        if chunk is not None and chunk.untyped_storage().nbytes() > 4 * chunk.numel():
            count += 1
    return count


def kept_attributes(model):
    """Return in words that an answer keeps tensors longer than a rank's own chunk; else ""."""
    for layer in model.layers:
        for name, value in vars(layer).items():
            if name in PARTS_OF_LAYER:
                continue
            for thing in tree_leaves(value):
                is_tensor = isinstance(thing, torch.Tensor)
                if is_tensor and thing.untyped_storage().nbytes() > 4 * (layer.own.numel() + 1):
                    return f"`{name}` keeps a whole layer's numbers: a rank has room for its chunk alone"
    return ""


NO_SHARDS = "a rank may have no shards at all: begin its sum with torch.zeros(())"
CAUSES = {
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
    forbidden=COLLECTIVES,
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
            for name, on_all_ranks in (("nothing", []), ("two gradients", replicated)):
                all_reduce, calls = noted_ring(group)
                sharded_gradients = [shard.clone() for shard in own]
                whole_gradients = [gradient.clone() for gradient in on_all_ranks]
                given = [*sharded_gradients, *whole_gradients]
                with in_words(CAUSES):
                    norm = global_norm(sharded_gradients, whole_gradients, all_reduce)
                about = f"with {size} ranks, {name} replicated"
                if isinstance(norm, torch.Tensor):
                    norm = norm.detach().float().reshape(-1)
                yield "norm", f"{about}, the norm", norm
                yield "one sum", f"{about}, all-reduces", len(calls)
                summed = sum(numbers for _, numbers in calls)
                too_many = ""
                if summed > 2:
                    too_many = f"{summed} numbers are summed: one is enough, the sum of this rank's squares"
                yield "one sum", f"{about}, numbers in it", too_many
                # A rank without any gradients has a tensor, too.
                after = torch.cat([torch.zeros(1), *given])
                yield "one sum", f"{about}, the gradients afterwards", after


@task("7.7", "smallest_batch", {"GPUs": 1, "tokens": 1})
class SmallestBatch:
    """16 n bytes need so many GPUs, and these so many tokens that neither pass waits: n cancels."""

    def draw(random):
        cases = []
        # So much memory is full: six GPUs exactly, else half a GPU less than a whole number.
        for full, weight_bytes, gradient_bytes in (
            (0.5, 2, 2),
            (6, 2, 2),
            (8.5, 1, 4),
            (79.5, 4, 2),
            (799.5, 2, 4),
        ):
            memory = random.randrange(16, 80) * 10**9
            parameters = int(full * memory) // 16
            rate = random.randrange(50, 900) * 10**12
            bandwidth = random.randrange(2, 60) * 10**9 + 1
            cases.append((parameters, memory, rate, bandwidth, weight_bytes, gradient_bytes))
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


NOT_SHARDED = (
    "parameters are still whole: torch's fully_shard was not called on the model, which it changes in"
    " place; your loop then trains the same `model`"
)
OTHER_MEANS = (
    "the two functions were never called: torch gathers and sums by other means; register both, and hand"
    " fully_shard a mesh of your group"
)


@task(
    "7.8",
    "train_sharded",
    {"weights": 1, "the halves": 1, "a layer at a time": 0.5},
    ranks=4,
    bound=1e-9,
    seconds=10.0,
    hang="does every rank make the group, and go through all of its batches?",
)
class TrainSharded:
    """torch's fully_shard over a group of a learner's own: the weights, and who sent them."""

    def draw(random):
        count = random.randrange(3, 5)
        return {
            "seed": random.randrange(10**6),
            "batches": [ONE.batches_of(random, count, 4) for _ in range(4)],
            "lr": random.randrange(1, 5) / 10,
        }

    def probe(train_sharded, seed, batches, lr):
        model, _ = ONE.small_model(seed)
        summed = []
        spread = []

        def first_half(chunks, group=None):
            summed.append(sum(chunk.numel() for chunk in chunks))
            reduce_scatter(chunks, group)

        def second_half(chunks, group=None):
            spread.append(sum(chunk.numel() for chunk in chunks))
            allgather(chunks, group)

        train_sharded(first_half, second_half, model, batches[dist.get_rank()], lr)
        parameters = list(model.parameters())
        require(all(hasattr(parameter, "full_tensor") for parameter in parameters), NOT_SHARDED)
        require(summed and spread, OTHER_MEANS)
        yield "the halves", "numbers that reduce_scatter has added up, in all steps", sum(summed)
        yield "a layer at a time", "calls of reduce_scatter, in all steps", len(summed)
        whole = [parameter.full_tensor().detach().view(-1) for parameter in parameters]
        yield "weights", "the weights after all steps", torch.cat(whole)


@task("7.9", "explain_figure", {"text": 1, "ticks": 1})
class ExplainFigure:
    """A figure in the learner's own words, and which points the learner ticks; a teacher reads it."""

    draw = nothing
    probe = as_it_is
    read = form_of_explanation


SAMPLES = 16  # So many moments of a phase are recorded.
LOOK = {
    "DDP": "all 16 bytes of a parameter are there before the step begins",
    "ZeRO-1": "it begins with few bytes, and the whole gradients, 4 bytes, are still there when the update begins",
    "fully sharded": "it begins with few bytes, has one peak, and falls back to where it began",
    "checkpointed": "it rises several times in the backward pass, each time a part is computed once more",
}


def held_by(random, way, ranks, activations):
    """Pairs (moment, bytes per parameter) of a step, as torch's profiler records them."""
    kept = {"DDP": 16, "ZeRO-1": 4 + 8 / ranks}.get(way, 16 / ranks + 1)
    whole_gradients = 4 if way == "ZeRO-1" else 0
    checkpointed = way == "checkpointed"
    held = []
    for place in range(3 * SAMPLES):
        moment = place / SAMPLES
        forward = min(moment, 1)
        backward = min(max(moment - 1, 0), 1)
        count = kept + whole_gradients * backward
        if checkpointed:
            count += 0.1 * activations * (forward - backward)
            if 1 <= moment < 2:
                count += activations / 4 * (1 - 4 * backward % 1)
        else:
            count += activations * (forward - backward)
        held.append((moment, round(count + random.uniform(-0.3, 0.3), 2)))
    return held


@task("7.10", "way_of", {"whole": 1, "sharded": 1})
class WhoseMemory:
    """Four ways to train, and what a rank holds over a step of each."""

    def draw(random):
        cases = []
        ways = random.sample(list(LOOK) * 4, len(LOOK) * 4)
        for number, way in enumerate(ways):
            ranks = (4, 8)[number % 2]
            cases.append((held_by(random, way, ranks, random.uniform(16, 30)), ranks))
        return {"ways": ways, "cases": cases}

    def probe(way_of, ways, cases):
        return each_return(way_of, cases)

    def read(returned, ways, cases):
        for way, (held, ranks), answer in zip(ways, cases, returned, strict=True):
            part = "sharded" if way in ("fully sharded", "checkpointed") else "whole"
            counts = [count for _, count in held]
            begins = f"{ranks} ranks, {counts[0]:.1f} bytes at the beginning"
            ends = f"{max(counts):.1f} at most, {counts[2 * SAMPLES]:.1f} after backward"
            fault = ""
            if answer in LOOK and answer != way:
                fault = f"{answer!r} was returned, but {LOOK[way]}"
            yield part, f"{begins}, {ends}", fault
            yield part, f"{begins}, {ends}, the way", answer


def kernel(name, begin, duration, stream):
    """An event of a trace: a kernel on the GPU."""
    event = {"ph": "X", "cat": "kernel", "name": name, "ts": round(begin, 1)}
    return event | {"dur": round(duration, 1), "args": {"stream": stream}}


def trace_of(random, layers):
    """Events of a step of `layers` sharded layers: gathers run ahead, scatters behind."""
    events = []
    clock = random.uniform(0, 1000)
    link_is_free = clock
    for name, count in (("AllGather", 1), ("ReduceScatter", 2)):  # forward, then backward
        for _ in range(layers):
            begin = link_is_free + random.uniform(1, 30)
            takes = random.uniform(200, 900)
            events.append(kernel(f"ncclDevKernel_{name}_RING_LL", begin, takes, 20))
            event = {"ph": "X", "cat": "cpu_op", "name": f"c10d::{name}_base", "ts": begin - 50}
            events.append(event | {"dur": 900.0})
            link_is_free = begin + takes
            for _ in range(count):
                clock = max(clock, begin + random.uniform(50, 600)) + random.uniform(5, 40)
                computes = random.uniform(100, 500)
                events.append(kernel("sm90_xmma_gemm_bf16", clock, computes, 7))
                clock += computes
    return random.sample(events, len(events))


@task("7.11", "exposed", {"AllGather": 1, "ReduceScatter": 1})
class Exposed:
    """How long the GPU communicates without computing, read from a trace's events."""

    def draw(random):
        return {"cases": [(trace_of(random, layers),) for layers in (2, 3, 5, 8)]}

    def read(returned, cases):
        for (events,), answer in zip(cases, returned, strict=True):
            both = "a dict with AllGather and ReduceScatter was expected"
            require(
                isinstance(answer, dict) and set(answer) == {"AllGather", "ReduceScatter"}, both
            )
            for kind, waited in answer.items():
                yield kind, f"{len(events)} events, exposed {kind} in microseconds", waited
