"""Decides which device and which backend each rank gets."""

import os
import re
import socket
import sys
from functools import cache

import torch

BOTH = "cpu:gloo,cuda:nccl"  # A group with these two backends has one for each kind of tensor.
# NCCL's watchdog must not end a process before the launch can say which rank is the culprit.
QUIET_NCCL = {
    # NCCL gives up the communicator, and leaves the process alone.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}


def placement(device: str, world_size: int) -> tuple[str, list[str]]:
    """Return the ranks' backend and the name of each rank's device.

    `device` is "auto", "cpu", "cuda" or one GPU, such as "cuda:1". Where there are enough GPUs,
    each rank has its own, with NCCL for tensors on GPUs and gloo for tensors on the CPU. Otherwise
    ranks share GPUs with gloo, or with NCCL where the environment asks for it. Without GPUs they
    use gloo on the CPU. Raises ValueError for a device that this machine does not have.
    """
    gpus = usable_gpus() if device != "cpu" else 0
    kind, _, index = device.partition(":")
    if not re.fullmatch("auto|cpu|cuda(:[0-9]+)?", device):
        raise ValueError(
            f'unknown device "{device}"; choose "auto", "cpu", "cuda" or one GPU, such as "cuda:0"'
        )
    if kind == "cuda" and (gpus == 0 or (index and int(index) >= gpus)):
        raise ValueError(
            f'device "{device}" was asked for, but CUDA can use {gpus} GPUs here; try --device cpu'
        )
    if kind == "cpu" or gpus == 0:
        return "gloo", ["cpu"] * world_size
    devices = [f"cuda:{rank % gpus}" for rank in range(world_size)]
    if index:
        devices = [device] * world_size
    return backend_for(devices), devices


@cache
def say_sharing(world_size: int, gpus: int) -> None:
    """Say, once for each pair of numbers, that ranks share GPUs, and what follows."""
    if 0 < gpus < world_size and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        noun = "GPU" if gpus == 1 else "GPUs"
        better = f"; world_size={gpus} uses NCCL" if gpus > 1 else ""
        print(
            f"{world_size} ranks on {gpus} {noun} talk through gloo: NCCL wants a GPU each{better}",
            file=sys.stderr,
        )


def usable_gpus() -> int:
    """Return how many GPUs CUDA can use.

    Where CUDA sees GPUs that it cannot use, torch warns and says why.
    """
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def settle_on(device: str) -> None:
    """Make `device` this process's own, before the process has used CUDA.

    A GPU becomes the current one, and NCCL is kept quiet. A process on the CPU is kept off all
    GPUs, where a context would take hundreds of MiB.
    """
    if device.startswith("cuda"):
        for name, value in QUIET_NCCL.items():
            os.environ.setdefault(name, value)
        torch.cuda.set_device(device)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def nccl_can_share() -> bool:
    """Return whether this NCCL (2.30 or later) lets ranks share a GPU if the environment asks."""
    return torch.distributed.is_nccl_available() and torch.cuda.nccl.version() >= (2, 30)


def gpu_identity(device: str) -> str:
    """Return a name that no other GPU has, host and UUID; "cpu" for the CPU.

    The numbers of GPUs will not do, as processes may number them differently.
    """
    if not device.startswith("cuda"):
        return "cpu"
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(torch.device(device)).uuid}"


def backend_for(devices: list[str]) -> str:
    """Return the backend for ranks on `devices`.

    `devices` has a name for each rank, such as "cuda:0" or what `gpu_identity` returns. NCCL needs
    a GPU for each rank, unless ranks may share GPUs.
    """
    if "cpu" in devices or not torch.distributed.is_nccl_available():
        return "gloo"
    one_each = len(set(devices)) == len(devices)
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and nccl_can_share()
    return BOTH if one_each or may_share else "gloo"


def rank_device() -> torch.device:
    """Return this rank's device: the launcher's choice, or its local rank's GPU, or the CPU."""
    chosen = os.environ.get("MANYRANKS_DEVICE")
    if not chosen:
        gpus = usable_gpus()
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        chosen = f"cuda:{local_rank % gpus}" if gpus else "cpu"
    return torch.device(chosen)
