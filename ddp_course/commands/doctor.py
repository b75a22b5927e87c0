"""`ddp-course doctor`: what this machine has, what each lesson will use, and a clear line for all that is missing."""

import argparse
import os
import platform
import sys
import warnings
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version

GIB = 2**30
NEEDED_MEMORY = 1.5 * GIB  # for a lesson with four ranks: docs/TROUBLESHOOTING.md says how it was measured
NEEDED_CORES = 2
OLDEST_TORCH = (2, 10)  # as in pyproject.toml

Finding = tuple[str, str, tuple[str, str] | None]  # a name, what is there, and (kind of problem, what to do) if any


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.set_defaults(run=lambda args: main())


def main() -> int:
    """Print the report; return 1 if the course cannot run here, else 0."""
    parts = {"Machine": [*machine()], "Torch": [*torch_parts()]}
    has_torch = len(parts["Torch"]) > 1
    parts |= {"Links": links() if has_torch else [], "Notebooks": [*jupyter()]}
    for title, findings in parts.items():
        print(title)
        for name, value, problem in findings:
            print(f"  {name:<22}{value}" + (f"\n  {'':<22}! {problem[1]}" if problem else ""))
    print("Lessons")
    for lesson, uses in lessons(parts["Links"]) if has_torch else ():
        print(f"  {lesson:<22}{uses}")
    problems = [problem for findings in parts.values() for _, _, problem in findings if problem]
    fatal = [text for kind, text in problems if kind == "fatal"]
    print("\nThe course cannot run here: " + "; ".join(fatal) if fatal else "\nThe course runs on this machine.")
    return 1 if fatal else 0


def machine() -> Iterator[Finding]:
    """Cores, memory, system and Python: what the machine has, or what a hub's container allows of it."""
    from ..running.linux import free_memory, processor_share

    memory, cores = free_memory(), processor_share()
    two = "set K = 2 in the first cell of each lesson, and give commands --world-size 2"
    small = ("hint", f"four ranks want {NEEDED_MEMORY / GIB:g} GiB; {two}") if memory < NEEDED_MEMORY else None
    slow = ("hint", f"four ranks want two cores; {two}") if cores < NEEDED_CORES else None
    old = ("fatal", "Python 3.10 or newer is needed") if sys.version_info < (3, 10) else None
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}", None
    yield "Python", platform.python_version(), old
    yield "cores", f"{cores:g}", slow
    yield "memory", f"{memory / GIB:.1f} GiB free", small


def how_ranks_start() -> str:
    """Forked or from warm spares; of the spares, how many may wait, and what those that wait now take."""
    from ..running.launching.processes import MOST_SPARES, SPARE_MEMORY, all_spares, most_spares
    from ..running.launching.setting import start_method

    waiting = [] if sys.platform == "linux" and not os.path.isdir("/proc/self") else all_spares()
    now = f"; {len(waiting)} run now with {sum(waiting) / GIB:.1f} GiB" if waiting else ""
    if start_method() == "fork":
        return f"forked from a server that has torch loaded{now}"
    return f"warm spares, {most_spares(MOST_SPARES)} at most, {SPARE_MEMORY / GIB:.1f} GiB each{now}"


def torch_parts() -> Iterator[Finding]:
    """torch, its backends and the GPUs."""
    try:
        import torch
        import torch.distributed as dist

        from ..running.devices.placement import usable_gpus
    except ImportError as error:
        yield "torch", "missing", ("fatal", f"{error}; run: make setup")
        return
    old = tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH
    hint = ("hint", "the course was tried with torch {}.{} and newer".format(*OLDEST_TORCH)) if old else None
    yield "torch", torch.__version__, hint
    gloo = dist.is_available() and dist.is_gloo_available()
    yield "gloo", "yes" if gloo else "no", None if gloo else ("fatal", "this torch has no gloo; install one from PyPI")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = usable_gpus()
    nccl = count and dist.is_nccl_available()
    yield "NCCL", ".".join(map(str, torch.cuda.nccl.version())) if nccl else "no (needs NVIDIA GPUs and Linux)", None
    gpus = [torch.cuda.get_device_name(index) for index in range(count)]
    yield "ranks", how_ranks_start(), None
    yield "two ranks", *two_ranks()
    private = os.environ.get("DDP_COURSE_NETWORK") == "private"
    common = "this machine's loopback, open to its other users (docs/WORKSHOP.md says how to change that)"
    yield "ranks meet on", "a loopback of their own" if private else common, None
    unusable = ("hint", str(caught[-1].message)) if caught else None
    yield "GPUs", ", ".join(gpus) or "none: ranks are processes on the CPU, and links are emulated", unusable


def two_ranks() -> tuple[str, tuple[str, str] | None]:
    """Whether two ranks can be launched here: whatever forbids it, the launch itself says it best."""
    from ..running.launching.launch import launch

    try:
        launch(agree, world_size=2, timeout=60)
    except Exception as error:
        return "no", ("fatal", f"two ranks cannot be launched: {str(error).splitlines()[0]}")
    return "were launched, and agree", None


def agree() -> None:
    """What the two ranks do."""
    import torch.distributed as dist

    dist.barrier()


def links() -> list[Finding]:
    """Which ways of emulating links this machine allows."""
    from ..running.links import available

    return [(mode, "yes" if reason is None else f"no: {reason}", None) for mode, reason in available().items()]


def jupyter() -> Iterator[Finding]:
    """The packages of notebooks and figures."""
    for package in ("jupyterlab", "ipykernel", "ipywidgets", "nbval", "matplotlib", "scikit-learn"):
        try:
            yield package, version(package), None
        except PackageNotFoundError:
            yield package, "missing", ("fatal", f"{package} is missing; run: make setup")


def lessons(emulated: Iterable[Finding]) -> Iterator[tuple[str, str]]:
    """What each group of lessons uses on this machine, as (lessons, text); `emulated`: what `links` found."""
    from ..running.devices.placement import usable_gpus

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # They were shown above.
        gpus = usable_gpus()
    ranks = f"4 ranks on {min(4, gpus)} GPU{'s' if gpus > 1 else ''}" if gpus else "4 ranks on the CPU with gloo"
    hosts = ("hosts", "yes", None) in emulated
    by = "virtual hosts" if hosts else "a throttled wire"
    yield "01, 02", "one process" + (", the first GPU" if gpus else ", the CPU; threads stand in for devices")
    yield "03, 04, 05", ranks + ("" if gpus else f"; links of 200 Mbit/s by {by}")
    yield "06 to 11, 14", ranks
    yield "12, 15", "torchrun, in 12 on virtual hosts" if hosts else "torchrun on this machine"
