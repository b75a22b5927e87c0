"""Chooses the emulated devices and links on which comparisons run by default.

Without GPUs the ranks of one machine share its cores, so the compute that should hide communication
slows it down. Emulated devices take the time that accelerators would take: see `manyranks.devices`.
"""

from manyranks.devices import Device
from manyranks.devices.placement import usable_gpus
from manyranks.errors import EmulationError
from manyranks.links import Link

from ...job import Job

# A step of one device takes so many seconds. With 2 ranks per core that is ten times the time that
# Python needs.
STEP_SECONDS = 0.32
# Sending all gradients once takes this share of that step: 4 ranks then send around a ring for a
# third of their step.
SHARE = 0.085


def device_and_link(
    job: Job, device: Device | str, speed: str, link: Link | str | None, mode: str
) -> tuple[Device | str, Link | None]:
    """Return the (device, link) of a comparison from what was asked for; see `comparison.run`.

    Raises EmulationError if a speed is asked for with GPUs, which have one of their own.
    """
    chosen_link = link if isinstance(link, Link) else None
    if isinstance(link, str) and link not in ("auto", "none"):
        chosen_link = Link(link, mode=mode)
    if isinstance(device, str) and on_gpus(device):
        if speed not in ("auto", "none"):
            raise EmulationError(
                "GPUs have a speed of their own: leave --device-speed out, or choose --device cpu"
            )
        # GPUs have links of their own, too.
        return device, chosen_link
    if speed not in ("auto", "none"):
        device = Device(speed)
    elif speed == "auto" and isinstance(device, str):
        device = default_device(job, chosen_link)
    if link == "auto":
        bandwidth = "200Mbit"
        if isinstance(device, Device):
            bandwidth = f"{default_bandwidth(job, device)}bit"
        chosen_link = Link(bandwidth, mode=mode)
    return device, chosen_link


def on_gpus(device: str) -> bool:
    """Return whether ranks would compute on GPUs if asked for `device`."""
    return device.startswith("cuda") or (device == "auto" and usable_gpus() > 0)


def default_device(job: Job, link: Link | None = None) -> Device:
    """Return the device on which a step of the whole batch takes STEP_SECONDS.

    With a slow `link` the step takes longer, so that the link's share is the same. The device does
    not depend on K. Raises EmulationError for a model that takes no time.
    """
    flops = job.work(Device("1GFLOP/s")).flops
    if not flops:
        raise EmulationError(
            "this model multiplies no matrices, and nothing else takes virtual time: take the"
            " processor as it is, by --device-speed none"
        )
    step_s = STEP_SECONDS
    if link:
        step_s = max(step_s, 8 * job.gradient_bytes / (SHARE * link.bandwidth))
    return Device(f"{flops / step_s:.2g}FLOP/s")


def default_bandwidth(job: Job, device: Device) -> float:
    """Return the bits per second at which all gradients take SHARE of one device's step.

    The number is rounded to two digits, and no link is slower than 1 Mbit/s.
    """
    bandwidth = 8 * job.gradient_bytes / (SHARE * job.work(device).compute_s)
    return max(1e6, float(f"{bandwidth:.2g}"))
