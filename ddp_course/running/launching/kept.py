"""Ranks that stay after their first call, with all their variables, and take one call after the other."""

import os
import time
from collections.abc import Callable
from typing import IO

from ...errors import LaunchError
from .launch import check_request
from .launched import Launch
from .local import local_ranks
from .setting import describe_launch

IDLE_SECONDS = float(os.environ.get("DDP_COURSE_IDLE") or 1800)


class KeptRanks:
    """So many ranks, alive until `stop`, or until one dies or hangs, or nobody wants anything for half an hour."""

    def __init__(self, world_size: int, device: str):
        self.world_size, self.device = check_request(world_size, device, 1.0, None), device
        self.setting = describe_launch(self.world_size, device, 1.0, None, False)
        self.launched: Launch | None = None
        self.ended = False
        self.last_use = time.monotonic()

    def call(self, payload: IO[bytes], timeout: float, show: Callable) -> list:
        """Run a packed call on all ranks, the first time on new ones; results and errors as of `launch`.

        After an error that left no rank dead or waiting for another, the ranks stay.
        """
        check_request(self.world_size, self.device, timeout, None)
        try:
            if self.launched is None:
                ranks = local_ranks({**self.setting, "timeout": timeout, "idle": IDLE_SECONDS})
                self.launched = Launch(ranks, self.world_size, timeout, False, show)
                self.launched.keeps = True
                ranks.start(payload)
            elif time.monotonic() > self.last_use + IDLE_SECONDS:
                raise LaunchError(f"the kept ranks have ended: no cell wanted them for {IDLE_SECONDS / 60:g} minutes")
            else:
                payload.seek(0)
                self.launched.again(payload.read(), timeout, show)
            self.launched.watch()
            self.last_use = time.monotonic()
        except BaseException:
            self.stop()
            raise
        launched = self.launched
        if not launched.goes_on():
            self.stop()
        return launched.outcome()

    def stop(self) -> None:
        """End the ranks; their variables are gone."""
        self.ended = True
        launched, self.launched = self.launched, None
        if launched is not None:
            launched.close()
