"""Parameters and buffers travel in few messages."""

import torch

from ddp_course.stage6_ddp.buffers import batches

MIB = 2**20


def test_tensors_of_one_dtype_travel_together_up_to_250_mib():
    """The flat copy of a message takes memory once more, so a large model goes in several."""
    floats = [torch.empty(size * MIB // 4, device="meta") for size in (100, 100, 100, 300, 0, 200, 50)]
    integers = [torch.empty(size * MIB // 8, dtype=torch.int64, device="meta") for size in (200, 49)]
    mixed = [floats[0], integers[0], *floats[1:], integers[1]]
    sizes = sorted([tensor.nbytes // MIB for tensor in batch] for batch in batches(mixed))
    assert sizes == [[0, 200, 50], [100], [100, 100], [200, 49], [300]]
