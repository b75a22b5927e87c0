"""Reads and writes numbers with units, as people do: "200Mbit", "5ms", "5GB/s"."""

import math
import re

from .errors import EmulationError

BANDWIDTHS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
TIMES = {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
RATES = {"flop": 1, "kflop": 1e3, "mflop": 1e6, "gflop": 1e9, "tflop": 1e12}
MEMORY = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}


def bits_per_second(text: str | int) -> float:
    """Parse a bandwidth such as "200Mbit", "3.6Tbit" or "1.5Gbit/s".

    Raises EmulationError for other text.
    """
    return _parse(
        text, BANDWIDTHS, "bandwidth", "200Mbit (bit, kbit, Mbit, Gbit or Tbit per second)"
    )


def seconds(text: str | int) -> float:
    """Parse a time such as "5ms", "10us" or "0s"; raises EmulationError for other text."""
    return _parse(text, TIMES, "time", "5ms (s, ms, us or ns)", zero=True)


def flops_per_second(text: str | int) -> float:
    """Parse a rate of floating-point operations such as "2GFLOP/s".

    Raises EmulationError for other text.
    """
    return _parse(text, RATES, "rate", "2GFLOP/s (FLOP/s, kFLOP/s, MFLOP/s, GFLOP/s or TFLOP/s)")


def bytes_per_second(text: str | int) -> float:
    """Parse a memory's bandwidth such as "5GB/s"; raises EmulationError for other text."""
    return _parse(text, MEMORY, "memory's bandwidth", "5GB/s (B/s, kB/s, MB/s, GB/s)")


def size(text: str | int) -> float:
    """Parse bytes such as "80GB"; raises EmulationError for other text."""
    return _parse(text, MEMORY, "size", "80GB (B, kB, MB, GB or TB)")


def with_unit(value: float, unit: str) -> str:
    """Return a number with its unit, such as "2.5 GFLOP/s" for 2.5e9."""
    for prefix, one in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= one:
            return f"{value / one:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _parse(text, units, what, example, zero=False):
    match = re.fullmatch(
        r"\s*([-+]?[\d.]+(?:e[-+]?\d+)?)\s*([a-zµ]+)(?:/s)?\s*", str(text), re.IGNORECASE
    )
    try:
        number, unit = match.groups()
        value = float(number) * units[unit.replace("µ", "u").lower()]
    except (AttributeError, KeyError, ValueError):
        # There is no match, or no such unit, or no such number.
        raise EmulationError(f'cannot read the {what} "{text}"; write it like {example}') from None
    if not 0 <= value < math.inf or (value == 0 and not zero):
        least = "zero or more" if zero else "more than zero"
        raise EmulationError(
            f'the {what} "{text}" is out of range: it must be {least}; write it like {example}'
        )
    return value
