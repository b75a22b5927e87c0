"""Pretended GPUs: tensors that say "cuda:1", and rules of streams and NCCL that are watched.

The tensors are those of torch's CPU build.

    environment(gpus=4, log=path)    what a process needs in its environment to have them
    read(path)                       what went wrong there: races, foreign contexts, waits of the
                                     processor, communicators

A process gets them at its start by `site/sitecustomize.py`, and so does each of its children; no
code of the course changes. The arithmetic is the CPU's and runs at once, so nothing here says how
fast a GPU is. What a real GPU might do in another order is found with a vector clock for each
stream, however lucky the timing was.

This leans on the inside of torch: it is for one version (`build.VERSION`), and for the CPU build
alone.
"""

import os
from pathlib import Path

from .report import Findings, read

__all__ = ["Findings", "environment", "read"]
HOME = Path(__file__).parent


def environment(gpus, log, patience=60.0):
    """Return the environment of this process with `gpus` pretended GPUs.

    Findings are appended to the file `log`. Who waits longer than `patience` seconds for a message
    counts as hanging.
    """
    path = [str(HOME / "site"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PRETEND_GPUS": str(gpus),
        "PRETEND_LOG": str(log),
        "PRETEND_PATIENCE": str(patience),
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "OMP_NUM_THREADS": "1",
    }
