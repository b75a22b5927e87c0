"""Emulated links: the ranks of one machine talk as if they were on hosts of their own, with cables in between.

    launch(fn, link=Link("200Mbit"))                     every rank on a host of its own
    Link("200Mbit", latency="5ms", hosts=2)              in blocks on two hosts; inside a host all is fast
    Link.like("NVLink A100", slowed=1e5)                 a known link in slow motion, beside `Device.like`
    links.available()                                    what this machine allows, and why not

Two modes. "hosts": virtual hosts, over which everything runs unchanged, torch's own collectives too (Linux).
"wire": our own send and receive wait as long as the link would need (anywhere; torch's collectives do not).
"""

from ..presets import LINKS
from .link import Link
from .modes import MODES, available

__all__ = ["LINKS", "MODES", "Link", "available"]
