"""A simulator of bucketed data parallel training, from two devices to thousands.

Read in this order:

    model        layer times and gradient sizes
    step         one training step: backward fills buckets, buckets travel, the update follows
"""

from . import resnets
from .model import Layer, Profile
from .step import Network, Step, simulate

__all__ = [
    "Layer",
    "Network",
    "Profile",
    "Step",
    "resnets",
    "simulate",
]
