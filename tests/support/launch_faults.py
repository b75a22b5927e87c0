"""Everything that can go wrong in a launch: one table for script, kernel and soak.

Each fault of launch_faults.yaml is the body of a function `fault()` that runs on every rank, the
error that the caller must get, and a pattern that its message must match; `{culprit}` is the last
rank.
"""

from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

import yaml

HEADER = """
import contextlib, ctypes, os, resource, signal, sys, threading, time
import numpy, psutil, torch
import torch.distributed as dist
from manyranks import launch

def later(seconds, action):
    threading.Timer(seconds, action).start()
"""
# The ring is part of the cell: a script has nothing of the tests to import.
HEADER += Path(__file__).with_name("rings.py").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Fault:
    """One row: what the culprit does, what the others do meanwhile, what the caller is told."""

    name: str
    culprit: str
    error: str
    pattern: str
    others: str = "dist.barrier()"
    timeout: float = 60.0

    def cell(self, world_size):
        """Return the source of a cell that launches this fault."""
        return (
            "def fault():\n    rank, world_size = dist.get_rank(), dist.get_world_size()\n"
            f"    if rank == world_size - 1:\n{indent(self.culprit, ' ' * 8)}\n"
            f"    else:\n{indent(self.others, ' ' * 8)}\n\n"
            f"launch(fault, world_size={world_size}, timeout={self.timeout})\n"
        )


FAULTS = [
    Fault(**row)
    for row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
]
