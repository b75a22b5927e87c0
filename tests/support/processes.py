"""Processes of which tests say that they end."""

import time
from contextlib import suppress

import psutil


def still_running(pids):
    """Return which of these processes run a minute later; mostly none does long before that."""
    end = time.monotonic() + 60
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def runs(pid):
    """Return whether a process runs: one that has ended does not, also if nobody has asked how."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
