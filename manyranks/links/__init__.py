"""Emulated links: ranks of one machine talk as if they were on hosts with cables in between.

    launch(fn, link=Link("200Mbit"))                     every rank on a host of its own
    Link("200Mbit", latency="5ms", hosts=2)              in blocks on two hosts; inside a host
                                                         nothing is slowed
    links.available()                                    which modes this machine allows, or why not

There are two modes. In the mode "virtual" messages are real, and their time is booked on the
clocks of both ranks (docs/VIRTUAL_TIME.md). In the mode "hosts" time is real, and everything runs
unchanged over virtual hosts (Linux only).
"""

from .link import Link
from .modes import MODES, available

__all__ = ["MODES", "Link", "available"]
