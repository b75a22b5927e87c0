"""A simulator of bucketed data parallel training, from two devices to thousands.

Read in this order:

    network      discrete events, links with contention
    algorithms   the messages of all-reduces that are not run
    model        layer times and gradient sizes
    step         one training step: backward fills buckets, buckets travel, the update follows
"""

from . import resnets
from .model import Layer, Profile, assign_buckets
from .network import Network, Simulation
from .step import Step, play, simulate

__all__ = [
    "Layer",
    "Network",
    "Profile",
    "Simulation",
    "Step",
    "assign_buckets",
    "play",
    "resnets",
    "simulate",
]
