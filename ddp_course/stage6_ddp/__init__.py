"""Stage 6: everything a real DDP needs; a drop-in for `torch.nn.parallel.DistributedDataParallel`.

Stage 5 assumed that all goes well: every parameter gets a gradient in every pass, all ranks have
the same model and the same amount of data, and gradients are not accumulated. One file per feature,
in reading order; `same_model` beside this folder says whether ranks have one model, and keep it:

    before_training  whether the model and the arguments are such as can be trained
    buckets          gradients that travel together, and how they get in and out
    bucket_sums      sums of a bucket: by the backend, by our own algorithms, by a hook
    reducer          when each bucket leaves, and in which order: the heart of the stage
    unused           parameters that get no gradient
    graphs           reducers for find_unused_parameters and static_graph
    buffers          parameters are broadcast once, buffers before every forward pass
    sync_batchnorm   batch normalisation over the whole batch
    uneven           ranks that run out of data early
    mixed_precision  compute and communicate in half precision
    ddp              the class that puts everything together

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB
2020.
"""

from torch.optim import SGD

from ..base.losses import cross_entropy
from .bucket_sums import GradBucket
from .ddp import DistributedDataParallel
from .sync_batchnorm import SyncBatchNorm

__all__ = ["DistributedDataParallel", "GradBucket", "SyncBatchNorm", "train"]


def train(
    model,
    batches,
    lr,
    bucket_cap_mb=None,
    all_reduce=None,
    loss=cross_entropy,
    optimizer=SGD,
):
    """Train `model` in place on this rank's share of each batch; return its losses."""
    parallel = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, all_reduce=all_reduce)
    optimizer = optimizer(model.parameters(), lr=lr)
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        step_loss = loss(parallel(inputs), targets)
        step_loss.backward()
        optimizer.step()
        losses.append(step_loss.item())
    return losses
