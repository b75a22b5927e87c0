"""Everything of the course that sends, on pretended GPUs.

send_all.py WORLD_SIZE         how far results are from one device's, or the processor's
send_all.py WORLD_SIZE RULE    breaks a rule of NCCL
"""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp_course import (
    collectives,
    launch,
    stage1_single,
    stage4_ring,
    stage6_ddp,
    stage8_pipeline,
    wire,
)
from manyranks import watch_finite
from manyranks.devices import rank_device
from pretend_gpu import tensors
from pretend_gpu.train_all import distances

SCHEDULES = [stage8_pipeline.gpipe, stage8_pipeline.interleaved, stage8_pipeline.zero_bubble]
RING = {"all_reduce": stage4_ring.ring_all_reduce}
# A step waits so often at most. A pipeline asks once for targets to leave out, and once for a loss.
WAITS = {"batch norm": 0, "bitmap": 1, "micro-batches": 2, "finite": 1}
SETTINGS = {
    "bitmap": {"find_unused_parameters": True, **RING},
    "batch norm": RING,
    "bitmap and batch norm": {"find_unused_parameters": True, **RING},
    "compressing hook": {},
    "join": {"find_unused_parameters": True},
}


def distance(ours, exact):
    """Return the largest difference between two lists of tensors."""
    pairs = zip(ours, exact, strict=True)
    return max((one.cpu() - other.cpu()).abs().max().item() for one, other in pairs)


def pipelines():
    """Return how far a pipeline ends from one device with schedules to and fro, and around."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 6) for _ in range(12)]
    model = torch.nn.Sequential(*layers).double().to(rank_device())
    inputs = torch.randn(12, 6).double().to(rank_device())
    batches = [(inputs, torch.randint(6, (12,)).to(rank_device()))] * 3
    single = copy.deepcopy(model)
    stage1_single.train(single, batches, 0.1)
    distances = {}
    for schedule in SCHEDULES:
        ours = copy.deepcopy(model)
        count = 2 * dist.get_world_size()
        stage8_pipeline.train(ours, batches, 0.1, microbatches=count, schedule=schedule)
        distances[schedule.__name__] = distance(ours.parameters(), single.parameters())
    return distances


def numbers(rank):
    """Return the tensor of a rank, on the processor."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4099, dtype=torch.float64, generator=generator)


def sums():
    """Return how far each collective's sum is from the sum."""
    exact = sum(numbers(rank) for rank in range(dist.get_world_size()))
    ways = {name: way for name, way in vars(collectives).items() if name.endswith("_all_reduce")}
    ways |= {"ring": stage4_ring.ring_all_reduce, "whole": stage4_ring.whole_gradient_ring}
    distances = {}
    for name, all_reduce in ways.items():
        summed = numbers(dist.get_rank()).to(rank_device())
        all_reduce(summed, group=dist.new_group())
        distances[name] = distance([summed], [exact])
    return distances


def gradients_of_stage_6(what, device):
    """Take three steps of stage 6 with something odd beside communication.

    That is a bitmap of unused parameters, SyncBatchNorm, a hook, or uneven data.
    """
    torch.manual_seed(0)
    norm = stage6_ddp.SyncBatchNorm(8) if "batch norm" in what else torch.nn.Identity()
    layers = [torch.nn.Linear(8, 8), norm, torch.nn.Linear(8, 8), norm, torch.nn.Linear(8, 4)]
    model = torch.nn.Sequential(*layers).double().to(device)
    ours = stage6_ddp.DistributedDataParallel(model, bucket_cap_mb=1e-4, **SETTINGS[what])
    if what == "compressing hook":
        ours.register_comm_hook(None, default_hooks.bf16_compress_hook)
    steps = 3
    if what == "join":
        steps += dist.get_rank()
    with ours.join(enable=what == "join"):
        for step in range(steps):
            torch.manual_seed(10 * step + dist.get_rank())
            ours(torch.randn(6, 8).double().to(device)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def hooks_join_and_the_models_own_collectives():
    """Return how far the gradients are from the processor's, for each of the SETTINGS."""
    distances = {}
    for what in SETTINGS:
        on_processor = gradients_of_stage_6(what, "cpu")
        distances[what] = distance(gradients_of_stage_6(what, rank_device()), on_processor)
    return distances


def everything():
    """On each rank, return {what: distance}, and {what: how often a step waits}.

    A step waits with few parts and with many.
    """
    far = distances(["3", "4", "4w", "5", "6", "7", "7o", "8", "9"])
    far |= pipelines() | sums() | hooks_join_and_the_models_own_collectives()
    waits = {}
    for what in WAITS:
        waits[what] = [waits_of_a_step(what, parts) for parts in (2, 6)]
    return far, waits


def waits_of_a_step(what, parts):
    """Return how often the processor waits for the GPU in a step with so many parts.

    Parts are norms, parameters or micro-batches.
    """
    torch.manual_seed(0)
    inputs = torch.randn(48, 8).to(rank_device())
    targets = torch.zeros(48, dtype=torch.int64).to(rank_device())
    kind = torch.nn.Linear
    if what == "batch norm":
        kind = lambda width, _: stage6_ddp.SyncBatchNorm(width)  # noqa: E731
    layers = [*(kind(8, 8) for _ in range(parts)), torch.nn.Linear(8, 8)]
    model = torch.nn.Sequential(*layers).to(rank_device())
    if what == "micro-batches":
        stages = stage8_pipeline.split(list(model), dist.get_world_size())
        pipeline = stage8_pipeline.Pipeline(stages[dist.get_rank()], parts)
        step = partial(pipeline.step, inputs, targets)
    else:
        bitmap = {"find_unused_parameters": what == "bitmap"}
        parallel = stage6_ddp.DistributedDataParallel(model, **bitmap)
        if what == "finite":
            watch_finite(model)
        step = lambda: parallel(inputs).square().sum().backward()  # noqa: E731
    step()  # The first one may wait: for shapes, and for buckets.
    step()
    waited = []
    with patch.object(tensors, "host_waits", lambda clock, why: waited.append(why)):
        step()
    return len(waited)


def break_rule(rule):
    """Break one of NCCL's rules; the rank's error says which."""
    rank = dist.get_rank()
    peer = 1 - rank
    ones = torch.ones(3, device=rank_device())
    room = torch.empty(3, device=rank_device())
    if rule == "a lonely message" and rank == 0:
        dist.isend(ones, peer).wait()
    if rule == "a lonely batch" and rank == 0:
        dist.batch_isend_irecv([dist.P2POp(dist.isend, ones, peer)])
    if rule == "one after the other":
        wire.warm_up(ones)
        receives = dist.batch_isend_irecv([dist.P2POp(dist.irecv, room, peer)])
        dist.batch_isend_irecv([dist.P2POp(dist.isend, ones, peer)])
        receives[0].wait()
        room.sum().item()
    if rule == "one thread":
        wire.warm_up(ones)
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, room, peer)])
        with ThreadPoolExecutor(1) as other:
            other.submit(dist.all_reduce, ones).result()


if __name__ == "__main__":
    ranks = int(sys.argv[1])
    if sys.argv[2:]:
        launch(break_rule, sys.argv[2], world_size=ranks)
        sys.exit()
    results = launch(everything, world_size=ranks)
    print(results[0])
    for far, waits in results:
        assert max(far.values()) < 1e-12, far
        for what, (few, many) in waits.items():
            assert few == many <= WAITS[what], waits
