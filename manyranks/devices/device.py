"""`Device`: an accelerator by two numbers, its rate and the bandwidth of its memory."""

from copy import copy
from typing import Any, NamedTuple

from .. import presets, units
from ..errors import EmulationError
from .emulation import Emulation

EXAMPLE = "products=0.75,attention=0.6,memory=0.9,launch=30us"  # A Reach is given like this.


class Reach(NamedTuple):
    """What kernels reach of a device.

    Shares of its rate count for products and for attention (of all scores, though a causal mask
    leaves out half), a share of its memory's bandwidth, and `launch` seconds come on top of each.
    """

    products: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    launch: float = 0.0

    @classmethod
    def read(cls, text: str) -> "Reach":
        """Return what a text such as "products=0.75,attention=0.6,launch=30us" says.

        Raises EmulationError for other text.
        """
        found = {}
        for word in text.split(","):
            name, _, value = word.strip().partition("=")
            if name not in cls._fields:
                raise EmulationError(
                    f'"{word}" is none of {", ".join(cls._fields)}, as in {EXAMPLE}'
                )
            if name == "launch":
                found[name] = units.seconds(value)
                continue
            try:
                found[name] = float(value)
            except ValueError:
                found[name] = 0.0
            if not 0 < found[name] <= 1:
                raise EmulationError(f'"{word}" is no share above 0 and up to 1, as in {EXAMPLE}')
        return cls(**found)


FULL = Reach()


class Cost(NamedTuple):
    """The seconds of an operation, `bound` by "flops" or "memory"."""

    seconds: float
    bound: str


class Device:
    """An emulated accelerator: its `rate`, as "2GFLOP/s", and its `memory`, as "5GB/s" or None.

    Without a bandwidth the memory takes no time. The `rate` may also be the accelerator's name in
    `presets.ACCELERATORS`, such as "H100".

    An operation takes max(flops/rate, bytes/memory) seconds; the processor does the real arithmetic
    meanwhile, so results equal those of any run, bit for bit. With `streams` the host runs ahead
    of the device, as with a GPU (docs/VIRTUAL_TIME.md). Kernels take the device's full rates unless
    `reach` says what they reach. Raises EmulationError for numbers that are unreadable or out of
    range, and for a name that nobody knows.
    """

    def __init__(
        self, rate: str, memory: str | None = None, streams: bool = False, reach: Reach = FULL
    ):
        self.name: str | None = None
        self.link: Any = None
        self.streams = streams
        self.reach = reach
        # These bytes of its memory count where tensors have sizes only.
        self.capacity: float | None = None
        self.memory: float | None = None
        known = presets.accelerator(rate)
        if known is not None:
            self.name = rate
            self.rate = known.rate
            self.memory = known.memory
            self.capacity = 1e9 * known.capacity_gb
        else:
            self.rate = presets.rate(rate)
        if memory is not None:
            self.memory = units.bytes_per_second(memory)

    def __str__(self):
        memory = f", memory of {units.with_unit(self.memory, 'B/s')}" if self.memory else ""
        plain = f"{units.with_unit(self.rate, 'FLOP/s')}{memory}"
        return f"{self.name} ({plain})" if self.name else plain

    def __repr__(self):
        return f"Device({self})"

    def cost(self, flops: float, nbytes: float, attends: bool = False) -> Cost:
        """Return what an operation costs that computes and moves so much."""
        reach = self.reach
        share = reach.attention if attends else reach.products
        computing = flops / (share * self.rate)
        moving = nbytes / (reach.memory * self.memory) if self.memory else 0.0
        if computing >= moving:
            return Cost(computing + reach.launch, "flops")
        return Cost(moving + reach.launch, "memory")

    def over(self, link: Any) -> "Device":
        """Return this device for a process that emulates several, joined by `link`."""
        device = copy(self)
        device.link = link or self.link
        return device

    def emulate(self, link: Any = None, record: bool = False, sleep: bool = True) -> Emulation:
        """Return a context in which this process computes on devices of this kind.

        Copies between the devices take `link`'s time.
        """
        return Emulation(self.over(link), record, sleep)

    def describe(self) -> dict:
        """Return the device for JSON: rate (FLOP/s), memory (bytes/s or None), name and text."""
        return {
            "rate": self.rate,
            "memory": self.memory,
            "name": self.name,
            "text": str(self),
        }


def for_ranks(device: Any, world_size: int) -> list[Device]:
    """Return one Device for each of `world_size` ranks, from one for all or a list.

    Raises EmulationError for anything else.
    """
    devices = list(device) if isinstance(device, (list, tuple)) else [device] * world_size
    wrong = [each for each in devices if not isinstance(each, Device)]
    if wrong:
        first, *_ = wrong
        raise EmulationError(
            f'{first!r} is no Device; write Device("2GFLOP/s"), or a list with one for each rank'
        )
    if len(devices) != world_size:
        raise EmulationError(
            f"{len(devices)} devices for {world_size} ranks; give one for all, or one for each"
        )
    return devices
