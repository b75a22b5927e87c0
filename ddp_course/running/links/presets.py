"""Links as they are published: bits per second in each direction, and seconds of latency per message.

Latencies are those that NCCL reckons with for one step of a ring with its protocol for large messages (file
src/graph/tuning.cc, table hwLat, version 2.19): 3.4 us over NVLink, 5.7 over PCIe, 14 over a network.
"""

from typing import NamedTuple


class KnownLink(NamedTuple):
    """`bandwidth` in bits per second, each way; `latency` in seconds; `source` of the bandwidth."""

    bandwidth: float
    latency: float
    source: str


NVLINK, PCIE, NETWORK = 3.4e-6, 5.7e-6, 14e-6
LINKS = {
    "NVLink V100": KnownLink(8 * 150e9, NVLINK, "NVIDIA, V100 datasheet: 300 GB/s both ways together"),
    "NVLink A100": KnownLink(8 * 300e9, NVLINK, "NVIDIA, A100 datasheet: 600 GB/s both ways together"),
    "NVLink H100": KnownLink(8 * 450e9, NVLINK, "NVIDIA, H100 datasheet: 900 GB/s both ways together"),
    "PCIe 4": KnownLink(16 * 16e9 * 128 / 130, PCIE, "PCI Express 4.0: 16 lanes of 16 GT/s, 128 bits of every 130"),
    "100Gbit Ethernet": KnownLink(100e9, NETWORK, "IEEE 802.3ba"),
    "10Gbit Ethernet": KnownLink(10e9, NETWORK, "IEEE 802.3ae"),
    "laptop": KnownLink(1e9, NETWORK, "IEEE 802.3ab: Ethernet of 1 Gbit/s, as laptops and home networks have it"),
}
