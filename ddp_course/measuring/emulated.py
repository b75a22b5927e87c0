"""Comparisons on emulated devices: which device and links are used by default.

Without GPUs the ranks of one machine share its cores, so the compute that should hide communication
slows it down. Emulated devices take the time that accelerators would take: see `running.devices`.
"""

from __future__ import annotations

from ..errors import EmulationError
from ..running.devices import Device
from ..running.devices.placement import usable_gpus
from ..running.links import Link
from .job import Job

# A step of one device takes this many seconds: with 2 ranks per core that is ten times what Python
# needs.
STEP_SECONDS = 0.32
# Sending all gradients once takes this share of that step: 4 ranks then need a third of a step for
# a ring.
SHARE = 0.085


def device_and_link(
    job: Job, device: Device | str, speed: str, link: Link | str | None, mode: str
) -> tuple[Device | str, Link | None]:
    """The (device, link) that a comparison runs on, from what was asked for; see `comparison.run`.
    Raises EmulationError where a speed is asked for of GPUs, which have one of their own.
    """
    real = isinstance(device, str) and on_gpus(device)
    if speed not in ("auto", "none"):
        if real:
            raise EmulationError(
                "GPUs have a speed of their own: leave --device-speed out, or choose --device cpu"
            )
        device = Device(speed)
    if isinstance(link, str) and link not in ("auto", "none"):
        link = Link(link, mode=mode)
    if speed == "auto" and not real and not isinstance(device, Device):
        device = default_device(job, link.bandwidth if isinstance(link, Link) else None)
    if link == "auto" and not real:
        wanted = f"{default_bandwidth(job, device)}bit" if isinstance(device, Device) else "200Mbit"
        link = Link(wanted, mode=mode)
    if isinstance(link, str):  # It is "none", or "auto" on GPUs.
        link = None
    return device, link


def on_gpus(device: str) -> bool:
    """Whether ranks would compute on GPUs if asked for `device`."""
    return device.startswith("cuda") or (device == "auto" and usable_gpus() > 0)


def default_device(job: Job, bandwidth: float | None = None) -> Device:
    """The device on which a step of the whole batch takes a third of a second; longer for a link of
    `bandwidth` bits per second that would otherwise be slow beside it. K does not matter.
    """
    flops = job.work(Device("1GFLOP/s")).flops
    sending_s = 8 * job.gradient_bytes / (SHARE * bandwidth) if bandwidth else 0.0
    return Device(f"{flops / max(STEP_SECONDS, sending_s):.2g}FLOP/s")


def default_bandwidth(job: Job, device: Device) -> float:
    """Bits per second at which communication takes as large a part of the step as in the course's
    figures.
    """
    bandwidth = 8 * job.gradient_bytes / (SHARE * job.work(device).compute_s)
    return max(1e6, float(f"{bandwidth:.2g}"))
