"""`Link`: a bandwidth, a latency and hosts over which ranks are spread, checked for sense."""

from .. import presets, units
from ..errors import EmulationError
from ..launching.protocol import Network
from . import modes

SLOWEST = 1e6  # With fewer bits per second the ranks would need minutes to find each other.


class Link:
    """An emulated link: `bandwidth` in each direction, `latency` one way, as "200Mbit" and "5ms".

    Every host has such a link. A bandwidth may also be a name in `presets.LINKS`, such as "NVLink".

    The ranks are spread over `hosts` hosts in blocks (by default every rank has its own host);
    `inside` is the bandwidth of each rank's link inside its host, such as "NVLink A100"; without it
    messages inside a host take no time. `mode` is "virtual", for virtual time
    (docs/VIRTUAL_TIME.md), or "hosts", for real sockets on virtual hosts in real time. Raises
    EmulationError for values that cannot be read, or are not possible here; the message says which
    values are possible.
    """

    def __init__(
        self,
        bandwidth: str = "200Mbit",
        latency: str = "0ms",
        hosts: int | None = None,
        mode: str = "virtual",
        inside: str | None = None,
    ):
        self.bandwidth = presets.bandwidth(bandwidth)
        if self.bandwidth < SLOWEST:
            raise EmulationError(
                f'the bandwidth "{bandwidth}" is out of range; choose 1Mbit or more'
            )
        self.latency = units.seconds(latency)
        if hosts is not None and (not isinstance(hosts, int) or hosts < 1):
            raise EmulationError(
                f"hosts is {hosts!r}; it must be a whole number, 1 or more, or None for one per"
                " rank"
            )
        self.hosts = hosts
        self.inside = None if inside is None else presets.bandwidth(inside)
        if inside is not None and mode != "virtual":
            raise EmulationError(f'links inside hosts need virtual time; leave out mode="{mode}"')
        self.mode_class = modes.choose(mode, self.latency)
        self.mode = mode

    def __repr__(self):
        return f"Link({self})"

    def __str__(self):
        latency = f", {self.latency * 1e3:g} ms" if self.latency else ""
        hosts = f", {self.hosts} hosts" if self.hosts else ""
        if self.inside:
            hosts += f" with {self.inside / 1e6:g} Mbit/s inside"
        return f"{self.bandwidth / 1e6:g} Mbit/s{latency}{hosts}, {self.mode_class.title}"

    def check(self, world_size: int, backend: str = "gloo") -> None:
        """Raise EmulationError if a launch of `world_size` ranks can never have this link."""
        count = self.hosts or world_size
        if count > world_size:
            raise EmulationError(
                f"{count} hosts for {world_size} ranks; there can be as many hosts as ranks, not"
                " more"
            )
        if "nccl" in backend:
            raise EmulationError(
                "emulated links are for ranks on the CPU, NCCL has wires of its own: choose"
                ' device="cpu" (--device cpu), or no link (--link none)'
            )

    def prepare(self, world_size: int) -> None:
        """Build `network`, in which each host has neighbouring ranks.

        The agent calls this before the ranks start.
        """
        count = self.hosts or world_size
        host_of_rank = [rank * count // world_size for rank in range(world_size)]
        inside = {"inside": self.inside} if self.inside else {}
        self.network: Network = self.mode_class(
            host_of_rank, self.bandwidth, self.latency, **inside
        )

    def describe(self) -> dict:
        """Return the link for JSON: mode, bandwidths (bits per second), latency (s) and hosts."""
        described = {
            "mode": self.mode,
            "bandwidth_bits_s": self.bandwidth,
            "latency_s": self.latency,
            "hosts": self.hosts,
        }
        if self.inside:
            described["inside_bits_s"] = self.inside
        return described
