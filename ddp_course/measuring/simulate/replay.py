"""What an algorithm's own messages cost on other links: the code runs for real, the clock is the
simulator's.

Each rank notes when it began and ended every message; the notes are then played in that order over
links of any speed. No time that this machine took enters, so the seconds are the same in every run.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...running import wire
from ...running.launching.launch import launch
from .network import Network, Simulation


def replay(collective: Callable[..., Any], nbytes: int, world_size: int, network: Network) -> float:
    """Simulated seconds of `collective(tensor)` on `nbytes` bytes and `world_size` ranks over
    `network`.
    """
    notes = launch(_messages_on_rank, collective, nbytes, world_size=world_size, device="cpu")
    simulation = Simulation(network)
    return simulation.play(_again(rank, events, simulation) for rank, events in enumerate(notes))


def _messages_on_rank(collective, nbytes):
    """On each rank: the messages of one call as (kind, peer, bytes, start, end)."""
    tensor = torch.zeros(nbytes // 4)
    events = []
    with wire.observing(events.append):
        collective(tensor)
    dist.barrier()
    return [(e.kind, e.peer, e.bytes, e.start, e.end) for e in events if e.kind in ("send", "recv")]


def _again(rank, events, simulation):
    """The process that begins each message, and waits for it, in the order in which the rank
    did.
    """
    begun = {}
    moments = [(start, index, False) for index, (*_, start, _) in enumerate(events)]
    for _, index, ended in sorted(
        moments + [(event[4], index, True) for index, event in enumerate(events)]
    ):
        kind, peer, nbytes, *_ = events[index]
        if ended:
            yield begun[index]
        else:
            sends = kind == "send"
            begun[index] = (
                simulation.send(rank, peer, nbytes) if sends else simulation.receive(rank, peer)
            )
