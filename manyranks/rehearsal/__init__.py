"""Rehearse a script for torchrun on many ranks, in virtual time, before machines are rented.

    manyranks run --ranks 8 --device H100 --link NVLink train.py --epochs 1
    manyranks run --ranks 16 --hosts 2 --device A100 --link NVLink --between 100Gbit \\
        --sizes-only train.py

    rehearse(path, arguments, setting)       the same from Python: a Report
"""

from .rehearse import Request, rehearse
from .report import Report

__all__ = ["Report", "Request", "rehearse"]
