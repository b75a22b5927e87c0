"""A simulator of bucketed data parallel training, from two devices to thousands.

Read in this order:

    buckets      which layers' gradients fill a bucket
    step         one training step: backward fills buckets, buckets travel, the update follows
"""

from ....job import Layer, Profile
from . import resnets
from .step import Network, Step, simulate

__all__ = [
    "Layer",
    "Network",
    "Profile",
    "Step",
    "resnets",
    "simulate",
]
