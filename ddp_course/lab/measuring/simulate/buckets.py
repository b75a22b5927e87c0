"""Which layers of a model fill the buckets that the simulator sends."""

import torch

from .... import stage5_bucketed
from ....job import Profile


def full_buckets(profile: Profile, bucket_cap_mb: float) -> dict[int, int]:
    """{index of the layer whose gradient fills a bucket of stage 5: the bucket's bytes}, in the
    order sent.
    """
    # Stage 5 asks tensors for their sizes only, so that some without memory will do.
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
