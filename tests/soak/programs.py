"""Random programs, which torch's class and ours play in the same processes.

Call it as `python tests/soak/programs.py [--count N]`. A program is a model, the settings of a
wrapper and a list of operations: training steps, accumulation, abandoned and nested forward passes,
exceptions, uneven inputs, and so on. After each operation gradients, weights and buffers must be
the same bits with both classes, or both must have refused it. A number stands for a program:
`--first N --count 1` repeats a failure. Stage 5 is also compared with one device, and the
collectives with `dist.all_reduce`.
"""

import argparse
import copy
import random
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]

from oracles import ALL_REDUCES  # noqa: E402

from ddp_course import launch  # noqa: E402
from ddp_course.stage4_ring import ring_all_reduce, whole_gradient_ring  # noqa: E402
from ddp_course.stage5_bucketed import BucketedDDP  # noqa: E402
from ddp_course.stage6_ddp import DistributedDataParallel  # noqa: E402
from manyranks.errors import LaunchError  # noqa: E402

CLASSES = {"torch": TorchDDP, "ours": DistributedDataParallel}
# None is about sparse gradients: torch 2.13 spoils dense ones beside them.
TRAITS = [
    "tied",
    "frozen",
    "double",
    "buffers",
    "two wrappers",
]
# These are what other code does with gradients and outputs.
NEIGHBOURS = [
    "reads",
    "scales",
    "flat",
    "field",
    "spare",
]
PLACES = ["forward", "backward", "gradient hook"]
OPERATIONS = (
    ["train"] * 6
    + ["no_sync"] * 2
    + ["abandon", "without gradients", "evaluate", "replace", "load", "copy"]
)
OPERATIONS += ["raise", "two forwards", "late backward", "clip", "join"]
BATCH = 3
ALL = {"which": "ab", "set_to_none": True}


class Explosion(Exception):
    """The exception that the programs raise."""


class Bomb(torch.autograd.Function):
    """The identity, whose backward pass raises an exception."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Explosion("backward")


class Field(torch.autograd.Function):
    """The identity, with a field of the name that autograd gives to parameters."""

    @staticmethod
    def forward(ctx, x):
        ctx.variable = ["not", "hashable"]
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Model(nn.Module):
    """Two branches, of which those in `which` take part, and a last layer.

    `bomb` says where the model explodes. A "spare" output has a layer of its own, and the loss does
    not use it.
    """

    def __init__(self, traits):
        super().__init__()
        self.traits = traits
        self.a = nn.Linear(5, 5)
        self.b = nn.Linear(5, 5)
        self.last = nn.Linear(5, 5)
        if "tied" in traits:
            self.b.weight = self.a.weight
        if "frozen" in traits:
            self.b.requires_grad_(False)
        if "double" in traits:
            self.last.double()
        if "buffers" in traits:
            self.norm = nn.BatchNorm1d(5)
        if "spare" in traits:
            self.spare = nn.Linear(5, 5)
        self.seen = []
        if traits & {"reads", "scales"}:
            self.a.register_full_backward_hook(self.note_call)
        if "flat" in traits:
            for parameter in self.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(
                        partial(lay_out, torch.zeros_like(parameter))
                    )

    def note_call(self, *_):
        """Read or scale the gradient of a later layer, as a hook of one layer."""
        gradient = self.last.weight.grad
        if gradient is not None and "scales" in self.traits:
            gradient.mul_(2)
        elif gradient is not None:
            self.seen.append(gradient.detach().clone())

    def forward(self, x, which, bomb=None):
        x = x.to(self.a.weight.dtype)
        x = self.norm(x) if "buffers" in self.traits else x
        x = self.a(x).tanh() if "a" in which else x
        if bomb == "forward":
            raise Explosion("forward")
        x = Bomb.apply(x) if bomb == "backward" else x
        x = self.b(x).tanh() if "b" in which else x
        x = self.last(x.to(self.last.weight.dtype))
        x = Field.apply(x) if "field" in self.traits else x
        return (x, self.spare(x)) if "spare" in self.traits else x


def lay_out(place, parameter):
    """Move a gradient to the place that its owner keeps for it."""
    if parameter.grad is not None:
        place.data.copy_(parameter.grad)
        parameter.grad = place


class Program(NamedTuple):
    """Traits of a model, settings of its wrapper, a hook, and what is done: (what, arguments)."""

    traits: set
    settings: dict
    hook: str
    operations: list


def program(number):
    """Return the program with this number."""
    draw = random.Random(number)
    traits = {trait for trait in TRAITS if draw.random() < 0.25}
    settings = {"bucket_cap_mb": draw.choice([None, 0.0001, 0.0002])}
    often = {"gradient_as_bucket_view": 0.4, "find_unused_parameters": 0.4, "static_graph": 0.15}
    settings |= {name: True for name, share in often.items() if draw.random() < share}
    if draw.random() < 0.2:
        settings["forward_sync_buffers"] = False
    if draw.random() < 0.2:
        settings["bucket_cap_mb_list"] = [0.0001, 0.0003]
    hook = draw.choice(["none"] * 4 + ["allreduce", "fp16", "power"])
    # It communicates several times per bucket, in gloo's threads, when nothing else may.
    if hook == "power":
        settings["bucket_cap_mb"] = None
        settings.pop("bucket_cap_mb_list", None)
        settings.pop("find_unused_parameters", None)
        traits -= {"double", "two wrappers"}
    operations = [operation(draw, traits, settings) for _ in range(draw.randint(2, 7))]
    is_broken = any(what in BREAKING for what, _ in operations)
    operations = as_torch_can(operations, settings)
    traits |= {trait for trait in NEIGHBOURS if draw.random() < 0.2}
    # A bucket must not be touched while it is summed.
    if settings.get("gradient_as_bucket_view"):
        traits -= {"reads", "scales"}
    # An unsynchronised pass finishes a broken one with torch's class alone.
    if is_broken or not settings.get("find_unused_parameters") or settings.get("static_graph"):
        traits -= {"spare"}
    return Program(traits, settings, hook, operations)


BREAKING = ("abandon", "raise")  # These leave a pass unfinished.


def as_torch_can(operations, settings):
    """Return the operations, with others in place of those at which torch's class goes wrong."""
    possible = []
    is_broken = False
    is_late = False
    for what, arguments in operations:
        is_broken = is_broken or what in BREAKING
        # A pass is not finished. torch's class takes the next backward pass for it, wherever that
        # comes from; ours leaves passes in no_sync() on their rank. With torch's class a rank that
        # joins may wait forever.
        if is_broken and what in ("no_sync", "late backward", "join"):
            possible.append(("train", ALL))
            continue
        is_late = is_late or what == "late backward"
        # torch's class counts parameters used here as used in the next pass too, and hangs or
        # reports its own bug.
        if is_late:
            arguments["which"] = "ab"
        possible.append((what, arguments))
    # torch's class needs a plain first pass, and another one after copying.
    if settings.get("static_graph"):
        without_copies = [(what, arguments) for what, arguments in possible if what != "copy"]
        return [("train", ALL), *without_copies]
    return possible


def operation(draw, traits, settings):
    """Return one step of a program: (what, arguments).

    Arguments may differ between ranks, and then are a list.
    """
    what = draw.choice(OPERATIONS)
    changing = settings.get("find_unused_parameters") and not settings.get("static_graph")
    branches = ["ab", "ab", "a", "b", ""] if changing else ["ab"]
    arguments = {
        "which": [draw.choice(branches) for _ in range(8)],
        "set_to_none": draw.random() < 0.5,
    }
    if what == "raise":
        # All ranks fail at the same point.
        arguments |= {
            "bomb": draw.choice(PLACES),
            "which": draw.choice(branches),
        }
    # With other branches one rank alone may refuse the next pass, and another waits for it.
    if what == "abandon" and changing:
        arguments["which"] = "ab"
    if what == "join" and ("two wrappers" in traits or settings.get("static_graph")):
        what = "train"
    if what == "join":
        steps = [draw.randint(0, 3) for _ in range(8)]
        # With torch 2.13, a rank that joins before its first pass sends uninitialised memory as its
        # bitmap.
        if settings.get("find_unused_parameters"):
            steps = [max(1, count) for count in steps]
        arguments |= {"steps": steps, "by_all": draw.random() < 0.5}
    return what, arguments


class Player:
    """One rank that plays a program with one of the classes."""

    def __init__(self, kind, number):
        self.kind = kind
        self.number = number
        self.traits, self.settings, self.hook, self.operations = program(number)
        torch.manual_seed(number)
        self.models = [Model(self.traits) for _ in range(2 if "two wrappers" in self.traits else 1)]
        self.wrapped = [CLASSES[kind](model, **self.settings) for model in self.models]
        for wrapper in self.wrapped:
            self.register(wrapper)
        trained = [p for model in self.models for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.05)
        self.start = copy.deepcopy([wrapper.state_dict() for wrapper in self.wrapped])
        self.rank = dist.get_rank()
        self.count = 0

    def register(self, wrapper):
        """Register the program's communication hook."""
        if self.hook == "allreduce":
            wrapper.register_comm_hook(None, default_hooks.allreduce_hook)
        elif self.hook == "fp16":
            wrapper.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self.hook == "power":
            state = powerSGD_hook.PowerSGDState(
                None, start_powerSGD_iter=2, min_compression_rate=0.5
            )
            wrapper.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def play(self):
        """Yield after each operation its name, the error that refused it, and all tensors.

        The error is None if it was not refused.
        """
        for what, of_all_ranks in self.operations:
            arguments = {}
            for name, value in of_all_ranks.items():
                arguments[name] = value[self.rank] if isinstance(value, list) else value
            refused = None
            try:
                getattr(self, what.replace(" ", "_"))(**arguments)
            except (Explosion, RuntimeError) as error:
                refused = f"{type(error).__name__}: {error}"
                self.zero(set_to_none=True)  # no class promises which gradients have come
            yield what, refused, self.tensors()
            if refused and "Explosion" not in refused:
                return  # no class promises what comes after a refusal

    def tensors(self):
        """Return {name: tensor or None} of gradients, weights and buffers."""
        found = {}
        for index, model in enumerate(self.models):
            for name, p in model.named_parameters():
                found[f"{index}.{name}.grad"] = (
                    p.grad if p.grad is None else p.grad.detach().clone()
                )
                found[f"{index}.{name}"] = p.detach().clone()
            found |= {f"{index}.{name}": buffer.clone() for name, buffer in model.named_buffers()}
            found |= {
                f"{index}.seen.{number}": gradient for number, gradient in enumerate(model.seen)
            }
        return found

    def loss(self, which, bomb=None):
        """Return the loss of one forward pass through all wrappers, on inputs of its own."""
        self.count += 1
        seed = 1000 * self.number + 10 * self.count + self.rank
        x = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(seed))
        for wrapper in self.wrapped:
            outputs = wrapper(x, which, bomb if wrapper is self.wrapped[-1] else None)
            # The loss does not use the spare output.
            x = outputs[0] if isinstance(outputs, tuple) else outputs
        return x.square().sum()

    def zero(self, set_to_none):
        for model in self.models:
            model.zero_grad(set_to_none=set_to_none)

    def train(self, which, set_to_none):
        self.zero(set_to_none)
        self.loss(which).backward()
        self.optimizer.step()

    def no_sync(self, which, set_to_none):
        self.zero(set_to_none)
        with ExitStack() as contexts:
            for wrapper in self.wrapped:
                contexts.enter_context(wrapper.no_sync())
            self.loss(which).backward()
        self.loss(which).backward()
        self.optimizer.step()

    def abandon(self, which, set_to_none):
        self.loss(which)

    def without_gradients(self, which, set_to_none):
        with torch.no_grad():
            self.loss(which)

    def evaluate(self, which, set_to_none):
        for wrapper in self.wrapped:
            wrapper.eval()
        with torch.no_grad():
            self.loss(which)
        for wrapper in self.wrapped:
            wrapper.train()

    def replace(self, which, set_to_none):
        for model in self.models:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad = p.grad.detach().clone() * 2

    def load(self, which, set_to_none):
        for wrapper, state in zip(self.wrapped, self.start, strict=True):
            wrapper.load_state_dict(state)

    def copy(self, which, set_to_none):
        if self.hook == "none":
            self.wrapped = copy.deepcopy(self.wrapped)
            self.models = [wrapper.module for wrapper in self.wrapped]
            trained = [p for model in self.models for p in model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.SGD(trained, lr=0.05)

    def late_backward(self, which, set_to_none):
        """Leave no_sync() before the backward pass.

        What counts is that the forward pass ran inside.
        """
        self.zero(set_to_none)
        with ExitStack() as contexts:
            for wrapper in self.wrapped:
                contexts.enter_context(wrapper.no_sync())
            loss = self.loss(which)
        loss.backward()

    def two_forwards(self, which, set_to_none):
        self.zero(set_to_none)
        (self.loss(which) + self.loss(which)).backward()
        self.optimizer.step()

    def clip(self, which, set_to_none):
        parameters = [p for model in self.models for p in model.parameters() if p.grad is not None]
        nn.utils.clip_grad_norm_(parameters, 0.1)

    def join(self, which, set_to_none, steps, by_all):
        with self.wrapped[0].join(divide_by_initial_world_size=by_all):
            for _ in range(steps):
                self.train(which, set_to_none)

    def __getattr__(self, name):
        if name == "raise":
            return self.explode
        raise AttributeError(name)

    def explode(self, which, set_to_none, bomb):
        self.zero(set_to_none)
        handle = None
        if bomb == "gradient hook":
            handle = self.models[0].a.bias.register_hook(explode_in_hook)
        try:
            self.loss(which, bomb).backward()
        finally:
            if handle:
                handle.remove()


def explode_in_hook(gradient):
    """Fail, as a gradient hook."""
    raise Explosion("gradient hook")


def difference(number):
    """Play a program with both classes on this rank; say where they differ, None if they do not."""
    theirs, mine = (list(Player(kind, number).play()) for kind in CLASSES)
    for step, (a, b) in enumerate(zip(theirs, mine, strict=False)):
        if (a[1] is None) != (b[1] is None):
            return f"step {step}, {a[0]}: torch {a[1] or 'goes on'}; ours {b[1] or 'goes on'}"
        if a[1] and "Explosion" not in a[1]:
            return None
        for name, value in a[2].items():
            other = b[2][name]
            if (value is None) != (other is None):
                kind = "None" if other is None else "not None"
                return f"step {step}, {a[0]}: {name} is {kind} with ours"
            if value is not None and not torch.equal(value, other):
                return (
                    f"step {step}, {a[0]}: {name} is off by"
                    f" {(value - other).abs().max().item():.2g}"
                )
    return None


def differences(first, count, reached):
    """Return {number: difference} of some programs on this rank."""
    warnings.simplefilter("ignore")
    found = {number: difference(number) for number in counted(first, count, reached)}
    return {number: text for number, text in found.items() if text}


def counted(first, count, reached):
    """Yield the numbers from `first` on.

    The file `reached` has the number of the program that runs.
    """
    for number in range(first, first + count):
        Path(reached).write_text(str(number))
        yield number


# Stage 5 is compared with one device.


def two_branches(draw, widths):
    """Return two models side by side, or by chance one that has a weight of the other's."""
    inner = []
    for _ in range(2):
        layers = [nn.Linear(*size) for size in pairwise(widths)]
        inner.append(nn.Sequential(*layers).double())
    both = nn.Sequential()
    for module in inner:
        both.append(nn.Sequential(module, nn.Linear(widths[-1], widths[0]).double()))
    if draw.random() < 0.3:
        # A weight tied across two wrappers would be averaged twice.
        both[1][1].weight = both[0][1].weight
        return both[:1]
    return both


def step(draw, forward, optimizer, inputs, explodes):
    """Take a step, after a backward pass that fails if it `explodes`."""
    optimizer.zero_grad(set_to_none=draw.random() < 0.5)
    if explodes:
        try:
            Bomb.apply(forward(inputs)).sum().backward()
        except Explosion:
            optimizer.zero_grad()
    forward(inputs).square().mean().backward()
    optimizer.step()


def stage5_difference(number):
    """Train a random model by stage 5 and on one device; return how far the weights are apart."""
    draw = random.Random(number)
    world_size = dist.get_world_size()
    rank = dist.get_rank()
    torch.manual_seed(number)
    widths = [draw.randint(1, 9) for _ in range(draw.randint(2, 5))]
    both = two_branches(draw, widths)
    alone = copy.deepcopy(both)
    all_reduce = draw.choice([ring_all_reduce, *EVERY.values()])
    cap = draw.choice([25.0, 0.0001, 0.0003])
    wrapped = [BucketedDDP(module, cap, all_reduce=all_reduce) for module in both]
    optimizer = torch.optim.SGD(both.parameters(), lr=0.05, momentum=0.9)
    optimizer_alone = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for place in range(draw.randint(1, 4)):
        generator = torch.Generator().manual_seed(place)
        whole = torch.randn(2 * world_size, widths[0], generator=generator).double()
        explodes = draw.random() < 0.2
        step(draw, nn.Sequential(*wrapped), optimizer, whole[rank::world_size], explodes)
        step(draw, alone, optimizer_alone, whole, explodes)
    errors = []
    for parameter, expected in zip(both.parameters(), alone.parameters(), strict=True):
        errors.append((parameter - expected).abs().max().item())
    return f"stage 5 is off by {max(errors):.2g}" if max(errors) > 1e-12 else None


# The collectives are compared with dist.all_reduce.

EVERY = {
    "ring": ring_all_reduce,
    "whole ring": whole_gradient_ring,
    **ALL_REDUCES,
}


def collective_difference(number, groups):
    """Sum integers of a random shape, stride and type in one or two threads.

    Each thread has a group of its own.
    """
    draw = random.Random(number)
    rank = dist.get_rank()
    threads = []
    found = []
    for group in groups[: draw.randint(1, 2)]:
        shape = [draw.randint(0, 6) for _ in range(draw.randint(0, 3))]
        dtype = draw.choice([torch.float32, torch.float64, torch.int64, torch.bfloat16])
        generator = torch.Generator().manual_seed(100 * number + rank)
        tensor = torch.randint(-8, 8, shape, generator=generator).to(dtype)
        if len(shape) > 1 and draw.random() < 0.5:
            tensor = tensor.transpose(0, -1)
        expected = tensor.clone()
        name = draw.choice(sorted(EVERY))
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            continue
        whole = expected.contiguous()
        dist.all_reduce(whole, group=group)
        threads.append(threading.Thread(target=partial(EVERY[name], tensor, group=group)))
        found.append((name, tensor, whole))
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    wrong = [name for name, tensor, whole in found if not torch.equal(tensor, whole)]
    return f"{wrong} differ from gloo" if wrong else None


def other_differences(first, count, reached):
    """Return {number: difference} of stage 5 and of the collectives."""
    groups = [None, dist.new_group(list(range(dist.get_world_size()))), dist.new_group([0, 1])]
    found = {}
    for number in counted(first, count, reached):
        shuffled = random.Random(number).sample(groups, len(groups))
        found[number] = stage5_difference(number) or collective_difference(number, shuffled)
    return {number: text for number, text in found.items() if text}


def run(play, first, count, world_size, batch=100, timeout=300.0):
    """Play `count` programs, `batch` per launch; return {number: error}.

    A program that hangs counts as wrong.
    """
    wrong = {}
    start = first
    end = first + count
    while start < end:
        size = min(batch, end - start)
        with tempfile.NamedTemporaryFile("r") as reached:
            try:
                for found in launch(
                    play, start, size, reached.name, world_size=world_size, timeout=timeout
                ):
                    wrong |= found
            except LaunchError as error:
                size = int(reached.read() or start) + 1 - start
                wrong[start + size - 1] = str(error)[-600:]
                wrong |= run(play, start, size - 1, world_size, batch, timeout)
        start += size
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="launches beside each other")
    args = parser.parse_args()
    started = time.time()
    played = 0
    failed = 0
    parts = [
        (play, first, min(50, args.first + args.count - first))
        for first in range(args.first, args.first + args.count, 50)
        for play in (differences, other_differences)
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = {pool.submit(run, *part, args.world_size, timeout=300.0): part for part in parts}
        for future in as_completed(futures):
            play, _, count = futures[future]
            played, failed = played + count, failed + len(future.result())
            for number, text in future.result().items():
                print(f"{play.__name__} {number}: {text}", flush=True)
            print(f"{played} programs, {failed} wrong, {time.time() - started:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
