"""Every stage behind one interface, for a loop that also schedules, saves and resumes.

    strategy = ladder.find("6").wrapped(model, partial(SGD, lr=0.1))
    strategy.optimizer.zero_grad()
    loss = strategy.backward(inputs, targets)       forward and backward, gradients averaged
    strategy.optimizer.step()
    state = strategy.state()                        that of the whole model, whatever is sharded
    strategy.load(state)                            go on from there, with the same bits; the model is loaded already

State dicts are always those of one device, so a run may go on with another stage or another number of ranks.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from . import (
    stage2_dataparallel,
    stage3_paramserver,
    stage4_ring,
    stage5_bucketed,
    stage7_sharded,
    stage8_pipeline,
    stage9_tensor,
)
from .running import wire
from .running.communication import CommunicationThread, communication_thread
from .running.devices import rank_device
from .running.torch_inside import tree_map_only


def train(
    model: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]], lr: float, stage: Any, **settings: Any
) -> list[float]:
    """The loop of stage 5 around the strategy of any `stage` of the ladder; return this rank's loss of every step."""
    strategy = stage.wrapped(model, partial(SGD, lr=lr), **settings)
    losses = []
    for inputs, targets in batches:
        strategy.optimizer.zero_grad()
        losses.append(strategy.backward(inputs, targets))
        strategy.optimizer.step()
    strategy.whole()
    return losses


class Replicated:
    """Every rank has the whole model: `forward` is called in its place, and `after_backward()` averages gradients."""

    data_group: dist.ProcessGroup | None = None  # These ranks share out a global batch; None stands for all.

    def __init__(self, model, optimizer, forward=None, after_backward=tuple):
        self.model, self.optimizer = model, optimizer
        self.forward, self.after_backward = forward or model, after_backward

    def share(self) -> tuple[int, int]:
        """Which share of each global batch this rank works on: (number, of how many)."""
        return dist.get_rank(self.data_group), dist.get_world_size(self.data_group)

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        """Forward and backward on this rank's share; return its loss, with the average of all gradients in place."""
        loss = cross_entropy(self.forward(inputs), targets)
        loss.backward()
        self.after_backward()
        return loss.item()

    def state(self) -> dict[str, Any]:
        """The state dicts of model and optimizer; all ranks call this."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state()` returned, here or in another strategy, but for the model."""
        self.optimizer.load_state_dict(state["optimizer"])

    def whole(self) -> nn.Module:
        """The trained model, whole on every rank; the strategy is at its end."""
        return self.model


def alone(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> Replicated:
    """Stage 1: one device."""
    return Replicated(model, optimizer(model.parameters()))


def in_threads(
    model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], devices: list[str] | None = None
) -> Replicated:
    """Stage 2: one process drives all GPUs, or the CPU twice."""
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if rank_device().type == "cuda" else []
    split = stage2_dataparallel.DataParallel(model, devices or gpus or ["cpu", "cpu"])
    return Replicated(model, optimizer(model.parameters()), split, split.backward)


def averaged(
    model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], average: Callable[..., Any]
) -> Replicated:
    """Stages 3 and 4: whole gradients are averaged when the backward pass is over."""
    stage3_paramserver.broadcast_parameters(model)
    return Replicated(
        model, optimizer(model.parameters()), after_backward=lambda: average(stage3_paramserver.gradients(model))
    )


average_on_whole_ring = partial(stage4_ring.average_on_ring, all_reduce=stage4_ring.whole_gradient_ring)
by_server = partial(averaged, average=stage3_paramserver.average_on_server)
by_whole_ring = partial(averaged, average=average_on_whole_ring)
by_ring = partial(averaged, average=stage4_ring.average_on_ring)
train_on_whole_ring = partial(stage4_ring.train, average=average_on_whole_ring)


def in_buckets(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], **settings: Any) -> Replicated:
    """Stage 5: buckets, averaged under the backward pass."""
    return Replicated(model, optimizer(model.parameters()), stage5_bucketed.BucketedDDP(model, **settings))


class Complete(Replicated):
    """Stage 6: which gradients share a bucket is part of the state, so that a resumed run adds in the same order."""

    def state(self) -> dict[str, Any]:
        """The state dicts of model and optimizer, and what lies in which bucket; all ranks call this."""
        return {**super().state(), "buckets": self.forward.bucket_layout()}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state()` returned, here or in another strategy, but for the model."""
        super().load(state)
        self.forward.load_bucket_layout(state.get("buckets"))


def complete(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], **settings: Any) -> Complete:
    """Stage 6: the drop-in for torch's class."""
    from .stage6_ddp import DistributedDataParallel as CompleteDDP

    return Complete(model, optimizer(model.parameters()), CompleteDDP(model, **settings))


def torchs_own(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], **settings: Any) -> Replicated:
    """torch's own DistributedDataParallel, its all-reduces shown to the observers; over a throttled wire, on ours."""
    devices = [rank_device()] if rank_device().type == "cuda" else None
    parallel = DistributedDataParallel(model, device_ids=devices, **settings)
    if wire.card.throttle is None:
        parallel.register_comm_hook(None, observed_all_reduce)
    else:
        parallel.register_comm_hook(communication_thread(), all_reduce_on_our_wire)
    return Replicated(model, optimizer(model.parameters()), parallel)


def all_reduce_on_our_wire(thread: CommunicationThread, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook that averages one bucket around our own ring: a throttled wire does not slow torch's collectives."""
    flat, future = bucket.buffer().mul_(1 / dist.get_world_size()), torch.futures.Future()

    def around_the_ring(group):
        try:
            future.set_result(stage4_ring.ring_all_reduce(flat, group=group))
        except BaseException as error:
            future.set_exception(error)
            raise

    thread.start(around_the_ring, flat.device)
    return future


def observed_all_reduce(state: dict[str, Any], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's default averaging of one bucket, as a hook that also reports when it began and ended."""
    start = wire.now()
    flat = bucket.buffer().mul_(1 / dist.get_world_size())

    def report(future):
        wire.ended("all_reduce", start, flat)
        return future.value()[0]

    return dist.all_reduce(flat, async_op=True).get_future().then(report)


def optimizer_sharded(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> Replicated:
    """Stage 7, ZeRO-1: the optimizer averages the gradients, and each rank updates its part."""
    stage3_paramserver.broadcast_parameters(model)  # The optimizer broadcasts parameters, but no buffers.
    return Replicated(model, stage7_sharded.ShardedOptimizer(model.parameters(), optimizer))


class FullySharded(Replicated):
    """Stage 7: each rank keeps a shard of everything."""

    def __init__(self, model, optimizer):
        parallel = stage7_sharded.FullyShardedDataParallel(model)
        super().__init__(model, optimizer(parallel.parameters()), parallel)

    def state(self) -> dict[str, Any]:
        """The state dicts of model and optimizer, gathered; all ranks call this."""
        return {"model": self.forward.state_dict(), "optimizer": self.forward.optimizer_state_dict(self.optimizer)}

    def load(self, state: dict[str, Any]) -> None:
        """Take this rank's shards out of the optimizer's state dict in `state`."""
        self.forward.load_optimizer_state_dict(self.optimizer, state["optimizer"])

    def whole(self) -> nn.Module:
        """The trained model, whole on every rank; the strategy is at its end."""
        return self.forward.restore()


class Pipelined(Replicated):
    """Stage 8: each rank trains a part of the layers; with fewer stages than ranks, several pipelines side by side."""

    def __init__(self, model, optimizer, stages=None):
        super().__init__(model, optimizer(model.parameters()))  # It skips those of other ranks: they get no gradients.
        stages = stages or dist.get_world_size()
        groups = stage8_pipeline.mesh(data=dist.get_world_size() // stages, pipeline=stages)
        self.group, self.data_group = groups["pipeline"], groups["data"]
        stage3_paramserver.broadcast_parameters(model)
        self.parts = stage8_pipeline.split(stage8_pipeline.layers_of(model), dist.get_world_size(self.group))
        self.part = self.parts[dist.get_rank(self.group)]
        self.pipeline = stage8_pipeline.Pipeline(self.part, group=self.group)

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        """Run the micro-batches through; return the loss, None but on the last rank of the pipeline."""
        loss = self.pipeline.step(inputs, targets)
        stage8_pipeline.average_part(self.part, self.data_group)
        return loss

    def state(self) -> dict[str, Any]:
        """The state dicts of the whole model and of one optimizer for it; all ranks call this."""
        optimizer, parts = self.optimizer.state_dict(), [{} for _ in self.parts]
        part = tree_map_only(Tensor, Tensor.cpu, optimizer["state"])  # Other ranks would unpack it on this rank's GPU.
        dist.all_gather_object(parts, part, group=self.group)
        optimizer["state"] = {number: entries for part in parts for number, entries in sorted(part.items())}
        return {"model": self.whole().state_dict(), "optimizer": optimizer}

    def load(self, state: dict[str, Any]) -> None:
        """Take this part's entries out of the optimizer's state dict in `state`."""
        part, optimizer = set(self.part.parameters()), state["optimizer"]
        numbers = {number for number, parameter in enumerate(self.model.parameters()) if parameter in part}
        entries = {number: entry for number, entry in optimizer["state"].items() if number in numbers}
        self.optimizer.load_state_dict({**optimizer, "state": entries})

    def whole(self) -> nn.Module:
        """The trained model, whole on every rank."""
        for stage, part in enumerate(self.parts):
            stage3_paramserver.broadcast_parameters(part, src=stage, group=self.group)
        return self.model


class TensorParallel(Replicated):
    """Stage 9: each rank has slices of the layers; with fewer ranks to a layer than there are, several replicas."""

    def __init__(self, model, optimizer, tensor=None):
        tensor = tensor or dist.get_world_size()
        groups = stage9_tensor.mesh(data=dist.get_world_size() // tensor, tensor=tensor)
        self.data_group = groups["data"]
        stage3_paramserver.broadcast_parameters(model)
        stage9_tensor.parallelize(model, groups["tensor"])
        super().__init__(model, optimizer(model.parameters()), after_backward=self.average)
        self.cuts = [getattr(parameter, "cut", None) for parameter in model.parameters()]

    def average(self) -> None:
        """Average the gradients over the ranks that hold the same slices."""
        stage4_ring.average_on_ring(stage3_paramserver.gradients(self.model), group=self.data_group)

    def state(self) -> dict[str, Any]:
        """The state dicts of the whole model and of one optimizer for it; all ranks call this."""
        model = self.model.state_dict()
        for (name, parameter), cut in zip(self.model.named_parameters(), self.cuts, strict=True):
            model[name] = parameter.detach() if cut is None else cut.whole(parameter)
        return {"model": model, "optimizer": self.converted(self.optimizer.state_dict(), stage9_tensor.Cut.whole)}

    def load(self, state: dict[str, Any]) -> None:
        """Take this rank's slices out of the optimizer's state dict in `state`."""
        self.optimizer.load_state_dict(self.converted(state["optimizer"], stage9_tensor.Cut.of))

    def converted(self, state: dict[str, Any], convert: Callable[..., Tensor]) -> dict[str, Any]:
        """The optimizer's `state` dict with `convert(cut, tensor)` in place of what goes with a slice's elements."""

        def value_of(number, value):
            cut = self.cuts[number]
            is_slice = cut is not None and isinstance(value, Tensor) and value.dim() == len(cut.shape)
            return convert(cut, value) if is_slice else value

        entries = {n: {key: value_of(n, value) for key, value in entry.items()} for n, entry in state["state"].items()}
        return {**state, "state": entries}

    def whole(self) -> nn.Module:
        """The trained model, whole on every rank; the strategy is at its end."""
        return stage9_tensor.restore(self.model)
