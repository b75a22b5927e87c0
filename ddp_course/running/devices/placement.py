"""Which device and which backend each rank gets."""

import os
import socket

import torch

BOTH = "cpu:gloo,cuda:nccl"  # a group with these two backends has one for each kind of tensor


def placement(device: str, world_size: int) -> tuple[str, list[str]]:
    """Return the ranks' backend and the name of each rank's device; `device` is "auto", "cpu",
    "cuda" or one "cuda:1".

    Each rank has its own GPU where there are enough: NCCL is for tensors on GPUs, gloo for those on
    the CPU. Otherwise ranks share GPUs with gloo, or with NCCL where the environment asks for it;
    without GPUs they use gloo on the CPU. Raises ValueError for a device that this machine does not
    have.
    """
    if world_size < 1:
        raise ValueError(f"world size is {world_size}; it must be 1 or more")
    gpus = usable_gpus() if device != "cpu" else 0
    kind, _, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdigit())):
        raise ValueError(
            f'unknown device "{device}"; choose "auto", "cpu", "cuda" or one GPU, such as "cuda:0"'
        )
    if kind == "cuda" and (gpus == 0 or (index and int(index) >= gpus)):
        raise ValueError(
            f'device "{device}" was asked for, but CUDA can use {gpus} GPUs here; try --device cpu'
        )
    if kind == "cpu" or gpus == 0:
        return "gloo", ["cpu"] * world_size
    devices = [device if index else f"cuda:{rank % gpus}" for rank in range(world_size)]
    return agreed_backend(devices), devices


def usable_gpus() -> int:
    """Return how many GPUs CUDA can use; where CUDA sees GPUs that it cannot use, torch warns and
    says why.
    """
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def hide_gpus() -> None:
    """Keep this process, which has not used CUDA yet, off all GPUs: a context takes hundreds of MiB
    of their memory.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def nccl_can_share() -> bool:
    """Return whether this NCCL lets several ranks use one GPU if the environment asks for it: it
    does from 2.30 on.
    """
    return torch.distributed.is_nccl_available() and torch.cuda.nccl.version() >= (2, 30)


def gpu_identity(device: str) -> str:
    """Return a name that no other GPU has, whatever numbers processes use: host and UUID; "cpu" for
    the CPU.
    """
    if not device.startswith("cuda"):
        return "cpu"
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(torch.device(device)).uuid}"


def agreed_backend(gpus: list[str]) -> str:
    """Return the backend for ranks on `gpus`, a name per rank: NCCL needs a GPU per rank, unless it
    may share them.
    """
    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and nccl_can_share()
    one_each = len(set(gpus)) == len(gpus) or shared
    return (
        BOTH if one_each and "cpu" not in gpus and torch.distributed.is_nccl_available() else "gloo"
    )


def rank_device() -> torch.device:
    """Return this rank's device: the launcher's choice, or under torchrun the GPU of its local
    rank, or the CPU.
    """
    chosen = os.environ.get("DDP_COURSE_DEVICE")
    if not chosen:
        gpus = usable_gpus()
        chosen = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % gpus}" if gpus else "cpu"
    return torch.device(chosen)
