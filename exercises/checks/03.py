"""Exercise 3: the server's two loops, the average, and the time it takes."""

import torch
import torch.distributed as dist

from ddp_course.grading.attempt import COLLECTIVES, RING, SERVER, tensors, worlds
from ddp_course.grading.checks import task
from ddp_course.running import wire

LENGTH = 17
LOOP = {"ranks": 4, "forbidden": SERVER + RING + COLLECTIVES}


def draw_server(random, hidden, whole=True):
    """Tensors that differ by rank (in float64 if `hidden`), and a server for each world size."""
    dtype = torch.float64 if hidden else torch.float32
    servers = {3: random.randrange(1, 3), 4: random.randrange(4), 2: 1, 1: 0}
    return {"values": tensors(random, 4, LENGTH, dtype=dtype, whole=whole), "servers": servers}


def probe_server(function, values, servers):
    """Every rank's tensor after `function(tensor, server, group)` in worlds of 3, 4, 2 and 1, and the bytes it sent."""
    evidence = {"values": {}, "bytes": {}}
    for size, group in worlds(3, 4, 2, 1):
        tensor = values[dist.get_rank()].clone()
        with wire.counting() as traffic:
            function(tensor, servers[size], group)
        case = f"with {size} ranks and rank {servers[size]} as server"
        evidence["values"][case] = tensor
        evidence["bytes"][f"{case}, bytes sent"] = traffic.bytes_sent
    return evidence


@task("3.1", "collect", {"values": 1, "bytes": 1}, **LOOP)
class Collect:
    """The first loop: the server has the sum, the others what they had, and send it once."""

    draw = draw_server
    probe = probe_server


@task("3.2", "send_back", {"values": 1, "bytes": 1}, **LOOP)
class SendBack:
    """The second loop: everyone has the server's tensor, and only the server sends."""

    draw = draw_server
    probe = probe_server


@task("3.3", "average", {"values": 1, "bytes": 1}, **LOOP)
class Average:
    """The mean on every rank: p bytes to the server, and p back to each."""

    def draw(random, hidden):
        """Real numbers, different on every rank, and servers that are not always rank 0."""
        return draw_server(random, hidden, whole=False)

    probe = probe_server


@task("3.4", "server_seconds", {"two ranks": 0.5, "growth with K": 0.5})
class ServerSeconds:
    """The closed form 2 (K-1) p/b: right for two ranks, and K-1 times as long with K."""

    def draw(random, hidden):
        """World sizes (1 among them), each with a number of parameters and bits per second."""
        sizes = [random.randrange(3, 65) for _ in range(4)] + [1]
        return {"cases": [(k, random.randrange(1, 400) * 10**6, random.randrange(1, 100) * 10**8) for k in sizes]}

    def probe(server_seconds, cases):
        """The seconds with two ranks, and how many times as long K ranks take."""
        two, growth = {}, {}
        for size, parameters, bits in cases:
            about = f"{parameters:,} parameters, {bits:,} bit/s"
            two[f"2 ranks, {about}: seconds"] = once = server_seconds(2, parameters, bits)
            more = server_seconds(size, parameters, bits)
            growth[f"{size} ranks, {about}: times as long as 2 ranks"] = more / once if once else more
        return {"two ranks": two, "growth with K": growth}
