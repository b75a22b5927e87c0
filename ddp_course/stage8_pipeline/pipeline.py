"""Runs a pipeline's schedule on the layers of this rank: the class `Pipeline`."""

from functools import partial

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge
from torch.nn.functional import cross_entropy

from manyranks import flight_recorder
from manyranks.torch_inside import without_modes

from ..communication import failing_together
from ..stage3_paramserver import gradients
from ..stage4_ring import average_on_ring
from ..stage6_ddp.unused import graph_behind
from ..stage7_sharded.clipping import clip_grad_norm_
from ..stage7_sharded.flat import whole_on_cpu
from ..stage7_sharded.parts import Part
from .instructions import Backward, BackwardInput, BackwardWeight, Forward
from .schedules import one_forward_one_backward
from .timetable import home_ranks, timetable
from .transfers import Transfers

# These wrappers would average gradients after every micro-batch.
WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "BucketedDDP"}

NO_MEAN = (
    "this loss is no mean over samples, as with ignore_index, class weights or a sum. Tell the"
    " pipeline what the loss divides by: weights=lambda targets: (targets != ignored).sum(), or"
    " class_weights[targets].sum(), or 1 for a sum. A loss that compares samples with each other"
    " (contrastive) needs microbatches=1"
)


class BatchUnderWay:
    """What a pipeline knows of one batch: its micro-batches, its loss so far, and what it keeps."""

    def __init__(self, inputs, targets, pipeline, compares):
        self.inputs = inputs.tensor_split(pipeline.microbatches)
        self.targets = targets.tensor_split(pipeline.microbatches)
        self.weight = float(pipeline.weights(targets))  # Quotients of counts would be float32.
        self.loss = 0
        self.compares = compares  # whether its loss is compared with that of the whole batch
        self.outputs = {}  # {micro-batch: the last stage's outputs}, if it is compared
        self.kept = {}  # {(micro-batch, stage): what its next backward pass needs}
        forms = pipeline.forms.setdefault((inputs.dtype, inputs.shape[1:]), {})
        self.transfers = Transfers(
            pipeline.schedule, pipeline.homes, pipeline.group, self.inputs, forms
        )


class Pipeline:
    """Runs batches through the stages of a model, of which this rank (of `group`) holds some.

    `stages` is this rank's module, or a list of them where the schedule has several stages on a
    rank. `loss(outputs, targets)` is a mean over what `weights(targets)` counts, by default the
    samples; for token means that leave some out, give `lambda targets: (targets != -100).sum()`.
    Activations, one tensor, may have any shape whose first dimension is the samples. BatchNorm
    takes the statistics of one micro-batch after the other, as in torch's pipelines. `most_kept` is
    the greatest number of micro-batches whose activations this rank held at once, counted at each
    stage. Raises ValueError for a schedule that cannot work, or modules that do not belong to it.
    """

    def __init__(
        self,
        stages,
        microbatches=4,
        schedule=one_forward_one_backward,
        loss=cross_entropy,
        group=None,
        weights=len,
    ):
        if not isinstance(microbatches, int) or microbatches < 1:
            raise ValueError(
                f"microbatches is {microbatches!r}; it must be a whole number, 1 or more"
            )
        self.microbatches = microbatches
        self.loss = loss
        self.weights = weights
        self.group = group or dist.group.WORLD
        self.rank = dist.get_rank(group)
        self.schedule = schedule(dist.get_world_size(group), microbatches)
        # This raises an error if the schedule cannot work.
        timetable(self.schedule)
        self.homes = home_ranks(self.schedule)
        self.last = max(self.homes)
        modules = [stages] if isinstance(stages, torch.nn.Module) else stages
        self.module = torch.nn.ModuleList(modules)
        self.stages = self.numbered(self.module)
        for stage in self.module:
            stage.register_state_dict_post_hook(mark_as_parts)
        self.most_kept = 0
        self.steps = 0
        self.batch = None  # the `BatchUnderWay`, or the last one
        self.forms = {}  # {kind of batch: {cut: dtype and shape of a sample's activations}}

    def numbered(self, modules):
        """Return this rank's modules by the numbers of their stages.

        Raises ValueError if they are too many, too few, or wrapped.
        """
        own = [stage for stage, rank in self.homes.items() if rank == self.rank]
        if len(modules) != len(own):
            raise ValueError(
                f"rank {self.rank} has stages {own} in this schedule, but {len(modules)} modules"
            )
        wrappers = WRAPPERS & {type(module).__name__ for module in modules.modules()}
        if wrappers:
            raise ValueError(
                f"a stage contains {wrappers.pop()}; leave it out, and call average_part() after "
                "step()"
            )
        return dict(zip(own, modules, strict=True))

    def step(self, inputs, targets):
        """Add the gradients of one batch to this rank's parameters; return the loss.

        Every rank is given the same batch: the first stage works with its inputs, the last with its
        targets. Ranks without the last stage return None. After an exception in the middle of a
        step the ranks refuse all further steps. Raises ValueError for a batch that is too small,
        and for a loss that is not the mean of its micro-batches' losses.
        """
        if len(inputs) != len(targets) or len(inputs) < self.microbatches:
            lengths = f"{len(inputs)} inputs and {len(targets)} targets"
            raise ValueError(f"{lengths} cannot be cut into {self.microbatches} micro-batches")
        recorded = flight_recorder.entry("a pipeline's step with a batch", inputs, self.group)
        with failing_together(self.group), recorded:
            self.run(inputs, targets)
            if self.batch.outputs:
                self.compare_with_the_whole(targets)
        # No rank has the norm of all gradients, so these are parts: see `Part`.
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.as_subclass(Part)
        return float(self.batch.loss) if self.last in self.stages else None

    def run(self, inputs, targets):
        """Carry out the instructions of this rank, one after the other."""
        # In steps 1, 2, 4, 8, …, and where targets are left out, the loss is compared with the
        # whole's: padding that is an ordinary number may come in later batches only.
        left_out = not targets.is_floating_point() and bool((targets < 0).any())
        self.steps += 1
        is_power_of_two = self.steps.bit_count() == 1
        self.batch = BatchUnderWay(inputs, targets, self, is_power_of_two or left_out)
        for instruction in self.schedule[self.rank]:
            carry_out = self.methods[type(instruction)]
            carry_out(self, instruction)
            self.most_kept = max(self.most_kept, len(self.batch.kept))
        self.batch.transfers.finish()

    def forward(self, instruction):
        """Compute a stage's outputs, and send them on; the last stage computes the loss.

        Raises ValueError for a loss of several numbers.
        """
        microbatch = instruction.microbatch
        stage = instruction.stage
        received = None
        inputs = self.batch.inputs[microbatch]
        if stage > 0:
            received = self.batch.transfers.receive(instruction.needs).requires_grad_()
            # Layers may overwrite their inputs, but not a leaf of a graph.
            inputs = received.clone()
        outputs = self.stages[stage](inputs)
        if stage == self.last:
            outputs = self.loss_of(microbatch, outputs)
            self.batch.loss += outputs.detach()
        else:
            self.batch.transfers.announce(outputs, stage)
            self.batch.transfers.send(instruction.gives, outputs.detach().contiguous())
        self.batch.kept[microbatch, stage] = received, outputs

    def loss_of(self, microbatch, outputs):
        """Return the share of a micro-batch in the loss of the batch.

        Raises ValueError for a loss of several numbers.
        """
        targets = self.batch.targets[microbatch]
        if self.batch.compares and isinstance(outputs, torch.Tensor):
            self.batch.outputs[microbatch] = outputs.detach()
        share = float(self.weights(targets)) / self.batch.weight
        # If all targets are left out, their mean is not a number.
        if not share:
            return outputs.sum() * 0.0
        loss = self.loss(outputs, targets)
        if loss.numel() != 1:
            raise ValueError(
                f"the loss has the shape {tuple(loss.shape)}; a pipeline needs one number,"
                " the mean over the samples"
            )
        return loss * share

    @torch.no_grad()
    def compare_with_the_whole(self, targets):
        """Raise ValueError unless the micro-batches' losses add up to the loss of the whole batch.

        An emulated device takes no time for this, because it is no part of training.
        """
        outputs = [self.batch.outputs[microbatch] for microbatch in range(self.microbatches)]
        with without_modes():
            whole = self.loss(torch.cat(outputs), targets)
            rounding = torch.finfo(whole.dtype).eps ** 0.5
            same = torch.isclose(self.batch.loss, whole, rtol=rounding, atol=rounding)
        if not same and whole.isfinite():
            raise ValueError(
                f"the loss of the batch is {whole:.6g}, but its micro-batches give"
                f" {self.batch.loss:.6g}: {NO_MEAN}"
            )

    def backward(self, instruction):
        """Compute the gradients of the weights and of the input from that of the outputs.

        A `BackwardInput` leaves the weights, and keeps what `backward_weight` needs.
        """
        place = (instruction.microbatch, instruction.stage)
        received, outputs = self.batch.kept.pop(place)
        gradient = self.batch.transfers.receive(instruction.needs)
        if isinstance(instruction, BackwardInput):
            self.batch.kept[place] = backward_to(received, outputs, gradient)
        elif outputs.requires_grad:
            outputs.backward(gradient)
        if received is not None:
            towards = received.grad
            # The stage may not use its input.
            if towards is None:
                towards = torch.zeros_like(received)
            self.batch.transfers.send(instruction.gives, towards.contiguous())

    def backward_weight(self, instruction):
        """Compute the gradients of the weights, the second part of a backward pass."""
        for arguments in self.batch.kept.pop((instruction.microbatch, instruction.stage)):
            torch.autograd.backward(**arguments)

    methods = {
        Forward: forward,
        Backward: backward,
        BackwardInput: backward,
        BackwardWeight: backward_weight,
    }

    def state_dict(self):
        """Return the state dict of all stages, the same on every rank; all ranks call this.

        Names begin with the number of the stage: "0.…" are those of the first.
        """
        own = {}
        for stage, module in self.stages.items():
            for name, tensor in module.state_dict(prefix=f"{stage}.").items():
                own[name] = whole_on_cpu(tensor)
        everyones = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyones, own, self.group)
        return {name: tensor for each in everyones for name, tensor in each.items()}

    def load_state_dict(self, state_dict):
        """Give this rank's stages their part of the state dict of as many stages."""
        for stage, module in self.stages.items():
            start = f"{stage}."
            own = {n.removeprefix(start): v for n, v in state_dict.items() if n.startswith(start)}
            module.load_state_dict(own)

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale all stages' gradients to a norm of at most `max_norm`; return the norm before.

        All ranks call this.
        """
        device = self.batch.inputs[0].device
        return clip_grad_norm_(self.module.parameters(), max_norm, norm_type, self.group, device)


def backward_to(received, outputs, gradient):
    """Compute the gradient of what was `received` from that of `outputs`; return the second part.

    The second part, for the weights, is a list of arguments of `torch.autograd.backward`: from the
    gradients that came to a function to the weights that it uses. Where a weight is used twice, the
    second part goes through the whole graph again.
    """
    # The first stages may be frozen.
    if not outputs.requires_grad:
        return []
    # No rank waits for a gradient of the first stage's input.
    if received is None:
        return [{"tensors": outputs, "grad_tensors": gradient}]
    incoming = {}  # {function: the gradients that came to it}
    functions, leaves = graph_behind([outputs.grad_fn])
    # Each function of the graph notes the gradients that come to it.
    hooks = [
        function.register_prehook(partial(incoming.__setitem__, function)) for function in functions
    ]
    torch.autograd.backward(outputs, gradient, retain_graph=True, inputs=[received])
    for hook in hooks:
        hook.remove()
    weights = leaves - {received}
    weights_of = {}  # {function on the way to `received`: the weights that it uses}
    for function in incoming:
        _, leaves = graph_behind([function], stop=incoming)
        weights_of[function] = leaves - {received}
    # If the sums differ, two functions use one weight.
    if sum(map(len, weights_of.values())) != len(weights):
        return [{"tensors": outputs, "grad_tensors": gradient, "inputs": [*weights]}]
    second_part = []
    for function, own_weights in weights_of.items():
        gradients_at = {
            GradientEdge(function, number): each
            for number, each in enumerate(incoming[function])
            if each is not None
        }
        if own_weights and gradients_at:
            arguments = {
                "tensors": [*gradients_at],
                "grad_tensors": [*gradients_at.values()],
                "inputs": [*own_weights],
            }
            second_part.append(arguments)
    return second_part


def mark_as_parts(module, state, prefix, _):
    """Mark the tensors of a stage's state dict as parts of the model's; this is a hook."""
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, torch.Tensor):
            state[name] = value.as_subclass(Part)


def average_part(part, group):
    """Average the gradients of one stage, unless it is frozen, over the replicas that hold it."""
    if any(parameter.requires_grad for parameter in part.parameters()):
        average_on_ring(gradients(part), group=group)
