"""A plugin for nbval: how long each cell of a notebook shows nothing new while it runs.

    PYTHONPATH=tests/support python -m pytest -p silence --nbval-lax notebooks/05_bucketed_ddp.ipynb

A cell that shows nothing for more than MOST_SECONDS fails. With `-s` each cell's longest silence is
printed. A silence is what passed on the clock, but no more than the processor seconds of the kernel
and half of those of all that it has started: a busy machine does not make a cell seem slow, and
on one of many cores the clock counts. (What a cell sleeps is not counted.)
"""

import os
import time
from collections import deque
from contextlib import suppress
from queue import Empty

import nbval.plugin
import psutil
import pytest
from nbval.kernel import RunningKernel

MOST_SECONDS = float(os.environ.get("DDP_COURSE_SILENCE", "5"))


class ListeningKernel(RunningKernel):
    """A kernel that notes when it says something, while its cell still runs."""

    def __init__(self, *args, **keywords):
        self.messages = deque()  # They have been read, but nbval has not asked for them yet.
        self.heard = (0.0, 0.0)
        self.silent = 0.0
        super().__init__(*args, **keywords)

    def execute_cell_input(self, *args, **keywords):
        """Begin a cell."""
        self.silent = 0.0
        self.heard = self.now()
        return super().execute_cell_input(*args, **keywords)

    def await_reply(self, msg_id, timeout=None):
        """Wait until a cell has ended, and hear what it says meanwhile."""
        end = time.monotonic() + (timeout or 60)
        while time.monotonic() < end:
            with suppress(Empty):
                message = self.kc.get_iopub_msg(timeout=0.05)
                self.messages.append(message)
                if message["msg_type"] != "status":
                    self.hear()
            with suppress(Empty):
                reply = self.kc.get_shell_msg(timeout=0)
                if reply["parent_header"].get("msg_id") == msg_id:
                    self.hear()
                    return
        raise Empty

    def get_message(self, stream, timeout=None):
        """Return the next message, as nbval asks for it."""
        if stream == "iopub" and self.messages:
            return self.messages.popleft()
        return super().get_message(stream, timeout)

    def hear(self):
        """Note that the cell has said something."""
        now = self.now()
        silence = min(after - before for before, after in zip(self.heard, now, strict=True))
        self.silent = max(self.silent, silence)
        self.heard = now

    def now(self):
        """Return the clock, and the seconds that the kernel and its ranks have computed so far.

        They are those of a quiet machine of two cores.
        """
        kernel = psutil.Process(self.km.provisioner.pid)
        own = kernel.cpu_times()
        seconds = own.user + own.system
        for process in kernel.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                seconds += sum(process.cpu_times()[:4]) / 2  # its own, and of children that ended
        return time.monotonic(), seconds


nbval.plugin.RunningKernel = ListeningKernel


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail a cell that was silent for too long."""
    result = yield
    seconds = item.parent.kernel.silent
    cell = item.cell.id
    print(f"{item.path.stem}: {cell} {seconds:.1f} s")
    assert seconds <= MOST_SECONDS, (
        f"cell {cell} showed nothing for {seconds:.1f} seconds:"
        " show.progress or launch(…, progress=True) belongs into it"
    )
    return result
