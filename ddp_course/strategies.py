"""Every stage behind one interface, for a loop that also schedules, saves and resumes.

    strategy = make("6", model, partial(SGD, lr=0.1))
    strategy.optimizer.zero_grad()
    loss = strategy.backward(inputs, targets)       forward and backward, gradients averaged
    strategy.optimizer.step()
    state = strategy.state()                        that of the whole model, whatever is sharded
    strategy.load(state)                            go on from there, with the same bits; the model is loaded already

State dicts are always those of one device, so a run may go on with another stage or another number of ranks.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from . import stage2_dataparallel, stage3_paramserver, stage4_ring, stage5_bucketed, stage7_sharded, stage8_pipeline
from .running.devices import rank_device

NAMES = ("1", "2", "3", "4w", "4", "5", "6", "7o", "7", "8", "torch")
ONE_PROCESS = ("1", "2")


def make(stage, model, optimizer, pipeline_stages=None):
    """Return the strategy of `stage` for `model`; `optimizer(parameters)` makes its optimizer.

    "4w" is the whole-gradient ring, "7o" the sharded optimizer alone, "torch" torch's own DistributedDataParallel;
    `pipeline_stages` is how many ranks form a pipeline in stage 8. Raises ValueError for an unknown stage, and for
    stages 1 and 2, which are one process, in a job of several ranks.
    """
    if stage not in NAMES:
        raise ValueError(f'unknown stage "{stage}"; choose among {", ".join(NAMES)}')
    if stage in ONE_PROCESS and dist.get_world_size() > 1:
        raise ValueError(f"stage {stage} is a single process, but {dist.get_world_size()} ranks were started")
    if stage == "8":
        return Pipelined(model, optimizer, pipeline_stages)
    if stage == "7":
        return FullySharded(model, optimizer)
    return Replicated(stage, model, optimizer)


def parallel(stage, model):
    """What to call in place of `model`, and what to call after `loss.backward()`, in a stage with whole replicas."""
    nothing = tuple  # a function that does nothing
    if stage == "1":
        return model, nothing
    if stage == "2":
        gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if rank_device().type == "cuda" else []
        split = stage2_dataparallel.DataParallel(model, gpus or ["cpu", "cpu"])
        return split, split.backward
    if stage == "5":
        return stage5_bucketed.BucketedDDP(model), nothing
    if stage == "6":
        from .stage6_ddp import DistributedDataParallel as CompleteDDP

        return CompleteDDP(model), nothing
    if stage == "torch":
        return DistributedDataParallel(model, [rank_device()] if rank_device().type == "cuda" else None), nothing
    stage3_paramserver.broadcast_parameters(model)
    average = {
        "3": stage3_paramserver.average_on_server,
        "4w": partial(stage4_ring.average_on_ring, all_reduce=stage4_ring.whole_gradient_ring),
        "4": stage4_ring.average_on_ring,
        "7o": stage4_ring.average_on_ring,
    }[stage]
    return model, lambda: average(stage3_paramserver.gradients(model))


class Replicated:
    """Stages 1 to 6, and the sharded optimizer: every rank has the whole model."""

    def __init__(self, stage, model, optimizer):
        self.stage, self.model = stage, model
        self.forward, self.after_backward = parallel(stage, model)
        if stage == "7o":
            self.optimizer = stage7_sharded.ShardedOptimizer(model.parameters(), optimizer)
        else:
            self.optimizer = optimizer(model.parameters())

    def share(self):
        """Which share of each global batch this rank works on: (number, of how many)."""
        return dist.get_rank(), dist.get_world_size()

    def backward(self, inputs, targets):
        """Forward and backward on this rank's share; return its loss, with the average of all gradients in place."""
        loss = cross_entropy(self.forward(inputs), targets)
        loss.backward()
        self.after_backward()
        return loss.item()

    def state(self):
        """The state dicts of model and optimizer, and what lies in which bucket; all ranks call this."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.stage == "6":
            state["buckets"] = self.forward.bucket_layout()
        return state

    def load(self, state):
        """Take over what `state()` returned, here or in another strategy, but for the model."""
        self.optimizer.load_state_dict(state["optimizer"])
        if self.stage == "6":
            self.forward.load_bucket_layout(state.get("buckets"))

    def whole(self):
        """The trained model, whole on every rank; the strategy is at its end."""
        return self.model


class FullySharded:
    """Stage 7: each rank keeps a shard of everything."""

    def __init__(self, model, optimizer):
        self.forward = stage7_sharded.FullyShardedDataParallel(model)
        self.optimizer = optimizer(self.forward.parameters())

    share = Replicated.share

    def backward(self, inputs, targets):
        """Forward and backward on this rank's share; return its loss, with the shard of the averages in place."""
        loss = cross_entropy(self.forward(inputs), targets)
        loss.backward()
        return loss.item()

    def state(self):
        """The state dicts of model and optimizer, gathered; all ranks call this."""
        return {"model": self.forward.state_dict(), "optimizer": self.forward.optimizer_state_dict(self.optimizer)}

    def load(self, state):
        """Take this rank's shards out of the optimizer's state dict in `state`."""
        self.forward.load_optimizer_state_dict(self.optimizer, state["optimizer"])

    def whole(self):
        """The trained model, whole on every rank; the strategy is at its end."""
        return self.forward.restore()


class Pipelined:
    """Stage 8: each rank has a part of the layers; with fewer stages than ranks, several pipelines side by side."""

    def __init__(self, model, optimizer, stages=None):
        self.group, gradient_group, self.data_group = stage8_pipeline.grid(stages or dist.get_world_size())
        stage3_paramserver.broadcast_parameters(model)
        self.model = model
        self.parts = stage8_pipeline.split(stage8_pipeline.layers_of(model), dist.get_world_size(self.group))
        self.part = self.parts[dist.get_rank(self.group)]
        self.pipeline = stage8_pipeline.Pipeline(self.part, group=self.group, gradient_group=gradient_group)
        self.optimizer = optimizer(self.part.parameters())
        self.place = {parameter: number for number, parameter in enumerate(model.parameters())}

    def share(self):
        """Which share of each global batch this rank's pipeline works on."""
        return dist.get_rank(self.data_group), dist.get_world_size(self.data_group)

    def backward(self, inputs, targets):
        """Run the micro-batches through; return the loss, None but on the last rank of the pipeline."""
        loss = self.pipeline.step(inputs, targets)
        stage4_ring.average_on_ring(stage3_paramserver.gradients(self.part), group=self.data_group)
        return loss

    def state(self):
        """The state dicts of the whole model and of one optimizer for it; all ranks call this."""
        mine = self.optimizer.state_dict()
        numbers = [self.place[parameter] for parameter in self.part.parameters()]
        everyone = [None] * len(self.parts)
        dist.all_gather_object(
            everyone, {numbers[n]: entries for n, entries in mine["state"].items()}, group=self.group
        )
        merged = {number: entries for one in everyone for number, entries in sorted(one.items())}
        groups = [{**mine["param_groups"][0], "params": list(range(len(self.place)))}]
        return {"model": self.whole().state_dict(), "optimizer": {"state": merged, "param_groups": groups}}

    def load(self, state):
        """Take this part's entries out of the optimizer's state dict in `state`."""
        whole, numbers = state["optimizer"], [self.place[parameter] for parameter in self.part.parameters()]
        mine = {n: whole["state"][number] for n, number in enumerate(numbers) if number in whole["state"]}
        groups = [{**whole["param_groups"][0], "params": list(range(len(numbers)))}]
        self.optimizer.load_state_dict({"state": mine, "param_groups": groups})

    def whole(self):
        """The trained model, whole on every rank."""
        for stage, part in enumerate(self.parts):
            stage3_paramserver.broadcast_parameters(part, src=stage, group=self.group)
        return self.model
