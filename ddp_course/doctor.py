"""`ddp-course doctor`: what this machine has, what each lesson will use, and a clear line for all that is missing."""

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

GIB = 2**30
NEEDED_MEMORY = 4 * GIB


def add_parser(subparsers):
    """Add `doctor` to the command line."""
    parser = subparsers.add_parser("doctor", help="what this machine has, and what each lesson will use")
    parser.set_defaults(run=lambda args: main())


def main() -> int:
    """Print the report; return 1 if the course cannot run here, else 0."""
    missing = []
    for title, findings in (
        ("Machine", machine()),
        ("Torch", torch_parts()),
        ("Links", links()),
        ("Notebooks", jupyter()),
    ):
        print(title)
        for name, value, problem in findings:
            print(f"  {name:<22}{value}")
            if problem:
                missing.append(problem)
                print(f"  {'':<22}! {problem[1]}")
    print("Lessons")
    for lesson, uses in lessons():
        print(f"  {lesson:<22}{uses}")
    fatal = [text for kind, text in missing if kind == "fatal"]
    print("\nThe course cannot run here: " + "; ".join(fatal) if fatal else "\nThe course runs on this machine.")
    return 1 if fatal else 0


def machine():
    """Cores, memory, system and Python, each as (name, value, problem): a problem is None or (kind, what to do)."""
    import psutil

    memory = psutil.virtual_memory()
    small = ("hint", "four ranks want 4 GiB; use --world-size 2") if memory.available < NEEDED_MEMORY else None
    old = ("fatal", "Python 3.10 or newer is needed") if sys.version_info < (3, 10) else None
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}", None
    yield "Python", platform.python_version(), old
    yield "cores", str(usable_cores()), None
    yield "memory", f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} GiB free", small


def usable_cores() -> int:
    """Cores that this process may use, which a container may have limited."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def torch_parts():
    """torch, its backends and the GPUs."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        yield "torch", "missing", ("fatal", f"{error}; run: make setup")
        return
    yield "torch", torch.__version__, None
    gloo = dist.is_available() and dist.is_gloo_available()
    yield "gloo", "yes" if gloo else "no", None if gloo else ("fatal", "this torch has no gloo; install one from PyPI")
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    yield "NCCL", ".".join(map(str, torch.cuda.nccl.version())) if nccl else "no (needs NVIDIA GPUs and Linux)", None
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield "GPUs", ", ".join(gpus) or "none: ranks are processes on the CPU, and links are emulated", None


def links():
    """Which ways of emulating links this machine allows."""
    from .running.links import available

    for mode, reason in available().items():
        yield mode, "yes" if reason is None else f"no: {reason}", None


def jupyter():
    """The notebook packages, and whether a kernel would be this very Python."""
    for package in ("jupyterlab", "ipykernel", "ipywidgets", "nbval", "matplotlib", "scikit-learn"):
        try:
            yield package, version(package), None
        except PackageNotFoundError:
            yield package, "missing", ("fatal", f"{package} is missing; run: make setup")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    yield "Chromium", "yes" if browser else "no (needed only for the project's own browser tests)", None


def lessons():
    """What each group of lessons uses on this machine, as (lessons, text)."""
    import torch

    gpus = torch.cuda.device_count()
    ranks = f"4 ranks on {min(4, gpus)} GPU{'s' if gpus > 1 else ''}" if gpus else "4 ranks on the CPU with gloo"
    reasons = dict((name, value) for name, value, _ in links())
    emulated = "virtual hosts" if reasons.get("hosts") == "yes" else "a throttled wire"
    yield "01, 02", "one process" + (", the first GPU" if gpus else ", the CPU; threads stand in for devices")
    yield "03, 04, 05", ranks + ("" if gpus else f"; links of 200 Mbit/s by {emulated}")
    yield "06 to 10", ranks
    yield (
        "11",
        "virtual hosts and torchrun" if reasons.get("hosts") == "yes" else "torchrun on one host, and the simulator",
    )
