"""Comparisons on emulated devices: which device and links are used by default.

Without GPUs the ranks of one machine share its cores, so the compute that should hide communication
slows it down. Emulated devices take the time that accelerators would take: see `running.devices`.
"""

from manyranks.devices import Device
from manyranks.devices.placement import usable_gpus
from manyranks.errors import EmulationError
from manyranks.links import Link

from ...job import Job

# A step of one device takes this many seconds: with 2 ranks per core that is ten times what Python
# needs.
STEP_SECONDS = 0.32
# Sending all gradients once takes this share of that step: 4 ranks then send around a ring for a
# third of their step.
SHARE = 0.085


def device_and_link(
    job: Job, device: Device | str, speed: str, link: Link | str | None, mode: str
) -> tuple[Device | str, Link | None]:
    """The (device, link) that a comparison runs on, from what was asked for; see `comparison.run`.

    Raises EmulationError where a speed is asked for of GPUs, which have one of their own.
    """
    chosen_link = link if isinstance(link, Link) else None
    if isinstance(link, str) and link not in ("auto", "none"):
        chosen_link = Link(link, mode=mode)
    if isinstance(device, str) and on_gpus(device):
        if speed not in ("auto", "none"):
            raise EmulationError(
                "GPUs have a speed of their own: leave --device-speed out, or choose --device cpu"
            )
        return device, chosen_link  # They have links of their own, too.
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
    """Whether ranks would compute on GPUs if asked for `device`."""
    return device.startswith("cuda") or (device == "auto" and usable_gpus() > 0)


def default_device(job: Job, link: Link | None = None) -> Device:
    """The device on which a step of the whole batch takes STEP_SECONDS.

    It takes longer beside a `link` that would otherwise be slow. K does not matter. Raises
    EmulationError for a model that takes no time.
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
    """Bits per second at which sending all gradients once takes SHARE of one device's step.

    The number is rounded to two digits.
    """
    bandwidth = 8 * job.gradient_bytes / (SHARE * job.work(device).compute_s)
    return max(1e6, float(f"{bandwidth:.2g}"))  # No link is slower than 1 Mbit/s.
