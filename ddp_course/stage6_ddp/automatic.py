"""`bucket_cap_mb="auto"`: the bucket size that would have been best in the first backward pass.

Small buckets leave early, but each costs a latency; large ones leave late, and nothing hides the
last one. The best size depends on the link and on the model, so both are measured: a few
all-reduces give the link's alpha + beta * bytes, and the first pass gives the moments at which
gradients are ready. From both, the end is calculated for every size. On a GPU the GPU's own time
counts, because work is queued long before it is done.
"""

import torch
import torch.distributed as dist

from ..running.event_clock import Clock
from .buckets import MIB, assign_buckets
from .communication import GradBucket

SMALL, LARGE = 4096, 4 * MIB  # Messages of these two sizes, in bytes, measure the link.
CANDIDATES = [
    MIB // 8 * 2**exponent for exponent in range(11)
]  # The bucket sizes go from 1/8 to 128 MiB.


def calibrate(start, device, group=None, repetitions=3):
    """Measure an all-reduce: return alpha (seconds per message) and beta (seconds per byte), best
    of `repetitions`.
    """
    seconds = {}
    for size in (SMALL, LARGE):
        buffer = torch.zeros(size // 4, device=device)
        seconds[size] = min(timed(start, buffer, group) for _ in range(repetitions + 1))
    beta = max(0.0, seconds[LARGE] - seconds[SMALL]) / (LARGE - SMALL)
    return max(0.0, seconds[SMALL] - beta * SMALL), beta


def timed(start, buffer, group=None):
    """Seconds until an all-reduce of `buffer`, begun by all ranks together, is done."""
    dist.barrier(group=group)
    clock = Clock(buffer.device)
    began = clock.now(buffer.device)
    start(GradBucket(0, buffer, [], True))()
    ended = clock.now(buffer.device)
    clock.finish()
    return clock.seconds(ended) - clock.seconds(began)


def best_limits(parameters, sparse, order, moments, alpha, beta):
    """Return the bucket limits with which communication would have ended first.

    `moments[i]` is when (seconds) the gradient of `parameters[order[i]]` was ready.
    """
    ready = dict(zip(order, moments, strict=True))
    return min(
        ([cap] for cap in CANDIDATES),
        key=lambda limits: end_of_communication(
            assign_buckets(parameters, limits, sparse, order), parameters, ready, alpha, beta
        ),
    )


def end_of_communication(layout, parameters, ready, alpha, beta):
    """Replay a pass: a bucket leaves when its gradients are ready and the bucket before it has
    arrived.
    """
    end = 0.0
    for members in layout:
        size = sum(
            parameters[index].numel() * parameters[index].element_size() for index in members
        )
        end = max(end, max(ready[index] for index in members)) + alpha + beta * size
    return end
