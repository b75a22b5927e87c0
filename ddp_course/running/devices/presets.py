"""Accelerators as their makers publish them: peak rate of dense 16-bit arithmetic, and the memory's bandwidth."""

from typing import NamedTuple


class Accelerator(NamedTuple):
    """`rate` in floating-point operations per second, `memory` in bytes per second, and where the numbers stand."""

    rate: float
    memory: float
    source: str


ACCELERATORS = {
    "V100": Accelerator(125e12, 0.9e12, "NVIDIA, V100 datasheet (SXM2, 32 GB): 125 TFLOP/s of tensor cores, 900 GB/s"),
    "A100": Accelerator(312e12, 2.039e12, "NVIDIA, A100 datasheet (SXM, 80 GB): 312 TFLOP/s in bfloat16, 2,039 GB/s"),
    "H100": Accelerator(
        989e12,
        3.35e12,
        "NVIDIA, H100 datasheet (SXM): 1,979 TFLOP/s in bfloat16 with sparsity, half without; 3.35 TB/s",
    ),
    "laptop": Accelerator(3.6e12, 0.1e12, "Apple, newsroom, 6 June 2022 (M2): GPU of 3.6 TFLOP/s, memory of 100 GB/s"),
}
