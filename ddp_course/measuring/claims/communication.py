"""Claims about time and traffic."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...collectives import duplex_server_all_reduce
from ...running import wire
from ...stage3_paramserver import average_on_server
from ...stage4_ring import ring_all_reduce, whole_gradient_ring
from .. import simulate, theory
from ..simulate import resnets
from ..simulate.replay import replay
from ..timing import count_traffic
from .claim import Claim, Outcome
from .models import Branches, on_cpu

MIB = 2**20


def whole_ring_is_ring(world_size: int) -> Outcome:
    """Does passing on whole gradients cost the bytes of ring all-reduce?"""
    whole, chunked = (
        max(traffic.bytes_sent for traffic in count_traffic(collective, MIB, world_size)) / MIB
        for collective in (whole_gradient_ring, ring_all_reduce)
    )
    return Outcome(whole == chunked, f"{whole:g} p instead of {chunked:g} p sent by each rank")


def independent_of_ranks(nbytes: int) -> Outcome:
    """Does the ring take as long on 8 ranks as on 4, but for a quarter? Its bandwidth term alone grows by a sixth."""
    network = simulate.Network(theory.Costs.of_link(100e6, latency=1e-3))
    four, eight = (replay(ring_all_reduce, nbytes, ranks, network) for ranks in (4, 8))
    number = f"{1000 * four:.0f} ms on 4 ranks, {1000 * eight:.0f} ms on 8: {100 * (eight / four - 1):+.0f} %"
    return Outcome(eight < 1.25 * four, number)


def server_formula(server: Callable[..., Any], world_size: int = 3) -> Outcome:
    """Do the messages of a server take 2(K-1) p/b?"""
    costs = theory.Costs.of_link(100e6)
    ratio = replay(server, MIB, world_size, simulate.Network(costs)) / (2 * (world_size - 1) * MIB * costs.beta)
    return Outcome(0.95 < ratio < 1.05, f"{ratio:.2f} of 2(K-1) p/b")


def one_way_server(tensor: torch.Tensor) -> None:
    """The server of stage 3, for one tensor."""
    average_on_server([tensor])


def linear_speedup(devices: int, link: str = "100Gbit") -> Outcome:
    """Is the simulated throughput of ResNet-50 on this many devices at least 90 % of linear?"""
    costs = theory.Costs.of_link({"100Gbit": 100e9, "10Tbit": 10e12}[link], latency=10e-6 if link == "100Gbit" else 0)
    step = simulate.simulate(resnets.profile("resnet50", 0.097), devices, simulate.Network(costs))
    return Outcome(step.efficiency >= 0.9, f"{100 * step.efficiency:.0f} %")


def bigger_is_better(overlap: bool) -> Outcome:
    """Is a step never longer with a larger bucket cap? With overlap, or with all gradients ready at once."""
    costs = theory.Costs.of_link(10e9, latency=50e-6)
    part = 0.1 if overlap else 0.0
    layers = [simulate.Layer(str(index), 0.05 / 50, part / 50, 2 * MIB) for index in range(50)]
    caps = [0.5, 4, 25, 100, 1000]
    profile = simulate.Profile(tuple(layers))
    steps = [simulate.simulate(profile, 16, simulate.Network(costs), bucket_cap_mb=cap).step_s for cap in caps]
    best = caps[steps.index(min(steps))]
    rising = any(later > earlier * 1.001 for earlier, later in pairwise(steps))
    listed = ", ".join(f"{cap:g} MiB {1000 * step:.0f} ms" for cap, step in zip(caps, steps, strict=True))
    return Outcome(not rising, f"{listed} (best {best:g})")


def traffic_on_rank(used: Any, find_unused: bool) -> tuple[int, int, dict[str, int]]:
    """One rank: (bytes, collectives) of the second step of our complete DDP; the first settles the buckets."""
    from ...stage6_ddp import DistributedDataParallel

    model = Branches(used)
    parallel = DistributedDataParallel(model, find_unused_parameters=find_unused, all_reduce=ring_all_reduce)
    inputs, events = torch.randn(8, 64), []
    for _ in range(2):
        with wire.observing(events.append):
            events.clear()
            parallel(inputs).square().mean().backward()
    sizes = {name: sum(p.numel() * 4 for p in part.parameters()) for name, part in model.named_children()}
    return sum(event.bytes for event in events if event.kind == "send"), backend_calls(parallel, inputs), sizes


def backend_calls(parallel: nn.Module, inputs: torch.Tensor) -> int:
    """How many of torch's collectives one step calls, counted by a stand-in for `dist.all_reduce`."""
    from unittest.mock import patch

    calls, original = [], dist.all_reduce

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    with patch.object(dist, "all_reduce", counted):
        parallel(inputs).square().mean().backward()
    return len(calls)


def search_is_free(find_unused: bool) -> Outcome:
    """Does a step with `find_unused_parameters` do no more collectives than one without?"""
    plain = on_cpu(traffic_on_rank, ("left", "right"), False, world_size=2)[0][1]
    calls = on_cpu(traffic_on_rank, ("left", "right"), find_unused, world_size=2)[0][1]
    return Outcome(calls <= plain, f"{calls - plain} more all-reduce a step, and a walk through the graph")


def only_used_travel(used: Any) -> Outcome:
    """Are only the bytes of parameters in use communicated?"""
    sent, _, sizes = on_cpu(traffic_on_rank, used, True, world_size=2)[0]
    wanted = sum(size for name, size in sizes.items() if name in (*used, "trunk"))
    everything = sum(sizes.values())
    number = f"{100 * sent / everything:.0f} % of the bytes sent, {100 * wanted / everything:.0f} % in use"
    return Outcome(sent <= 1.01 * wanted, number)


CLAIMS = [
    Claim(
        2,
        "In ring all-reduce every device passes on the gradients that it received until all have all.",
        "counted",
        {"K = 2": partial(whole_ring_is_ring, 2), "K = 4": partial(whole_ring_is_ring, 4)},
        "holds only if K = 2",
        "That is the whole-gradient ring, (K-1) p bytes; ring all-reduce passes chunks and sums, 2(K-1)/K p.",
    ),
    Claim(
        3,
        "The time of ring all-reduce is independent of the number of devices.",
        "simulated",
        {
            "the message is large": partial(independent_of_ranks, 4 * MIB),
            "the message is small": partial(independent_of_ranks, 1024),
        },
        "holds only if the message is large",
        "The bandwidth term is nearly constant, but 2(K-1) latencies remain, and a small message is all latency.",
    ),
    Claim(
        4,
        "A parameter server takes 2(K-1) p/b.",
        "simulated",
        {
            "it collects everything before it sends": partial(server_formula, one_way_server),
            "it sends while it still collects": partial(server_formula, duplex_server_all_reduce),
        },
        "holds only if it collects everything before it sends",
        "A cable carries both directions at once: a server that works in pieces needs little more than (K-1) p/b.",
    ),
    Claim(
        9,
        "Speed-up is linear: K devices are K times as fast.",
        "simulated",
        {f"K = {devices}": partial(linear_speedup, devices) for devices in (2, 16, 128, 1024, 4096)},
        "holds up to K = 128",
        "At 90 % of linear or more (ResNet-50, 100 Gbit/s, 10 µs). 2(K-1) latencies a bucket grow with K, until "
        "the backward pass cannot hide them any more.",
        {"links cost nothing": partial(linear_speedup, 4096, "10Tbit")},
    ),
    Claim(
        11,
        "Bigger buckets are always better.",
        "simulated",
        {
            "backward can hide communication": partial(bigger_is_better, True),
            "there is nothing to hide it behind": partial(bigger_is_better, False),
        },
        "holds only if there is nothing to hide it behind",
        "Many small buckets pay many latencies; one large bucket starts only when backward is over. "
        "The best lies between, and so smaller is not always better either.",
    ),
    Claim(
        17,
        "find_unused_parameters=True costs nothing.",
        "counted",
        {"it is set": partial(search_is_free, True)},
        "false",
        "Every step walks through the graph and all-reduces a bitmap of the parameters in use.",
        {"it is not set": partial(search_is_free, False)},
    ),
    Claim(
        19,
        "Only the parameters that this forward pass uses are communicated.",
        "counted",
        {
            "all parameters are used": partial(only_used_travel, ("left", "right")),
            "a part of the model is unused": partial(only_used_travel, ("left",)),
        },
        "holds only if all parameters are used",
        "Buckets travel whole: a bucket with one used parameter in it is sent entirely, with zeros for the others.",
    ),
]
