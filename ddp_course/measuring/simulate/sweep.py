"""The simulator asked many times: by number of devices, by bucket cap."""

from .step import CAPS_MB, simulate

KNEE = 0.9  # the efficiency below which we say that scaling has ended


def by_devices(profile, devices, network, algorithm="ring", **options):
    """A `Step` for each number in `devices`; options are those of `simulate`."""
    return [simulate(profile, count, network, algorithm, **options) for count in devices]


def by_bucket_cap(profile, world_size, network, caps_mb=CAPS_MB, **options):
    """A list of (cap in MiB, `Step`); options are those of `simulate`."""
    return [(cap, simulate(profile, world_size, network, bucket_cap_mb=cap, **options)) for cap in caps_mb]


def knee(steps):
    """The largest K up to which every step is at least 90 % efficient, None if the first is not."""
    reached = None
    for step in sorted(steps, key=lambda step: step.world_size):
        if step.efficiency < KNEE:
            break
        reached = step.world_size
    return reached
