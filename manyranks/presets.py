"""Accelerators and links as their makers publish them."""

import csv
from importlib.resources import files
from typing import NamedTuple

from . import units
from .errors import EmulationError

NVLINK = "NVLink"  # Without an accelerator's name this means the newest NVLink of LINKS.


class Accelerator(NamedTuple):
    """An accelerator by its maker's numbers.

    `rate` is in floating-point operations per second of dense 16-bit arithmetic. `memory` is the
    bandwidth of its memory in bytes per second, and `capacity_gb` is the size of that memory.
    `cycles` are those of all multiprocessors together, per second. `link`, a name in LINKS, joins
    it to its neighbours in a host; `network` is in bits per second of all cards of such a host.
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


def bandwidth(text: str | int, accelerator_name: str | None = None) -> float:
    """Return the bits per second of a link of LINKS, or of a text such as "25Gbit".

    "NVLink" alone is that of the accelerator, or else the newest. Raises EmulationError for other
    text.
    """
    if text == NVLINK:
        known = accelerator(str(accelerator_name))
        *_, text = (link for link in LINKS if link.startswith(NVLINK))
        if known is not None and known.link.startswith(NVLINK):
            text = known.link
    if text in LINKS:
        return LINKS[str(text)].bandwidth
    try:
        return units.bits_per_second(text)
    except EmulationError as error:
        names = ", ".join([NVLINK, *LINKS])
        raise EmulationError(f"{error}; or give the name of a link: {names}") from None


def accelerator(name: str) -> Accelerator | None:
    """Return the accelerator with this name, which may be an alias; None for another name."""
    return ACCELERATORS.get(ALIASES.get(name, name))


def rate(text: str | int) -> float:
    """Return the flops per second of a text such as "2GFLOP/s".

    Raises EmulationError, which names the known accelerators too, for other text.
    """
    try:
        return units.flops_per_second(text)
    except EmulationError as error:
        names = ", ".join([*ACCELERATORS, *ALIASES])
        raise EmulationError(
            f'unknown device "{text}": {error}; or choose one of {names}'
        ) from None


def teach(text: str) -> str:
    """Add an accelerator from a text such as "X1=500TFLOP/s,2TB/s"; return its name.

    After the two rates there may be the memory's size ("96GB"), the link inside a host (a name in
    LINKS) and the network of all cards of a host ("3200Gbit"). What is not given is as for the
    A100, and so are the cycles for each flop. Raises EmulationError for other text.
    """
    name, _, words = text.partition("=")
    parts = [word.strip() for word in words.split(",")]
    if not (name.strip() and len(parts) > 1):
        raise EmulationError(
            f'cannot read the accelerator "{text}"; write it like X1=500TFLOP/s,2TB/s or'
            " X1=500TFLOP/s,2TB/s,96GB,NVLink H100,3200Gbit"
        )
    flops, memory, *details = parts
    usual = ACCELERATORS["A100"]
    rate = units.flops_per_second(flops)
    taught = usual._replace(
        rate=rate,
        memory=units.bytes_per_second(memory),
        cycles=usual.cycles * rate / usual.rate,
    )
    for word in details:
        taught = taught._replace(**detail(word))
    ACCELERATORS[name.strip()] = taught
    return name.strip()


def detail(word: str) -> dict:
    """Return the field that a word gives an Accelerator: a link's name, a size or a bandwidth."""
    if word in LINKS:
        return {"link": word}
    if word.lower().endswith("bit"):
        return {"network": units.bits_per_second(word)}
    return {"capacity_gb": units.size(word) / 1e9}
