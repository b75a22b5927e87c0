"""`ddp-course doctor`: what this machine has, what lessons will use, and what is missing."""

import argparse
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version

from manyranks import this_torch

from ..waiting import say_while
from . import as_typed

# A lesson with four ranks needs this much: docs/TROUBLESHOOTING.md says how it was measured.
NEEDED_GIB = 1.5
PACKAGES = ("jupyterlab", "ipykernel", "ipywidgets", "matplotlib", "scikit-learn")
# These sentences say what each way of emulating links is good for.
MODES = {
    "virtual": "figures in virtual time are the same here as on any machine",
    "hosts": "lesson 12 joins virtual hosts, each with a network of its own",
}


def main(args: argparse.Namespace | None = None) -> int:
    """Print the report; return 1 if the course cannot run here, else 0."""
    # Each section yields the lines of the report: a name, a value, and hints, which say what to do.
    sections = {"Machine": machine, "Torch": torch_parts, "Links and lessons": lessons}
    problems = []
    for title, section in sections.items():
        print(title)
        try:
            for name, value, *hints in section():
                print(f"  {name:<22}{value}")
                for hint in hints:
                    print(f"{'':<24}! {hint}")
        except Exception as error:
            # Without this section the course cannot run, whatever the error is.
            advice = "; run: make setup" if isinstance(error, ImportError) else ""
            problems.append(str(error).partition("\n")[0] + advice)
            print(f"  ! {problems[-1]}")
    verdict = "runs on this machine."
    # A problem that stopped several sections is said once.
    if problems:
        verdict = "cannot run here: " + "; ".join(dict.fromkeys(problems))
    print(f"\nThe course {verdict}")
    # In a notebook, which gives no `args`, the next step is the next cell.
    if args and not problems:
        print('How to read it: "!" says what to set, and the last part what each lesson will use.')
        print(f"Next: {as_typed('lab')} opens the course at lesson 00.")
    return 1 if problems else 0


def machine() -> Iterator[tuple[str, ...]]:
    """Yield what this machine, or its container, has, and the packages of notebooks."""
    from manyranks.linux import free_memory, processor_share

    memory = free_memory() / 2**30
    cores = processor_share()
    advice = "set K = 2 in the first cell of each lesson, and give commands --world-size 2"
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    core_hints = [advice] if cores < 2 else []
    yield "cores", f"{cores:g}; a rank is a process, and four of them want two", *core_hints
    memory_hints = [advice] if memory < NEEDED_GIB else []
    needed = f"a lesson with four ranks takes {NEEDED_GIB:g} GiB"
    yield "memory", f"{memory:.1f} GiB free; {needed}", *memory_hints
    yield "Python", platform.python_version()
    yield "notebooks", ", ".join(f"{package} {version(package)}" for package in PACKAGES)


def torch_parts() -> Iterator[tuple[str, ...]]:
    """Yield what there is of torch and GPUs, and whether ranks can be launched.

    The error of a real launch says best what forbids it.
    """
    with say_while("  loading, some seconds"):
        import torch
        import torch.distributed as dist

        from manyranks.devices.placement import usable_gpus
        from manyranks.launching.launch import launch

    trial = this_torch.trial()
    if trial is None:
        yield "torch", torch.__version__, this_torch.untried()
    else:
        yield "torch", torch.__version__
        yield "tried", f"{trial['torch']} on {trial['date']}, {trial['system']}: docs/VERSIONS.md"
    with warnings.catch_warnings(record=True) as gpu_warnings:
        warnings.simplefilter("always")
        has_nccl = usable_gpus() > 0 and dist.is_nccl_available()
    nccl = "no, it needs NVIDIA GPUs: ranks talk through gloo, which all lessons can do"
    if has_nccl:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield "NCCL", nccl
    with say_while("  launching two ranks, some seconds"):
        device, gpus, network_of_ranks = launch(after_a_sum, world_size=2, timeout=60)[0]
    yield "two ranks", f"were launched, and their sum on {device} is right"
    yield "ranks meet on", network_in_words(network_of_ranks != own_network())
    names = ", ".join(gpus) or "none: ranks are processes on the CPU, and links are emulated"
    if gpu_warnings:
        # torch's warning says why the GPUs cannot be used.
        yield "GPUs", names, str(gpu_warnings[-1].message)
    else:
        yield "GPUs", names


def after_a_sum() -> tuple[str, list[str], str]:
    """Sum a tensor over the ranks, and return what each of them finds.

    That is the device and the backend in words, the names of the GPUs, and the network. Raises
    RuntimeError for a sum that is wrong.
    """
    import torch
    import torch.distributed as dist

    from manyranks.devices.placement import rank_device, usable_gpus

    from ...wire import on_nccl

    number = torch.ones(1, device=rank_device())
    dist.all_reduce(number)
    if number.item() != dist.get_world_size():
        raise RuntimeError(f"the ranks' sum on {rank_device()} is {number.item()}, and not 2")
    backend = "NCCL" if on_nccl(number, None) else "gloo"
    gpus = [torch.cuda.get_device_name(index) for index in range(usable_gpus())]
    return f"{rank_device().type} with {backend}", gpus, own_network()


def own_network() -> str:
    """Return the kernel's name of this process's network; "" where it has none."""
    path = "/proc/self/ns/net"
    return os.readlink(path) if os.path.exists(path) else ""


def network_in_words(alone: bool) -> str:
    """Return where ranks meet, and who else can reach that place.

    `alone` says that the ranks have a network of their own.
    """
    from manyranks.launching.setting import network

    if alone:
        return "a network of their own, which no other user can reach"
    loopback = "this machine's loopback"
    if network() == "auto" and sys.platform == "linux":
        return f"{loopback}, where they refuse connections of other users (no namespaces here)"
    return f"{loopback}, open to its other users (docs/WORKSHOP.md)"


def lessons() -> Iterator[tuple[str, ...]]:
    """Yield the ways of emulating links that work here, and what each group of lessons uses."""
    from manyranks.devices.placement import usable_gpus
    from manyranks.links import available

    reasons = available()
    for mode, reason in reasons.items():
        answer = f"yes: {MODES.get(mode, mode)}" if reason is None else f"no: {reason}"
        yield f"links: {mode}", answer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The report on torch has shown these warnings.
        gpus = usable_gpus()
    yield "lessons 01 to 11, 14", "emulated devices and links in virtual time, no GPU needed"
    ranks = "another machine's times, as there is no GPU here"
    if gpus == 1:
        ranks = "2 ranks share the GPU and talk through gloo"
    elif gpus:
        ranks = f"{gpus} ranks, a GPU each, with NCCL"
    yield "cells On your GPUs", ranks
    machines = "torchrun starts the ranks on this machine"
    if reasons["hosts"] is None:
        machines = "torchrun starts the ranks, in 12 on virtual hosts"
    yield "lessons 12, 15", machines
