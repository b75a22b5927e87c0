"""The simulator asked many times: by number of devices, by bucket cap."""

from collections.abc import Sequence
from typing import Any

from .model import Profile
from .network import Network
from .step import CAPS_MB, Step, simulate

KNEE = 0.9  # the efficiency below which we say that scaling has ended


def by_devices(
    profile: Profile, devices: Sequence[int], network: Network, algorithm: str = "ring", **options: Any
) -> list[Step]:
    """A `Step` for each number in `devices`; options are those of `simulate`."""
    return [simulate(profile, count, network, algorithm, **options) for count in devices]


def by_bucket_cap(
    profile: Profile, world_size: int, network: Network, caps_mb: Sequence[float] = CAPS_MB, **options: Any
) -> list[tuple[float, Step]]:
    """A list of (cap in MiB, `Step`); options are those of `simulate`."""
    return [(cap, simulate(profile, world_size, network, bucket_cap_mb=cap, **options)) for cap in caps_mb]


def knee(steps: Sequence[Step]) -> int | None:
    """The largest K up to which every step is at least 90 % efficient, None if the first is not."""
    reached = None
    for step in sorted(steps, key=lambda step: step.world_size):
        if step.efficiency < KNEE:
            break
        reached = step.world_size
    return reached
