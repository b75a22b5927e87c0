"""A simulator of bucketed data parallel training, from two devices to thousands.

Read in this order:

    network      discrete events, links with contention
    algorithms   each all-reduce as the messages it consists of
    model        layer times and gradient sizes: measured by `profile`, or given
    replay       the messages of a real collective, played over links of any speed
    step         one training step: backward fills buckets, buckets travel, the update follows
    published    held against tables that others have published
    measured     held against our own training over virtual hosts
"""

from .model import Layer, Profile, assign_buckets, profile
from .network import Network, Simulation
from .replay import replay
from .step import Step, best_bucket_cap, play, simulate

__all__ = [
    "Layer",
    "Network",
    "Profile",
    "Simulation",
    "Step",
    "assign_buckets",
    "best_bucket_cap",
    "play",
    "profile",
    "replay",
    "simulate",
]
