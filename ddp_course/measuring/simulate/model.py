"""What the simulator needs to know of a model: how long each layer takes, and how many bytes of
gradient it has.
"""

from typing import NamedTuple

import torch

from ... import stage5_bucketed


class Layer(NamedTuple):
    """One layer or parameter: seconds of its forward and backward pass, bytes of its gradient."""

    name: str
    forward_s: float
    backward_s: float
    gradient_bytes: float


class Profile(NamedTuple):
    """`layers` in forward order, the seconds of the optimizer's update, and the flops of a step, if
    known.

    Backward runs through the layers in reverse.
    """

    layers: tuple[Layer, ...]
    update_s: float = 0.0
    flops: float = 0.0

    @property
    def gradient_bytes(self) -> float:
        """Bytes of all gradients together."""
        return sum(layer.gradient_bytes for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Seconds of a step on one device, without communication."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers) + self.update_s


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
