"""Stage 8: the model is split, not the data. Each rank holds a few layers, and micro-batches stream
through.

Rank r computes stage r of the model. With one batch at a time, all ranks but one would wait; cut
into M micro-batches, the ranks work on different ones at once. A schedule lists what each rank
does, in order. Three schedules, here for K = 3 and M = 4, with a backward pass (B) twice as long as
a forward pass (F). The last one splits it: B computes the gradient of the stage's input, for which
the rank before waits, and W that of the weights.

    GPipe          F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
                   .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
                   .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3
    1F1B           F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
                   .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
                   .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3
    zero bubble    F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
                   .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
                   .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

In GPipe and 1F1B (one forward, one backward) a rank idles for (K-1)/(M+K-1) of the time, the
bubble; zero bubble's is (K-1)/(3M+K-1). GPipe keeps the activations of M micro-batches, 1F1B those
of at most K-r, zero bubble those of at most K. The interleaved schedule gives every rank several
thin stages, r, r+K, r+2K…: with two the bubble is half as long, and twice as many messages travel.
The gradients of all micro-batches add up to those of the whole batch.

Sources: Huang et al., GPipe, NeurIPS 2019; Narayanan et al., PipeDream, SOSP 2019, and Megatron-LM,
SC 2021 (interleaved); Qi et al., Zero bubble pipeline parallelism, ICLR 2024.
"""

from collections import Counter, defaultdict, deque
from functools import cache, partial
from itertools import pairwise, zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from .mesh import mesh
from .running import flight_recorder, wire
from .running.communication import together
from .running.torch_inside import twin
from .stage3_paramserver import broadcast_parameters, gradients
from .stage4_ring import average_on_ring
from .stage6_ddp.unused import graph_behind
from .stage7_sharded.clipping import clip_grad_norm_
from .stage7_sharded.parts import Part

group_of_two = cache(twin)  # two ranks make their group only once per process group
WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "BucketedDDP"}


class Instruction(NamedTuple):
    """One thing for a rank to do with a micro-batch (0 to M-1) at a `stage` (0 to the number of
    stages - 1).

    `action` is "forward" or "backward"; or, for a backward pass in two parts, "input" and later
    "weight".
    """

    action: str
    microbatch: int
    stage: int

    @property
    def result(self):
        """The instruction whose result other stages need: of a whole backward pass they need the
        first part only.
        """
        return self._replace(action="input") if self.action == "backward" else self

    @property
    def user(self):
        """The stage that needs the result: the next one, the one before, or the same."""
        return self.stage + {"forward": 1, "weight": 0}.get(self.action, -1)

    @property
    def cut(self):
        """The stage before the cut that the result crosses; a gradient has the shape of the
        activation there.
        """
        return min(self.stage, self.user)


def gpipe(ranks, microbatches):
    """The GPipe schedule, a list of instructions for each rank: all forward passes, then all
    backward passes.
    """
    passes = [(action, m) for action in ("forward", "backward") for m in range(microbatches)]
    return [[Instruction(*each, rank) for each in passes] for rank in range(ranks)]


def one_forward_one_backward(ranks, microbatches):
    """The 1F1B schedule, a list of instructions for each rank: as few forward passes ahead as keep
    all ranks busy.
    """
    places = [[(m, rank) for m in range(microbatches)] for rank in range(ranks)]
    return [alternate(own, own, ahead=ranks - 1 - rank) for rank, own in enumerate(places)]


def interleaved(ranks, microbatches, chunks=2):
    """1F1B with `chunks` stages on every rank: groups of K micro-batches go around all the ranks
    once for each chunk.

    Raises ValueError unless the number of micro-batches is a multiple of K.
    """
    if microbatches % ranks:
        raise ValueError(
            f"{microbatches} micro-batches cannot go around {ranks} ranks; use a multiple of"
            f" {ranks}"
        )
    groups = range(0, microbatches, ranks)
    order = [
        (first + m, chunk) for first in groups for chunk in range(chunks) for m in range(ranks)
    ]
    schedule = []
    for rank in range(ranks):
        forward = [(m, rank + ranks * chunk) for m, chunk in order]
        backward = [(m, rank + ranks * (chunks - 1 - chunk)) for m, chunk in order]
        schedule.append(
            alternate(forward, backward, ahead=2 * (ranks - 1 - rank) + ranks * (chunks - 1))
        )
    return schedule


def alternate(forward, backward, ahead):
    """Order two lists of (micro-batch, stage): `ahead` forward passes, then one forward and one
    backward in turn.
    """
    row = [Instruction("forward", *place) for place in forward[:ahead]]
    for there, back in zip_longest(forward[ahead:], backward):
        row += [Instruction("forward", *there)] if there else []
        row.append(Instruction("backward", *back))
    return row


def zero_bubble(ranks, microbatches, schedule=one_forward_one_backward):
    """`schedule` with its backward passes split: rank r computes the weights' gradients r
    micro-batches later.

    This fills the time in which the rank would wait for a gradient. With 1F1B this is ZB-H1 of the
    paper.
    """
    rows = []
    for rank, whole in enumerate(schedule(ranks, microbatches)):
        row, later = [], deque()
        for instruction in whole:
            row.append(instruction.result)
            if instruction.action == "backward":
                later.append(instruction._replace(action="weight"))
            if len(later) > rank:
                row.append(later.popleft())
        rows.append([*row, *later])
    return rows


def bubble(ranks, microbatches, chunks=1):
    """The share (0 to 1) of the time that a rank idles, in GPipe and 1F1B, and with `chunks`
    interleaved stages.
    """
    return (ranks - 1) / (chunks * microbatches + ranks - 1)


def timetable(schedule, forward=1.0, backward=2.0, message=0.0):
    """When each rank does what: a list of (instruction, start, end) for each rank.

    `forward` and `backward` are the times of a pass, in any unit; "input" and "weight" take half of
    the latter each. `message` is the time of a message to another rank; a link carries one at a
    time. All may be lists of times: one for each stage, and one message time for each cut. Raises
    ValueError for a schedule that cannot work.
    """
    homes = home_ranks(schedule)
    forward, backward, message = (
        [times] * len(homes) if isinstance(times, int | float) else times
        for times in (forward, backward, message)
    )
    half = [times / 2 for times in backward]
    durations = {"forward": forward, "backward": backward, "input": half, "weight": half}
    waiting, rows = [deque(instructions) for instructions in schedule], [[] for _ in schedule]
    known = {
        (None, rank): 0.0 for rank in range(len(schedule))
    }  # {(instruction, rank): when the rank has its result}
    links = defaultdict(float)  # {(from rank, to rank): when the link is free again}
    while any(waiting):
        left = sum(map(len, waiting))
        for rank, queue in enumerate(waiting):
            while queue and (needed := (source(queue[0], homes), rank)) in known:
                instruction = queue.popleft()
                start = max([known[needed], *(end for _, _, end in rows[rank][-1:])])
                end = start + durations[instruction.action][instruction.stage]
                rows[rank].append((instruction, start, end))
                peer, known[instruction.result, rank] = homes.get(instruction.user, rank), end
                if peer != rank:
                    links[rank, peer] = max(links[rank, peer], end) + message[instruction.cut]
                    known[instruction.result, peer] = links[rank, peer]
        if left == sum(map(len, waiting)):
            heads = [
                f"rank {rank} at {tuple(queue[0])}" for rank, queue in enumerate(waiting) if queue
            ]
            raise ValueError(
                f"the ranks of this schedule wait for each other in a circle: {', '.join(heads)}"
            )
    return rows


def source(instruction, stages):
    """The instruction of a neighbour among `stages` whose result `instruction` needs; None if it
    needs none.
    """
    action, microbatch, stage = instruction.result
    neighbour = {"forward": stage - 1, "input": stage + 1}.get(action)
    return Instruction(action, microbatch, neighbour) if neighbour in stages else None


def home_ranks(schedule):
    """The rank of every stage: {stage: rank}. Raises ValueError unless each micro-batch runs once
    at every stage.
    """
    homes = {
        stage: rank for rank, instructions in enumerate(schedule) for _, _, stage in instructions
    }
    stages, microbatches = range(max(homes) + 1), {each.microbatch for each in schedule[0]}
    done = {(m, stage, homes.get(stage)): [] for m in microbatches for stage in stages}
    for rank, instructions in enumerate(schedule):
        for action, microbatch, stage in instructions:
            done.setdefault((microbatch, stage, rank), []).append(action)
    for (microbatch, stage, _), actions in done.items():
        if actions not in (["forward", "backward"], ["forward", "input", "weight"]):
            actions = " and ".join(actions) or "nothing"
            raise ValueError(
                f"micro-batch {microbatch} runs {actions} at stage {stage}; it must run forward and"
                " then backward on one rank, or forward, input and weight"
            )
    return dict(sorted(homes.items()))


def layers_of(model):
    """The model as a list of modules to run one after the other; ValueError if it has neither
    children nor layers().
    """
    if isinstance(model, torch.nn.Sequential):
        return list(model)
    if not callable(getattr(model, "layers", None)):
        raise ValueError(
            f"a pipeline needs a Sequential, or a model with layers(); {type(model).__name__} is"
            " neither"
        )
    return list(model.layers())


def split(layers, stages):
    """Cut `layers` into `stages` Sequentials with parameters in all of them, as evenly as can be
    (least squares).

    Raises ValueError if too few layers have parameters, or if two stages would share a parameter or
    a buffer.
    """
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    best = {0: (0, [])}  # {number of layers: (sum of squared sizes, where each stage starts)}
    for _ in range(stages):
        best = {
            end: min(
                (best[start][0] + sum(sizes[start:end]) ** 2, [*best[start][1], start])
                for start in starts
            )
            for end in range(1, len(layers) + 1)
            if (starts := [start for start in best if start < end and sum(sizes[start:end])])
        }
    if len(layers) not in best:
        most = sum(size > 0 for size in sizes)
        raise ValueError(
            f"{most} layers with parameters cannot be split over {stages} ranks; use at most {most}"
            " ranks"
        )
    cuts = [*best[len(layers)][1], len(layers)]
    parts = [torch.nn.Sequential(*layers[start:end]) for start, end in pairwise(cuts)]
    owners = Counter(tensor for part in parts for tensor in {*part.parameters(), *part.buffers()})
    if any(count > 1 for count in owners.values()):
        raise ValueError(
            "two stages would share a parameter or a buffer; a pipeline cannot keep it the same on"
            " both"
        )
    return parts


def backward_input(start, outputs, gradient):
    """The first part of a backward pass: from the gradient of `outputs` to that of `start`, and not
    to the weights.

    Returns the second part as arguments of `torch.autograd.backward`: from the gradients that came
    to a function to the weights that it uses. Where a weight is used twice, the second part goes
    through the whole graph again.
    """
    if start is None:  # no rank waits for a gradient of the first stage
        return [{"tensors": outputs, "grad_tensors": gradient}]
    incoming, (functions, leaves) = {}, graph_behind([outputs.grad_fn])
    hooks = [
        function.register_prehook(partial(incoming.__setitem__, function)) for function in functions
    ]
    torch.autograd.backward(outputs, gradient, retain_graph=True, inputs=[start])
    for hook in hooks:
        hook.remove()
    beside = {function: graph_behind([function], incoming)[1] - {start} for function in incoming}
    if sum(map(len, beside.values())) != len(leaves - {start}):
        return [{"tensors": outputs, "grad_tensors": gradient, "inputs": [*leaves - {start}]}]
    rest = []
    for function, weights in beside.items():
        edges = {
            GradientEdge(function, n): each
            for n, each in enumerate(incoming[function])
            if each is not None
        }
        if weights and edges:
            rest.append(
                {"tensors": [*edges], "grad_tensors": [*edges.values()], "inputs": [*weights]}
            )
    return rest


class Pipeline:
    """Runs batches through the stages of a model, of which this rank (of `group`) holds some.

    `stages` is this rank's module, or a list of them where the schedule has several stages on a
    rank. `loss(outputs, targets)` must be a mean over samples. Activations, one tensor, may have
    any shape whose first dimension is the samples. BatchNorm takes the statistics of one
    micro-batch after the other, as in torch's pipelines. `most_kept` is the greatest number of
    micro-batches whose activations this rank held at once, counted at each stage. Raises ValueError
    for a schedule that cannot work, or modules that do not belong to it.
    """

    def __init__(
        self,
        stages,
        microbatches=4,
        schedule=one_forward_one_backward,
        loss=cross_entropy,
        group=None,
    ):
        if microbatches < 1:
            raise ValueError(f"microbatches is {microbatches}; it must be 1 or more")
        self.microbatches, self.loss, self.group = microbatches, loss, group or dist.group.WORLD
        self.rank, self.schedule = (
            dist.get_rank(group),
            schedule(dist.get_world_size(group), microbatches),
        )
        timetable(self.schedule)  # it raises if the schedule cannot work
        self.homes = home_ranks(self.schedule)
        own = [stage for stage, rank in self.homes.items() if rank == self.rank]
        self.module = torch.nn.ModuleList(
            [stages] if isinstance(stages, torch.nn.Module) else stages
        )
        if len(self.module) != len(own):
            raise ValueError(
                f"rank {self.rank} has stages {own} in this schedule, but {len(self.module)}"
                " modules"
            )
        if wrappers := WRAPPERS & {type(module).__name__ for module in self.module.modules()}:
            raise ValueError(
                f"a stage contains {wrappers.pop()}; leave it out, and call average_part() after"
                " step()"
            )
        self.stages, self.last, self.most_kept = (
            dict(zip(own, self.module, strict=True)),
            max(self.homes),
            0,
        )
        self.forms_of_batch = {}  # {kind of batch: {stage: dtype and shape of its activations}}

    def step(self, inputs, targets):
        """Add the gradients of one batch to the parameters of this rank; return the loss where the
        last stage is.

        Every rank is given the same batch: the first stage works with its inputs, the last with its
        targets; the other ranks return None. After an exception in the middle of a step these ranks
        refuse all further steps.
        """
        if len(inputs) != len(targets) or len(inputs) < self.microbatches:
            lengths = f"{len(inputs)} inputs and {len(targets)} targets"
            raise ValueError(f"{lengths} cannot be cut into {self.microbatches} micro-batches")
        self.samples, self.device, self.total = len(inputs), inputs.device, 0
        self.inputs, self.targets = (
            inputs.tensor_split(self.microbatches),
            targets.tensor_split(self.microbatches),
        )
        self.forms = self.forms_of_batch.setdefault((inputs.dtype, inputs.shape[1:]), {})
        with (
            together(self.group),
            flight_recorder.entry("a pipeline's step with a batch", inputs, self.group),
        ):
            self.run()
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.as_subclass(Part)
        return float(self.total) if self.last in self.stages else None

    def run(self):
        """Go through the instructions of this rank."""
        self.kept, self.here, self.arriving, self.leaving = {}, {}, {}, {}
        # this lists the results that each rank sends to this rank, in the order of sending
        self.expected = {
            rank: deque(
                each.result for each in instructions if self.homes.get(each.user) == self.rank
            )
            for rank, instructions in enumerate(self.schedule)
        }
        for action, microbatch, stage in self.schedule[self.rank]:
            getattr(self, action)(microbatch, stage)
            self.most_kept = max(self.most_kept, len(self.kept))
        for transfer in self.leaving.values():
            transfer.wait()

    def forward(self, microbatch, stage):
        """Compute a stage's outputs from the stage before, and send them on. The last stage
        computes the loss.
        """
        start, inputs = None, self.inputs[microbatch]
        if stage > 0:
            start = self.take(Instruction("forward", microbatch, stage - 1)).requires_grad_()
            inputs = start.clone()  # layers may overwrite their inputs, but not a leaf of the graph
        outputs = self.stages[stage](inputs)
        if stage == self.last:
            outputs = self.loss(outputs, self.targets[microbatch]) * (
                len(self.targets[microbatch]) / self.samples
            )
            self.total += outputs.detach()
        else:
            self.announce(outputs, stage)
            self.send(Instruction("forward", microbatch, stage), outputs.detach().contiguous())
        self.kept[microbatch, stage] = start, outputs

    def backward(self, microbatch, stage, compute=torch.Tensor.backward):
        """Compute the gradients of the stage's weights and input from the gradient of its
        output.
        """
        start, outputs = self.kept.pop((microbatch, stage))
        gradient = self.take(Instruction("input", microbatch, stage + 1))
        rest = (
            compute(outputs, gradient) if outputs.requires_grad else []
        )  # The first stages may be frozen.
        if start is not None:
            towards = torch.zeros_like(start) if start.grad is None else start.grad.contiguous()
            self.send(Instruction("input", microbatch, stage), towards)
        return rest

    def input(self, microbatch, stage):
        """The first part of a backward pass: the gradient of the stage's input. `weight` does the
        second part later.
        """
        first_part = partial(backward_input, self.kept[microbatch, stage][0])
        self.kept[microbatch, stage] = self.backward(microbatch, stage, first_part)

    def weight(self, microbatch, stage):
        """The second part of a backward pass: the gradients of the weights."""
        for part in self.kept.pop((microbatch, stage)):
            torch.autograd.backward(**part)

    def take(self, result):
        """Return what another instruction computed, on this rank or another; None if its stage does
        not exist.
        """
        rank = self.homes.get(result.stage)
        if rank is None or rank == self.rank:
            return self.here.pop(result, None)
        while result not in self.arriving:
            self.post_receive(rank)
        transfer = self.arriving.pop(result)
        if self.expected[rank] and self.expected[rank][0].cut in self.forms:
            self.post_receive(rank)  # The next message may come early.
        with wire.span("wait"):
            transfer.wait()
        if sent := self.leaving.pop(Instruction("forward", result.microbatch, result.cut), None):
            sent.wait()  # the gradient is here, so the activation has arrived
        return transfer.tensor

    def post_receive(self, rank):
        """Begin to receive the next message from `rank`; before the first over a cut, receive its
        dtype and shape.
        """
        result = self.expected[rank].popleft()
        if result.cut not in self.forms:
            form = [None]
            dist.recv_object_list(form, *self.lane(rank), device=self.device)
            self.forms[result.cut] = form[0]
        dtype, shape = self.forms[result.cut]
        room = torch.empty(
            len(self.inputs[result.microbatch]), *shape, dtype=dtype, device=self.device
        )
        self.arriving[result] = wire.irecv(room, *self.lane(rank))

    def announce(self, outputs, stage):
        """Before the first activations for batches of a shape, tell the next rank the activations'
        dtype and shape.
        """
        form = (
            (outputs.dtype, outputs.shape[1:])
            if isinstance(outputs, torch.Tensor)
            else (type(outputs).__name__,)
        )
        if not getattr(form[0], "is_floating_point", False) or form != self.forms.get(stage, form):
            raise ValueError(
                f"stage {stage} on rank {self.rank} returns {form}, but only one tensor of"
                " floating-point numbers can be passed on, of the same dtype and shape for each"
                " micro-batch: cut the model elsewhere"
            )
        if stage not in self.forms and self.homes[stage + 1] != self.rank:
            dist.send_object_list(
                [form], *self.lane(self.homes[stage + 1], leaving=True), device=self.device
            )
        self.forms[stage] = form

    def send(self, result, tensor):
        """Give a result to the instruction that needs it, on this rank or another."""
        rank = self.homes[result.user]
        if rank == self.rank:
            self.here[result] = tensor
        else:
            self.leaving[result] = wire.isend(tensor, *self.lane(rank, leaving=True))

    def lane(self, peer, leaving=False):
        """The global rank of `peer`, and the group for messages to it (`leaving`) or from it.

        NCCL works through a group's messages one after the other, so a message that is waited for
        would hold up all others. So with NCCL two ranks make a group of their own for each
        direction, when its first message is due.
        """
        ends = (self.rank, peer) if leaving else (peer, self.rank)
        separate = wire.on_nccl(self.inputs[0], self.group)
        return wire.global_rank(peer, self.group), (
            group_of_two(self.group, ends) if separate else self.group
        )

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale the gradients of all stages so that their norm is at most `max_norm`; return it.
        All ranks call it.
        """
        return clip_grad_norm_(
            self.module.parameters(), max_norm, norm_type, self.group, self.device
        )


def average_part(part, group):
    """Average the gradients of one stage over the replicas that hold it; a frozen stage has
    none.
    """
    if any(parameter.requires_grad for parameter in part.parameters()):
        average_on_ring(gradients(part), group=group)


def train(model, batches, lr, stages=None, microbatches=4, schedule=one_forward_one_backward):
    """Train `model` in place as a pipeline over `stages` ranks (default: all); return the loss of
    every step.

    Each rank trains its part, and at the end all ranks have the whole model. With fewer stages than
    ranks there are several pipelines side by side, and `batches` are the share of this rank's
    pipeline.
    """
    stages = stages or dist.get_world_size()
    groups = mesh(data=dist.get_world_size() // stages, pipeline=stages)
    broadcast_parameters(model)
    homes = home_ranks(schedule(dist.get_world_size(groups["pipeline"]), microbatches))
    parts = split(layers_of(model), len(homes))
    own = [
        parts[stage] for stage, rank in homes.items() if rank == dist.get_rank(groups["pipeline"])
    ]
    pipeline = Pipeline(own, microbatches, schedule, group=groups["pipeline"])
    optimizer = SGD(pipeline.module.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        losses.append(pipeline.step(inputs, targets))
        average_part(pipeline.module, groups["data"])
        optimizer.step()
    for stage, part in enumerate(parts):
        broadcast_parameters(part, src=homes[stage], group=groups["pipeline"])
    everyones = [losses]
    dist.broadcast_object_list(everyones, group_src=homes[len(parts) - 1], group=groups["pipeline"])
    return everyones[0]
