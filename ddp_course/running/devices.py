"""Which device and which backend each rank gets."""

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Placement:
    """The `torch.distributed` backend, and the name of each rank's device in rank order."""

    backend: str
    devices: list[str]


def placement(device: str, world_size: int) -> Placement:
    """Decide where `world_size` ranks run when asked for `device`: "auto", "cpu", "cuda", or one, such as "cuda:1".

    One GPU a rank with NCCL where there are enough; several ranks share GPUs with gloo otherwise; gloo on the CPU
    without GPUs. Raises ValueError for a device that this machine does not have.
    """
    if world_size < 1:
        raise ValueError(f"world size is {world_size}; it must be 1 or more")
    gpus = torch.cuda.device_count()
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdigit())):
        raise ValueError(f'unknown device "{device}"; choose "auto", "cpu", "cuda" or one GPU, such as "cuda:0"')
    if kind == "cuda" and (gpus == 0 or (index and int(index) >= gpus)):
        raise ValueError(f'device "{device}" was asked for, but this machine has {gpus} GPUs; try --device cpu')
    if kind == "cpu" or gpus == 0:
        return Placement("gloo", ["cpu"] * world_size)
    if index:
        return Placement("nccl" if world_size == 1 else "gloo", [device] * world_size)
    backend = "nccl" if gpus >= world_size and torch.distributed.is_nccl_available() else "gloo"
    return Placement(backend, [f"cuda:{rank % gpus}" for rank in range(world_size)])


def rank_device() -> torch.device:
    """The device of this rank: what the launcher chose, or under torchrun the GPU of its local rank, or the CPU."""
    chosen = os.environ.get("DDP_COURSE_DEVICE")
    if not chosen:
        gpus = torch.cuda.device_count()
        chosen = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % gpus}" if gpus else "cpu"
    return torch.device(chosen)
