"""Predicts NCCL's all-reduce inside one host from how its GPUs are wired.

A100s are joined by switches: every pair has the whole bandwidth, whatever K is. V100s have six
wires each, to fixed partners. Their rings exist only along wires, several rings share the message,
and how many fit depends on which GPUs take part: one for two GPUs, two for three, four for four. So
more GPUs can be *faster*.

    A100   c + 2(K-1) a + p (2(K-1)/K / b + d)      d: reading and writing the message once,
                                                    whatever K is
    V100   c + 2(K-1) a + 2(K-1)/K p / (rings b)    b: a single wire

The four numbers c, a, b, d are fitted to K = 2, 3 and 4 (least squares of relative errors); 5 to 8
are predicted. Wires of the V100 host (DGX-1, as `nvidia-smi topo -m` prints it): NVIDIA, "NVIDIA
DGX-1 With Tesla V100 System Architecture", 2017, figure 4.
"""

from collections.abc import Sequence

from .frozen import numbers
from .runs import Row

GPUS = ("A100", "V100")


def rings(gpus: int) -> int:
    """Return how many rings over the first `gpus` V100s fit on the wires at once.

    Each wire is used once in each direction; `make bench predictions` finds the rings.
    """
    from_two_gpus_on = numbers("rings of V100s")
    return int(from_two_gpus_on[gpus - 2])


def fitted(gpu: str) -> list[float]:
    """Return the frozen c, a, 1/b and d of "A100" or "V100", whose formula does not use d."""
    return numbers(f"one host, {gpu}")


def all_reduce_us(row: Row, values: Sequence[float]) -> float:
    """Return the microseconds of a row with gpu, K and message_mib.

    `values` are c and a (µs), 1/b and d (µs per MiB).
    """
    fixed_us, step_us, wire_us_per_mib, copying_us_per_mib = values
    gpus = int(row["K"])
    mib = row["message_mib"]
    moving_us = 2 * (gpus - 1) / gpus * mib * wire_us_per_mib
    if row["gpu"] == "V100":
        moving_us /= rings(gpus)
    else:
        moving_us += mib * copying_us_per_mib
    return fixed_us + 2 * (gpus - 1) * step_us + moving_us
