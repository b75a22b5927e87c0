"""Comparisons on emulated devices: which device and links are used by default, and what a device works in a step.

Without GPUs the ranks of one machine fight for its cores, and the compute that should hide communication is what
disturbs it. Emulated devices have the time of accelerators instead: see `running.devices`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch.nn.functional import cross_entropy
from torch.optim import SGD

from .. import problems
from ..errors import DeviceError
from ..running.devices import Device, capacity, usable_cores
from ..running.devices.placement import usable_gpus
from ..running.links import Link
from ..running.links.link import parse_bandwidth

STEP_SECONDS = 0.32  # of one device, for a whole batch: with 2 ranks a core ten times what Python needs
SHARE = 0.085  # p/b of that step: 4 ranks then need a third of their step for a ring, and two thirds with a server
FASTEST_LINK = 400e6  # bits a second that two cores carry between 4 virtual hosts, with time to spare
SLACK = 6.0  # real arithmetic is to take a sixth of the emulated time: convolutions of the digits reach a third of the
# processor's best, and half of the time is left free


class Work(NamedTuple):
    """Seconds of a step on an emulated device, and for each trainable parameter when backward is done with it."""

    forward_s: float
    backward_s: float
    update_s: float
    ready_s: dict

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.forward_s + self.backward_s + self.update_s


def work_of(job: dict, device: Device, ranks: int = 1) -> tuple[Work, float]:
    """The `Work` of one of `ranks` shares of the job's batch, and its flops: played on the device, nobody waits."""
    problem = problems.make(job["problem"], **job["settings"])
    model = problem.model(job["seed"])
    inputs, targets = next(problem.batches(job["global_batch"], 1, job["seed"], 0, ranks))
    optimizer, ready, forward = SGD(model.parameters(), lr=0.0), {}, 0.0
    with device.emulate(sleep=False) as emulation:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: ready.update({p: emulation.busy_s - forward}))
        loss = cross_entropy(model(inputs), targets)
        forward = emulation.busy_s
        loss.backward()
        backward = emulation.busy_s - forward
        optimizer.step()
    in_order = {parameter: ready[parameter] for parameter in model.parameters() if parameter in ready}
    return Work(forward, backward, emulation.busy_s - forward - backward, in_order), emulation.flops


def chosen(
    job: dict, sizes: dict, device: Device | str, speed: str, link: Link | str | None, latency: str, mode: str
) -> tuple[Device | str, Link | None]:
    """The (device, link) that a comparison runs on, from what was asked for; see `comparison.run`."""
    nbytes, real = sizes["gradient_bytes"], isinstance(device, str) and on_gpus(device)
    if speed not in ("auto", "none"):
        if real:
            raise DeviceError("GPUs have a speed of their own: leave --device-speed out, or choose --device cpu")
        device = Device(speed)
    elif speed == "auto" and not real and not isinstance(device, Device):
        bandwidth = parse_bandwidth(link) if isinstance(link, str) and link not in ("auto", "none") else None
        device = default_device(job, nbytes, link.bandwidth if isinstance(link, Link) else bandwidth)
    if link == "auto":
        wanted = f"{default_bandwidth(job, device, nbytes)}bit" if isinstance(device, Device) else "200Mbit"
        link = None if real else Link(wanted, latency, mode=mode)
    elif isinstance(link, str):
        link = None if link == "none" else Link(link, latency, mode=mode)
    return device, link


def on_gpus(device: str) -> bool:
    """Whether ranks would compute on GPUs if asked for `device`."""
    return device.startswith("cuda") or (device == "auto" and usable_gpus() > 0)


def default_device(job: dict, gradient_bytes: int, bandwidth: float | None = None) -> Device:
    """A device whose step is long enough for this machine to time it, and for links of `bandwidth` (bits a second)."""
    _, flops = work_of(job, Device("1GFLOP/s"))
    ranks = job["world_size"] / usable_cores()  # on each core
    python, real = STEP_SECONDS * max(1.0, ranks / 2), flops * max(1.0, ranks) / capacity.of_core()[0]
    seconds = max(python, SLACK * real, 8 * gradient_bytes / (SHARE * (bandwidth or FASTEST_LINK)))
    return Device(f"{rounded(flops / seconds)}FLOP/s")


def default_bandwidth(job: dict, device: Device, gradient_bytes: int) -> float:
    """Bits a second at which communication takes as large a part of the step as in the course's figures."""
    work, _ = work_of(job, device)
    return max(1e6, min(FASTEST_LINK, rounded(8 * gradient_bytes / (SHARE * work.seconds))))


def rounded(value: float) -> float:
    """Two leading digits."""
    digit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return round(value / digit) * digit
