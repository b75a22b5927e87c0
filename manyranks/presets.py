"""Accelerators and links as their makers publish them."""

import csv
from importlib.resources import files
from typing import NamedTuple

from . import units
from .errors import EmulationError


class Accelerator(NamedTuple):
    """An accelerator: its `rate` in floating-point operations per second of dense 16-bit
    arithmetic, its memory's bandwidth in bytes per second (`memory`) and capacity. `cycles` are
    those of all its multiprocessors together, per second.

    `link` joins it to its neighbours in a host (a name in LINKS); `network` is in bits per second
    of all cards of such a host.
    """

    rate: float
    memory: float
    capacity_gb: float
    cycles: float
    link: str
    network: float


class KnownLink(NamedTuple):
    """A link: its `bandwidth` in bits per second each way, and the `source` of that number."""

    bandwidth: float
    source: str


ALIASES = {"A100-80GB": "A100", "H100-80GB": "H100"}
LINKS = {
    "NVLink V100": KnownLink(8 * 150e9, "NVIDIA, V100 datasheet: 300 GB/s both ways together"),
    "NVLink A100": KnownLink(8 * 300e9, "NVIDIA, A100 datasheet: 600 GB/s both ways together"),
    "NVLink H100": KnownLink(8 * 450e9, "NVIDIA, H100 datasheet: 900 GB/s both ways together"),
    "PCIe 4": KnownLink(
        16 * 16e9 * 128 / 130, "PCI Express 4.0: 16 lanes of 16 GT/s, 128 bits of every 130"
    ),
    "100Gbit Ethernet": KnownLink(100e9, "IEEE 802.3ba"),
    "10Gbit Ethernet": KnownLink(10e9, "IEEE 802.3ae"),
    "laptop": KnownLink(
        1e9, "IEEE 802.3ab: Ethernet of 1 Gbit/s, as laptops and home networks have it"
    ),
}
ACCELERATORS = {}
with (files(__package__) / "accelerators.csv").open(encoding="utf-8") as file:
    for row in csv.DictReader(file):
        ACCELERATORS[row["name"]] = Accelerator(
            rate=1e12 * float(row["tflops"]),
            memory=1e9 * float(row["memory_gb_per_s"]),
            capacity_gb=float(row["capacity_gb"]),
            cycles=1e9 * float(row["multiprocessors"]) * float(row["clock_ghz"]),
            link=row["link"],
            network=1e9 * float(row["network_gbit"]),
        )


def bandwidth(text: str) -> float:
    """The bits per second of a link of LINKS, or of a text such as "25Gbit"; raises EmulationError
    for others.
    """
    return LINKS[text].bandwidth if text in LINKS else units.bits_per_second(text)


def accelerator(name: str) -> Accelerator:
    """The entry `name` of ACCELERATORS; raises EmulationError for a name that is not in it."""
    name = ALIASES.get(name, name)
    if name not in ACCELERATORS:
        raise EmulationError(f'unknown device "{name}"; choose one of {", ".join(ACCELERATORS)}')
    return ACCELERATORS[name]
