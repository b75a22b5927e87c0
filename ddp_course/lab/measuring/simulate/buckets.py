"""Finds the layers of a model that fill the buckets of the simulator."""

import torch

from .... import stage5_bucketed
from ....job import Profile


def full_buckets(profile: Profile, bucket_cap_mb: float) -> dict[int, int]:
    """Return the bytes of each bucket of stage 5, in sending order.

    The keys are the indices of the layers whose gradients fill the buckets.
    """
    # Stage 5 asks tensors for their sizes only, so tensors without memory will do.
    layer_of = {
        torch.empty(round(layer.gradient_bytes), dtype=torch.uint8, device="meta"): index
        for index, layer in enumerate(profile.layers)
        if layer.gradient_bytes
    }
    buckets = {}
    for bucket in stage5_bucketed.assign_buckets(list(layer_of), bucket_cap_mb):
        last_layer = layer_of[bucket[-1]]
        buckets[last_layer] = sum(gradient.nbytes for gradient in bucket)
    return buckets
