"""Makes attempts on a rank in a launch that decides for every order of its messages.

This module is light, since each rank imports it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from ddp_exercises.attempt import Attempt, make_attempts
from manyranks.orders.in_flight import Watch, watching


def make_watched(attempts: Sequence[Attempt], folder: str, enter: Callable) -> None:
    """Make attempts on this rank in a run that decides for every order of their messages.

    An attempt that is at fault writes no evidence.
    """
    with Path(folder, f"events-{dist.get_rank()}").open("wb", buffering=0) as log:
        watch = Watch(log)
        with watching(watch):
            make_attempts(attempts, folder, enter, watch.ended)
