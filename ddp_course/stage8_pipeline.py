"""Stage 8: the model is split, not the data. Each rank holds a few layers, and micro-batches stream through.

Rank s computes stage s of the model. With one batch at a time, all ranks but one would wait; cut into M
micro-batches, the ranks work on different ones at once. Two schedules, here for K = 3 and M = 4, with a backward
pass (B) twice as long as a forward pass (F):

    GPipe   rank 0   F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
            rank 1   .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
            rank 2   .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3
    1F1B    rank 0   F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
            rank 1   .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
            rank 2   .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3

In both a rank idles for (K-1)/(M+K-1) of the time, the bubble. GPipe keeps the activations of M micro-batches
until their backward pass, 1F1B (one forward, one backward) those of at most K-s. Only activations and their
gradients travel, to the neighbours. The gradients of all micro-batches add up to those of the whole batch.

Sources: Huang et al., GPipe, NeurIPS 2019; Narayanan et al., PipeDream, SOSP 2019, and Megatron-LM, SC 2021.
"""

from collections import deque
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from .running import wire
from .stage3_paramserver import broadcast_parameters, gradients
from .stage4_ring import average_on_ring
from .stage7_sharded.clipping import LocalGradient, clip_grad_norm_

broken: WeakKeyDictionary = WeakKeyDictionary()  # the groups in which a step broke off, and by what
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Instruction(NamedTuple):
    """One thing for a rank to do: run the "forward" or the "backward" pass of a micro-batch (0 to M-1)."""

    action: str
    microbatch: int


def gpipe(stages, microbatches):
    """The GPipe schedule, a list of instructions for each rank: all forward passes, then all backward passes."""
    everything = [Instruction("forward", m) for m in range(microbatches)]
    everything += [Instruction("backward", m) for m in range(microbatches)]
    return [list(everything) for _ in range(stages)]


def one_forward_one_backward(stages, microbatches):
    """The 1F1B schedule, a list of instructions for each rank: as few forward passes ahead as keep all ranks busy."""
    schedule = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, microbatches)  # the forward passes before the first backward pass
        instructions = [Instruction("forward", m) for m in range(ahead)]
        for m in range(microbatches - ahead):
            instructions += [Instruction("forward", ahead + m), Instruction("backward", m)]
        instructions += [Instruction("backward", m) for m in range(microbatches - ahead, microbatches)]
        schedule.append(instructions)
    return schedule


def bubble(stages, microbatches):
    """The share (0 to 1) of the time that a rank idles in either schedule: (K-1)/(M+K-1)."""
    return (stages - 1) / (microbatches + stages - 1)


def timetable(schedule, forward=1.0, backward=2.0):
    """When each rank does what, if messages took no time: a list of (instruction, start, end) for each rank.

    `forward` and `backward` are the times of one pass, in any unit. Raises ValueError for a schedule in which the
    ranks wait for each other in a circle, or a micro-batch lacks a pass.
    """
    check_schedule(schedule)
    done, rows, left = {}, [[] for _ in schedule], [deque(instructions) for instructions in schedule]
    while any(left):
        heads = [(stage, queue[0]) for stage, queue in enumerate(left) if queue]
        ready = [stage for stage, head in heads if _before(stage, head, len(schedule)) <= done.keys()]
        if not ready:
            raise ValueError("the ranks of this schedule wait for each other in a circle")
        for stage in ready:
            instruction = left[stage].popleft()
            needed = [done[key] for key in _before(stage, instruction, len(schedule))]
            start = max([row[2] for row in rows[stage][-1:]] + needed + [0.0])
            end = start + (forward if instruction.action == "forward" else backward)
            done[stage, instruction] = end
            rows[stage].append((instruction, start, end))
    return rows


def check_schedule(schedule):
    """Raise ValueError unless every rank runs each micro-batch forward once and then backward once, in order."""
    count = len(schedule[0]) // 2
    for stage, instructions in enumerate(schedule):
        for action in ("forward", "backward"):
            order = [instruction.microbatch for instruction in instructions if instruction.action == action]
            if order != list(range(count)):
                raise ValueError(
                    f"rank {stage} runs {action} on micro-batches {order}, not on 0 to {count - 1} in order"
                )
        for m in range(count):
            if instructions.index(Instruction("backward", m)) < instructions.index(Instruction("forward", m)):
                raise ValueError(f"rank {stage} runs micro-batch {m} backward before forward")


def _before(stage, instruction, stages):
    """The (stage, instruction) pairs that must be over before this one can start."""
    action, m = instruction
    if action == "forward":
        return {(stage - 1, instruction)} if stage > 0 else set()
    own = {(stage, Instruction("forward", m))}
    return own | ({(stage + 1, instruction)} if stage < stages - 1 else set())


def layers_of(model):
    """The model as a list of modules to run one after the other: `model.layers()` if it has that, else its children.

    Raises ValueError for a model that is neither a Sequential nor has `layers()`.
    """
    if isinstance(model, torch.nn.Sequential):
        return list(model)
    if not callable(getattr(model, "layers", None)):
        raise ValueError(f"a pipeline needs a Sequential, or a model with layers(); {type(model).__name__} is neither")
    return list(model.layers())


def split(layers, stages):
    """Cut `layers` into `stages` Sequentials with parameters in all of them, as evenly as can be (least squares).

    Raises ValueError if there are too few layers with parameters, or if two stages would share a parameter.
    """
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    best = {0: (0, [])}  # layers used -> (sum of squared sizes, where each stage starts)
    for _ in range(stages):
        best = {
            end: min((best[start][0] + sum(sizes[start:end]) ** 2, [*best[start][1], start]) for start in starts)
            for end in range(1, len(layers) + 1)
            if (starts := [start for start in best if start < end and sum(sizes[start:end])])
        }
    if len(layers) not in best:
        most = sum(size > 0 for size in sizes)
        raise ValueError(f"{most} layers with parameters cannot be split over {stages} ranks; use at most {most} ranks")
    cuts = best[len(layers)][1]
    parts = [torch.nn.Sequential(*layers[start:end]) for start, end in zip(cuts, [*cuts[1:], len(layers)], strict=True)]
    if sum(len(list(part.parameters())) for part in parts) > len(list(torch.nn.ModuleList(layers).parameters())):
        raise ValueError("two stages would share a parameter; a pipeline cannot keep it the same on both")
    return parts


def answers_before(instructions, action):
    """How many of our messages a neighbour with these `instructions` needs before each of its own.

    Its `action` m ("forward" or "backward") sends us message m; the other action needs one of ours.
    """
    answers, needed = 0, []
    for instruction in instructions:
        if instruction.action == action:
            needed.append(answers)
        else:
            answers += 1
    return needed


class Inbox:
    """Messages of known shapes from one neighbour, in order, with one receive posted ahead where that can do no harm.

    NCCL works through messages in the order in which they were posted, so a receive must not be posted before the
    messages that its sender waits for: `needed[m]` of ours before its message m.
    """

    def __init__(self, src, shapes, dtype, device, needed, group=None):
        self.src, self.shapes, self.dtype, self.device, self.group = src, deque(shapes), dtype, device, group
        self.needed, self.posted = deque(needed), deque()

    def post(self):
        """Post the receive of the next message."""
        self.needed.popleft()
        room = torch.empty(self.shapes.popleft(), dtype=self.dtype, device=self.device)
        self.posted.append(wire.irecv(room, self.src, self.group))

    def look_ahead(self, sent):
        """Post the next receive, unless one is posted, or its sender needs more than the `sent` messages so far."""
        if not self.posted and self.needed and sent >= self.needed[0]:
            self.post()

    def take(self, sent):
        """Wait for the next message and return it; we have sent `sent` messages to its sender."""
        if not self.posted:
            self.post()
        arriving = self.posted.popleft()
        self.look_ahead(sent)
        with wire.span("wait"):
            arriving.wait()
        return arriving.tensor


class Received(torch.autograd.Function):
    """Where the part of the graph on this rank begins: its output is what came in, its gradient is left in `letter`."""

    @staticmethod
    def forward(ctx, letter, start):
        """`letter` holds the tensor; `start` requires a gradient, so that backward comes here."""
        ctx.letter = letter
        return letter.pop()

    @staticmethod
    def backward(ctx, gradient):
        """Keep the gradient for the rank before."""
        ctx.letter.append(gradient)
        return None, None


class Pipeline:
    """Runs batches through the stages of a model, of which this rank (of `group`) holds one, the module `stage`.

    `loss(outputs, targets)` must be a mean over samples. Activations, one tensor, may have any shape that only differs
    in the first dimension, the samples. `most_kept` is the greatest number of micro-batches whose activations this
    rank held at once. With NCCL the gradients need a `gradient_group` of their own, so that the two directions do not
    wait for each other. Raises ValueError for a schedule that cannot work.
    """

    def __init__(
        self,
        stage,
        microbatches=4,
        schedule=one_forward_one_backward,
        loss=cross_entropy,
        group=None,
        gradient_group=None,
    ):
        if microbatches < 1:
            raise ValueError(f"microbatches is {microbatches}; it must be 1 or more")
        self.stage, self.microbatches, self.loss = stage, microbatches, loss
        self.group, self.gradient_group = group, gradient_group or group
        self.rank, self.world_size, self.left, self.right = wire.neighbours(group)
        self.first, self.last = self.rank == 0, self.rank == self.world_size - 1
        everyone = schedule(self.world_size, microbatches)
        timetable(everyone)  # raises if it cannot work
        self.instructions = everyone[self.rank]
        self.needed_by_left = [] if self.first else answers_before(everyone[self.rank - 1], "forward")
        self.needed_by_right = [] if self.last else answers_before(everyone[self.rank + 1], "backward")
        self.form_in = self.form_out = None  # (dtype, shape of one sample) of what comes in and goes out
        self.most_kept = 0

    def step(self, inputs, targets):
        """Add the gradients of one batch to the parameters of this stage; return the loss, None but on the last rank.

        Every rank is given the same batch: the first works with its inputs, the last with its targets. After an
        exception in the middle of a step there is no other, of this pipeline or of another on the same group: messages
        of the broken step would be taken for its own.
        """
        group = self.group or dist.group.WORLD
        if group in broken:
            raise RuntimeError(
                f"an earlier step of a pipeline of these ranks ended with {broken[group]} while messages were on their "
                "way, and the other ranks still wait for theirs: start the ranks again"
            )
        if len(targets) < self.microbatches:
            raise ValueError(f"a batch of {len(targets)} cannot be cut into {self.microbatches} micro-batches")
        self.inputs, self.targets = inputs.tensor_split(self.microbatches), targets.tensor_split(self.microbatches)
        self.kept, self.leaving, self.returning = {}, {}, deque()
        self.total, self.sent_right, self.sent_left = 0, 0, 0
        try:
            self.run()
        except BaseException as error:
            broken[group] = f"{type(error).__name__}: {error}"
            raise
        self.guard_gradients()
        return float(self.total) if self.last else None

    def run(self):
        """Go through the instructions of this rank."""
        if not self.first:
            self.activations = self.inbox(self.left, self.incoming_form(), self.needed_by_left, self.group)
        for action, microbatch in self.instructions:
            (self.forward if action == "forward" else self.backward)(microbatch)
            self.most_kept = max(self.most_kept, len(self.kept))
            if not self.first:
                self.activations.look_ahead(self.sent_left)
            if not self.last:
                self.gradients.look_ahead(self.sent_right)
        for transfer in self.returning:
            transfer.wait()

    def inbox(self, src, form, needed, group):
        """The messages of one batch from a neighbour: one a micro-batch."""
        dtype, shape = form
        shapes = [(len(part), *shape) for part in self.targets]
        return Inbox(src, shapes, dtype, self.inputs[0].device, needed, group)

    def forward(self, microbatch):
        """Receive the activations, compute, send the result on. The last rank computes the loss instead."""
        if self.first:
            letter, inputs = None, self.inputs[microbatch]
        else:
            letter = [self.activations.take(self.sent_left)]
            inputs = Received.apply(letter, torch.empty(0, requires_grad=True))
        outputs = self.stage(inputs)
        if self.last:
            part = self.targets[microbatch]
            outputs = self.loss(outputs, part) * (len(part) / sum(map(len, self.targets)))
            self.total += outputs.detach()
        else:
            self.send_on(outputs, microbatch)
        self.kept[microbatch] = letter, inputs.shape, outputs

    def send_on(self, outputs, microbatch):
        """Send activations to the next rank, and expect their gradients from it."""
        if not isinstance(outputs, torch.Tensor):
            raise ValueError(
                f"the stage on rank {self.rank} returns a {type(outputs).__name__}, but one tensor can be passed on: "
                "cut the model where a single tensor goes from layer to layer"
            )
        message = outputs.detach().contiguous()
        self.announce_form(message)
        self.leaving[microbatch] = wire.isend(message, self.right, self.group)
        self.sent_right += 1
        if self.sent_right == 1:
            self.gradients = self.inbox(self.right, self.form_out, self.needed_by_right, self.gradient_group)

    def backward(self, microbatch):
        """Receive the gradient of the activations sent, go backward from it, send the gradient of those received."""
        gradient = None
        if not self.last:
            gradient = self.gradients.take(self.sent_right)
            self.leaving.pop(microbatch).wait()  # what has come back has also arrived
        letter, shape, outputs = self.kept.pop(microbatch)
        if outputs.requires_grad:  # not if the first stages are frozen
            outputs.backward(gradient)
        if not self.first:
            returned = letter[0] if letter else torch.zeros(shape, dtype=self.form_in[0], device=self.inputs[0].device)
            self.returning.append(wire.isend(returned.contiguous(), self.left, self.gradient_group))
            self.sent_left += 1
            if len(self.returning) > self.world_size:
                self.returning.popleft().wait()

    def guard_gradients(self):
        """The norm of these gradients is not that of the model's: who asks for it is told to use `clip_grad_norm_`."""
        for parameter in self.stage.parameters():
            if parameter.grad is not None:
                parameter.grad = LocalGradient.mark(parameter.grad, self.world_size)

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale the gradients of all stages so that their norm is at most `max_norm`; return it. All ranks call it."""
        return clip_grad_norm_(self.stage.parameters(), max_norm, norm_type, self.group, self.inputs[0].device)

    def announce_form(self, message):
        """Before the very first message, tell the next rank what it will look like; later ones must look the same."""
        form = message.dtype, tuple(message.shape[1:])
        if self.form_out is None:
            if form[0] not in DTYPES or len(form[1]) > 14:
                raise ValueError(f"activations of {form[0]} cannot be passed on; choose one of {DTYPES}")
            self.form_out = form
            header = torch.zeros(16, dtype=torch.int64, device=message.device)
            header[: 2 + len(form[1])] = torch.tensor([DTYPES.index(form[0]), len(form[1]), *form[1]])
            wire.send(header, self.right, self.group)
        if form != self.form_out:
            raise ValueError(f"activations of {form} after those of {self.form_out}: their shape must stay the same")

    def incoming_form(self):
        """What the messages of the rank before look like, asked for once."""
        if self.form_in is None:
            header = torch.zeros(16, dtype=torch.int64, device=self.inputs[0].device)
            wire.recv(header, self.left, self.group)
            kind, dimensions, *shape = header.tolist()
            self.form_in = DTYPES[kind], tuple(shape[:dimensions])
        return self.form_in


def grid(stages):
    """Arrange all ranks as pipelines of `stages` ranks beside each other: rank = replica x stages + stage.

    Returns three groups of this rank: its pipeline, the same again for the gradients, and the ranks of all replicas
    that hold the same stage. Raises ValueError unless `stages` divides the world size.
    """
    world_size = dist.get_world_size()
    if stages < 1 or world_size % stages:
        raise ValueError(f"{world_size} ranks cannot form pipelines of {stages}; choose a divisor of {world_size}")
    pipelines = [list(range(start, start + stages)) for start in range(0, world_size, stages)]
    same_stage = [list(range(stage, world_size, stages)) for stage in range(stages)]
    made = [dist.new_subgroups_by_enumeration(ranks)[0] for ranks in (pipelines, pipelines, same_stage)]
    return tuple(made)


def average_part(part, group):
    """Average the gradients of one stage over the replicas that hold it; a frozen stage has none."""
    if any(parameter.requires_grad for parameter in part.parameters()):
        average_on_ring(gradients(part), group=group)


def share_parts(parts, losses, group):
    """Give every rank of a pipeline all trained parts and the losses, which only the last rank knows."""
    for stage, part in enumerate(parts):
        broadcast_parameters(part, src=stage, group=group)
    record = torch.nn.Module()
    known = dist.get_rank(group) == len(parts) - 1
    numbers = torch.tensor(losses if known else [0.0] * len(losses), dtype=torch.float64)
    record.register_buffer("losses", numbers.to(next(parts[0].parameters()).device))
    broadcast_parameters(record, src=len(parts) - 1, group=group)
    return record.losses.tolist()


def train(model, batches, lr, stages=None, microbatches=4, schedule=one_forward_one_backward):
    """Train `model` in place as a pipeline of `stages` ranks (default: all); return the loss of every step.

    Each rank trains its part, and at the end all ranks have the whole model. With fewer stages than ranks there are
    several pipelines side by side, and `batches` are the share of this rank's pipeline.
    """
    pipeline_group, gradient_group, data_group = grid(stages or dist.get_world_size())
    broadcast_parameters(model)
    parts = split(layers_of(model), dist.get_world_size(pipeline_group))
    part = parts[dist.get_rank(pipeline_group)]
    pipeline = Pipeline(part, microbatches, schedule, group=pipeline_group, gradient_group=gradient_group)
    optimizer = SGD(part.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = pipeline.step(inputs, targets)
        average_part(part, data_group)
        optimizer.step()
        losses.append(loss)
    return share_parts(parts, losses, pipeline_group)
