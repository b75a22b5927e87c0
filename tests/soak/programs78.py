"""Random training programs for stages 7, 7o and 8 against one device.

Call it as `python tests/soak/programs78.py 1000`. A program is a model (tied, frozen, unused,
sometimes used or repeated layers, layers in place or of one parameter, several dtypes), an
optimizer with groups and a schedule, and steps: passes that accumulate, evaluation, clipping,
updates left out, exceptions in forward, backward or a hook on all ranks, state dicts loaded back,
and in the middle a change of the world size, with whole state dicts handed over. Weights, norms and
optimizer states must equal those of one device; programs in which they do not are shown.
"""

import random
import sys
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "support"))

from traps import Boom, Trap

from ddp_course import launch
from ddp_course.stage3_paramserver import broadcast_parameters
from ddp_course.stage7_sharded import FullyShardedDataParallel, ShardedOptimizer
from ddp_course.stage8_pipeline import (
    Pipeline,
    gpipe,
    home_ranks,
    interleaved,
    layers_of,
    one_forward_one_backward,
    split,
    zero_bubble,
)

WIDTH = 6
BATCH = 12
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
}


SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero bubble": zero_bubble,
    "interleaved zero bubble": partial(zero_bubble, schedule=interleaved),
}


class InFloat32(torch.nn.Linear):
    """A float32 layer in a float64 model."""

    def forward(self, inputs):
        """(N, WIDTH) to (N, WIDTH) in float64."""
        return super().forward(inputs.float()).double()


class Twice(torch.nn.Linear):
    """A layer that uses its weights twice, and its bias once more outside the linear function."""

    def forward(self, inputs):
        """(N, WIDTH) to the same."""
        return super().forward(super().forward(inputs).tanh() + self.bias.exp())


class Sometimes(torch.nn.Linear):
    """A layer for some samples only.

    A rank that has none of these samples does not use the layer.
    """

    def forward(self, inputs):
        """(N, WIDTH) to the same."""
        chosen = inputs[:, :1] > 1
        return inputs + chosen * super().forward(inputs) if chosen.any() else inputs


class Net(torch.nn.Module):
    """A chain of layers, and on request a layer that is never used."""

    def __init__(self, layers, unused):
        super().__init__()
        self.chain = torch.nn.Sequential(*layers)
        if unused:
            self.unused = torch.nn.Linear(3, 2).double()

    def layers(self):
        """Return the chain, for a pipeline."""
        return list(self.chain)

    def forward(self, inputs):
        """(N, WIDTH) to (N, WIDTH)."""
        return self.chain(inputs)


# A linear layer is twice as likely as others.
KINDS = (
    "linear",
    "linear",
    "norm",
    "tanh",
    "relu in place",
    "float32",
    "one parameter",
    "sometimes",
    "twice",
    "normalised",
)
CLIPS = (None, None, (0.1, 2.0), (0.02, float("inf")), (0.5, 1.0), (1e6, 2.0))
BOOMS = (None, None, None, "forward", "backward", "hook")


def drawn_layers(chance):
    """Return the kinds of the layers of a program."""
    layers = ["linear", "linear", *chance.choices(KINDS, k=chance.randrange(3, 7)), "linear"]
    # Some layers need their output in backward.
    for index, (before, kind) in enumerate(pairwise(layers), 1):
        if kind == "relu in place" and before in ("tanh", "relu in place", "sometimes"):
            layers[index] = "linear"
    return layers


def drawn_step(chance, stage):
    """Return what happens in a step of a program."""
    step = {
        "passes": chance.choice([1, 1, 2, 3]),
        "evaluate": chance.random() < 0.2,
        "clip": chance.choice(CLIPS),
        "left out": chance.random() < 0.1,
        "boom": None,
    }
    if stage != "8":
        step["boom"] = chance.choice(BOOMS)
    step["reload"] = chance.random() < 0.2
    return step


def drawn(seed, stage):
    """Return the program of this seed for a stage, as plain data."""
    chance = random.Random(f"{seed} {stage}")
    layers = drawn_layers(chance)
    # All ranks must run the same blocks.
    blocks = [] if "sometimes" in layers else chance.choice([None, []])
    if stage == "7" and blocks == []:  # a block has parameters of one dtype
        for index, kind in enumerate(layers):
            if kind == "float32":
                layers[index] = "linear"
    steps = [drawn_step(chance, stage) for _ in range(chance.randrange(2, 6))]
    return {
        "seed": seed,
        "layers": layers,
        "tied": chance.random() < 0.3 and stage != "8",
        "twice": chance.random() < 0.3 and stage != "8",
        "frozen": [index for index in range(len(layers)) if chance.random() < 0.15],
        "unused": chance.random() < 0.3 and stage != "8",
        "optimizer": chance.choice(list(OPTIMIZERS)),
        "groups": chance.random() < 0.5,
        "blocks": blocks,
        "microbatches": chance.choice([1, 2, 4, 6]),
        "schedule": chance.choice(list(SCHEDULES)),
        "steps": steps,
    }


def build(program, stage):
    """Return the model of a program, and its trap.

    If training starts from rank 0's weights, other ranks get other weights.
    """
    starts_from_rank_0 = stage in ("7", "7o")
    torch.manual_seed(program["seed"] + 1000 * dist.get_rank() * starts_from_rank_0)
    make = {
        "linear": lambda: torch.nn.Linear(WIDTH, WIDTH).double(),
        "norm": lambda: torch.nn.LayerNorm(WIDTH).double(),
        "tanh": torch.nn.Tanh,
        "relu in place": lambda: torch.nn.ReLU(inplace=True),
        "float32": lambda: InFloat32(WIDTH, WIDTH),
        "one parameter": lambda: torch.nn.PReLU().double(),
        "sometimes": lambda: Sometimes(WIDTH, WIDTH).double(),
        "twice": lambda: Twice(WIDTH, WIDTH).double(),
        "normalised": lambda: torch.nn.utils.parametrizations.weight_norm(
            torch.nn.Linear(WIDTH, WIDTH)
        ).double(),
    }
    layers = [make[kind]() for kind in program["layers"]]
    trap = Trap()
    for index in program["frozen"]:
        layers[index].requires_grad_(False)
    layers[-1].requires_grad_(True)
    if program["tied"]:
        layers[-1].weight = layers[0].weight
    if program["twice"]:
        layers.insert(2, layers[0])
    layers.insert(len(layers) // 2, trap)
    layers[-1].bias.register_hook(
        lambda gradient: trap.spring(gradient) if trap.place == "hook" else None
    )
    return Net(layers, program["unused"]), trap


class Player:
    """One stage with what a program needs: the wrapped model, the optimizer and its schedule."""

    def __init__(self, program, stage, state=None):
        self.program = program
        self.stage = stage
        self.model, self.trap = build(program, stage)
        if state:
            self.model.load_state_dict(state["model"])
        kind, settings = OPTIMIZERS[program["optimizer"]]
        self.forward = self.model
        if stage == "7":
            self.forward = FullyShardedDataParallel(self.model, blocks=program["blocks"])
        if stage == "8":
            self.pipeline = self.in_stages(dist.get_world_size())
            self.part = self.pipeline.module
            mine = set(self.part.parameters())
            groups = []
            for group in self.groups():
                groups.append({**group, "params": [p for p in group["params"] if p in mine]})
            self.optimizer = kind(groups, lr=0.02, **settings)
        else:
            kind = partial(ShardedOptimizer, optimizer_cls=kind) if stage == "7o" else kind
            self.optimizer = kind(self.groups(), lr=0.02, **settings)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def in_stages(self, world_size):
        """Return the model as a pipeline of one stage per rank, or of two.

        A rank has two where the schedule goes around twice.
        """
        schedule = SCHEDULES[self.program["schedule"]]
        try:
            homes = home_ranks(schedule(world_size, self.program["microbatches"]))
            self.parts = split(layers_of(self.model), len(homes))
        except ValueError:  # this schedule needs more layers, or micro-batches that can go around
            schedule = one_forward_one_backward
            self.parts = split(layers_of(self.model), world_size)
        stages = self.parts[dist.get_rank() :: world_size]
        return Pipeline(
            stages, self.program["microbatches"], schedule, torch.nn.functional.mse_loss
        )

    def groups(self):
        """Return the parameters in two groups with settings of their own, or in one."""
        parameters = list(self.forward.parameters())
        if not self.program["groups"]:
            return [{"params": parameters}]
        return [{"params": parameters[::2], "lr": 0.03}, {"params": parameters[1::2]}]

    def backward(self, inputs, targets):
        """Run one forward and backward pass on this rank's share."""
        if self.stage == "8":
            self.pipeline.step(inputs, targets)
        else:
            share = (
                slice(None)
                if self.stage == "1"
                else slice(dist.get_rank(), None, dist.get_world_size())
            )
            torch.nn.functional.mse_loss(self.forward(inputs[share]), targets[share]).backward()

    def clip(self, max_norm, norm_type):
        """Clip by the norm of all gradients; return it."""
        if self.stage == "1":
            trained = [
                parameter for group in self.optimizer.param_groups for parameter in group["params"]
            ]
            return torch.nn.utils.clip_grad_norm_(trained, max_norm, norm_type).item()
        clipper = {"7": self.forward, "7o": self.optimizer, "8": getattr(self, "pipeline", None)}[
            self.stage
        ]
        return clipper.clip_grad_norm_(max_norm, norm_type).item()

    def state(self):
        """Return the state dicts of model and optimizer, whole.

        A pipeline has no optimizer of the whole.
        """
        if self.stage == "8":
            for stage, part in enumerate(self.parts):
                broadcast_parameters(part, src=stage % dist.get_world_size())
            return {"model": self.model.state_dict(), "optimizer": None}
        if self.stage == "7":
            return {
                "model": self.forward.state_dict(),
                "optimizer": self.forward.optimizer_state_dict(self.optimizer),
            }
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state):
        """Go on from state dicts of any stage and world size.

        Those of a model are loaded before it is sharded.
        """
        if self.stage == "7":
            self.forward.load_optimizer_state_dict(self.optimizer, state["optimizer"])
        else:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])


def play(program, stage, steps, start=None):
    """Play the `steps` (a slice) of a program; return what is compared.

    It goes on from the result `start` of another player.
    """
    player = Player(program, stage, start and start["state"])
    norms = []
    if start:
        player.load(start["state"])
        player.schedule.load_state_dict(start["schedule"])
    for number in range(*steps.indices(len(program["steps"]))):
        step = program["steps"][number]
        generator = torch.Generator().manual_seed(1000 * program["seed"] + number)
        batches = [
            torch.randn(2, BATCH, WIDTH, generator=generator).double()
            for _ in range(step["passes"])
        ]
        if step["boom"]:
            player.trap.place = step["boom"]
            with suppress(Boom):
                player.backward(*batches[0])
            player.trap.place = None
        player.optimizer.zero_grad()
        for inputs, targets in batches:
            player.backward(inputs, targets)
        if step["evaluate"] and stage != "8":
            with torch.no_grad():
                player.forward(batches[0][0])
        if step["clip"]:
            norms.append(player.clip(*step["clip"]))
        if not step["left out"]:
            player.optimizer.step()
        player.schedule.step()
        player.optimizer.zero_grad()
        if step["reload"] and stage != "8":
            player.load(player.state())
    return {"state": player.state(), "schedule": player.schedule.state_dict(), "norms": norms}


def play_all(programs, stage, first=True, starts=None):
    """Play the first or the second half of every program."""
    results = []
    for program, start in zip(programs, starts or [None] * len(programs), strict=True):
        middle = len(program["steps"]) // 2 if stage != "8" else len(program["steps"])
        results.append(play(program, stage, slice(middle) if first else slice(middle, None), start))
    return results


def whole(programs):
    """Return the results of the whole programs on one device."""
    return [play(program, "1", slice(None)) for program in programs]


def numbers(value):
    """Return all tensors and numbers inside, flattened, float64."""
    if isinstance(value, dict):
        return [number for key in value if key != "param_groups" for number in numbers(value[key])]
    if isinstance(value, list | tuple):
        return [number for inside in value for number in numbers(inside)]
    return (
        [torch.as_tensor(value).double().reshape(-1)]
        if isinstance(value, torch.Tensor | float)
        else []
    )


def apart(one, other):
    """Return the greatest difference of two outcomes, relative to 1 or the larger.

    It is infinite if they do not match.
    """
    ours = numbers(one)
    theirs = numbers(other)
    if [part.shape for part in ours] != [part.shape for part in theirs]:
        return float("inf")
    gaps = [(a - b).abs() / b.abs().clamp(min=1) for a, b in zip(ours, theirs, strict=True)]
    return max((gap.max().item() for gap in gaps if gap.numel()), default=0.0)


def tolerance(program):
    """Allow for rounding in the least exact dtype.

    Adam magnifies it where gradients are near zero.
    """
    return 2e-3 if "float32" in program["layers"] else 1e-7


def failures(stage, world_sizes, seeds):
    """Return the programs of `seeds` in which a rank ends elsewhere than one device.

    Each is (program, difference). The ranks train by `stage`.
    """
    programs = [drawn(seed, stage) for seed in seeds]
    expected = launch(whole, programs, world_size=1, timeout=600)[0]
    half = launch(play_all, programs, stage, world_size=world_sizes[0], timeout=600)
    ranks = half
    before = [[] for _ in programs]
    if stage != "8":
        ranks = launch(
            play_all, programs, stage, False, half[0], world_size=world_sizes[1], timeout=600
        )
        before = [one["norms"] for one in half[0]]
    wrong = []
    for number, program in enumerate(programs):
        right = expected[number]
        for rank in ranks:
            got = {
                "model": rank[number]["state"]["model"],
                "norms": before[number] + rank[number]["norms"],
            }
            want = {"model": right["state"]["model"], "norms": right["norms"]}
            if stage != "8":
                got["optimizer"] = rank[number]["state"]["optimizer"]
                want["optimizer"] = right["state"]["optimizer"]
            gap = apart(got, want)
            if not gap <= tolerance(program):
                wrong.append((program, gap))
                break
    return wrong


def main(count):
    """Play `count` programs for each stage and change of world size.

    Return whether any program was wrong.
    """
    bad = 0
    for start in range(0, count, 50):
        for stage, sizes in [
            ("7", (4, 2)),
            ("7", (2, 3)),
            ("7o", (4, 3)),
            ("7o", (2, 4)),
            ("8", (2,)),
            ("8", (3,)),
        ]:
            for program, gap in failures(stage, sizes, range(start, min(start + 50, count))):
                bad += 1
                print(f"stage {stage} on {sizes} ranks is {gap:.2g} off: {program}", flush=True)
        print(f"{min(start + 50, count)} programs a stage, {bad} wrong", flush=True)
    return bad > 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
