"""Exercise 3: the server's two loops, the average, and the time it takes."""

import torch
import torch.distributed as dist

from ...running import wire
from ..probing import traffic_of, worlds
from . import require, task
from .diagnose import close, compare_numbers, compare_ranks, number, tensors
from .forbidden import COLLECTIVES, RING, SERVER

LENGTH = 17


def probe_server(function, values, servers):
    """Call `function(tensor, server, group)` in worlds of 2, 3, 4 and 1; tensors after it, and the traffic."""
    evidence = {}
    for size, group in worlds(3, 4, 2, 1):
        tensor = values[dist.get_rank()].clone()
        with wire.counting() as traffic:
            function(tensor, servers[size], group)
        evidence[size] = {"tensor": tensor, "traffic": traffic_of(traffic)}
    return evidence


def draw_server(random, hidden, whole=True):
    """Rank-distinct tensors, and a server for each world size."""
    dtype = torch.float64 if hidden else torch.float32
    servers = {3: random.randrange(1, 3), 4: random.randrange(4), 2: 1, 1: 0}
    return {"values": tensors(random, 4, LENGTH, dtype=dtype, whole=whole), "servers": servers}


def check_all_traffic(evidence, values, servers, share, what):
    """What the server and each of the others should send: `share(size)` gives both, in tensors."""
    for size, server in servers.items():
        p = values[0].numel() * values[0].element_size()
        for rank in range(size):
            sent, expected = evidence[rank][size]["traffic"], p * share(size)[rank != server] * (size > 1)
            about = f"{size} ranks: rank {rank} sent {sent['bytes']} bytes in {sent['messages']} messages"
            require(sent["bytes"] == expected, f"{about}; {expected} bytes were expected: {what}")


@task("3.1", "collect", ranks=4, forbidden=SERVER + RING + COLLECTIVES, private=("values",))
class Collect:
    """The first loop: everything to the server, which adds it up."""

    def draw(random, hidden):
        """Whole numbers, different on every rank, and servers that are not always rank 0."""
        return draw_server(random, hidden)

    def probe(collect, values, servers):
        """Every rank's tensor after the first loop, and what it sent."""
        return probe_server(collect, values, servers)

    def judge_values(evidence, values, servers):
        """The server has the sum, the others what they had."""
        for size, server in servers.items():
            own, total = values[:size], sum(values[:size])
            expected = [total if rank == server else own[rank] for rank in range(size)]
            last = max((rank for rank in range(size) if rank != server), default=0)
            guesses = [
                ("the server has only its own tensor: add what it receives to it, in place", own),
                ("the server has only what came last: add, do not overwrite", [own[last]] * size),
                ("the server's own tensor is missing in the sum", [total - own[server]] * size),
                ("the server has the mean: here it only adds up, the division comes later", [total / size] * size),
                (
                    "the server adds up one tensor several times: wait for each before adding it",
                    [own[server] + (size - 1) * own[last]] * size,
                ),
            ]
            found = [evidence[rank][size]["tensor"] for rank in range(size)]
            about = f"with {size} ranks and rank {server} as server"
            compare_ranks(found, expected, about, guesses, oracle="the sum on the server alone")

    def judge_bytes(evidence, values, servers):
        """Each of the others sends p bytes, the server nothing."""
        check_all_traffic(
            evidence, values, servers, lambda size: (0, 1), "each of the others sends its tensor once, over the wire"
        )

    parts = {"values": (1, judge_values), "bytes": (1, judge_bytes)}


@task("3.2", "send_back", ranks=4, forbidden=SERVER + RING + COLLECTIVES, private=("values",))
class SendBack:
    """The second loop: the server's tensor to everyone."""

    def draw(random, hidden):
        """Whole numbers, different on every rank, and servers that are not always rank 0."""
        return draw_server(random, hidden)

    def probe(send_back, values, servers):
        """Every rank's tensor after the second loop, and what it sent."""
        return probe_server(send_back, values, servers)

    def judge_values(evidence, values, servers):
        """Everyone has the server's tensor."""
        for size, server in servers.items():
            own = values[:size]
            guesses = [
                ("they still have their own tensor: receive into the tensor itself, in place", own),
                (
                    "they added what came from the server: it is finished, so it replaces theirs",
                    [own[server] + one for one in own],
                ),
                ("they have rank 0's tensor, but the server is another rank", [own[0]] * size),
            ]
            found = [evidence[rank][size]["tensor"] for rank in range(size)]
            about = f"with {size} ranks and rank {server} as server"
            compare_ranks(found, [own[server]] * size, about, guesses, oracle="the server")

    def judge_bytes(evidence, values, servers):
        """Only the server sends: (K-1) p bytes."""
        said = "the server sends its tensor to each of the others, over the wire"
        check_all_traffic(evidence, values, servers, lambda size: (size - 1, 0), said)

    parts = {"values": (1, judge_values), "bytes": (1, judge_bytes)}


@task("3.3", "average", ranks=4, forbidden=SERVER + RING + COLLECTIVES, private=("values",))
class Average:
    """The mean on every rank, by way of the server."""

    def draw(random, hidden):
        """Real numbers, different on every rank, and servers that are not always rank 0."""
        return draw_server(random, hidden, whole=False)

    def probe(average, values, servers):
        """Every rank's tensor afterwards, and what it sent."""
        return probe_server(average, values, servers)

    def judge_values(evidence, values, servers):
        """Everyone has the mean."""
        for size in servers:
            own = values[:size]
            total = sum(own)
            guesses = [
                ("the tensors have not changed: the mean must end up in the tensor itself, in place", own),
                ("you have the sum: is there a division by K?", [total] * size),
                ("it was divided by K twice", [total / size / size] * size),
                ("it was divided by 4: K is the size of the group", [total / 4] * size),
                ("the rank's own tensor was divided: has the sum come back from the server?", [o / size for o in own]),
            ]
            found = [evidence[rank][size]["tensor"] for rank in range(size)]
            compare_ranks(
                found, [total / size] * size, f"with {size} ranks, the mean", guesses, 1e-6, oracle="the mean"
            )

    def judge_bytes(evidence, values, servers):
        """(K-1) p bytes from the server, p from each of the others."""
        said = "p bytes a rank to the server, and p back to each"
        check_all_traffic(evidence, values, servers, lambda size: (size - 1, 1), said)

    parts = {"values": (1, judge_values), "bytes": (1, judge_bytes)}


@task("3.4", "server_seconds")
class ServerSeconds:
    """The closed form 2 (K-1) p/b."""

    def draw(random, hidden):
        """Numbers of parameters and bits per second, each with two ranks and with another number (1 among them)."""
        sizes = [random.randrange(3, 65) for _ in range(4)] + [1]
        drawn = [(k, random.randrange(1, 400) * 10**6, random.randrange(1, 100) * 10**8) for k in sizes]
        return {"cases": [(ranks, *link) for size, *link in drawn for ranks in (2, size)]}

    def probe(server_seconds, cases):
        """The answer in each case."""
        return [server_seconds(*case) for case in cases]

    def judge_two(evidence, cases):
        """2 p/b with two ranks: there and back, in seconds, with bytes and bits told apart."""
        compare_seconds(evidence, cases, [size == 2 for size, _, _ in cases])

    def judge_growth(evidence, cases):
        """K-1 times as long as with two ranks, however long that is."""
        for found in evidence:
            number(found, float, "the time")
        pairs = zip(evidence[::2], evidence[1::2], cases[1::2], strict=True)
        grown = [two > 0 and close(more, (size - 1) * two) for two, more, (size, _, _) in pairs]
        compare_seconds(evidence, cases, [chosen for one in grown for chosen in (False, not one)])

    parts = {"two ranks": (0.5, judge_two), "growth with K": (0.5, judge_growth)}


def compare_seconds(evidence, cases, chosen):
    """2 (K-1) p/b in the `chosen` cases."""
    once = [parameters * 32 / bits for _, parameters, bits in cases]
    sizes = [size for size, _, _ in cases]
    expected = [2 * (size - 1) * seconds for size, seconds in zip(sizes, once, strict=True)]
    faults = {
        "the link carries bits, and a byte has eight": [one / 8 for one in expected],
        "a float32 has four bytes": [one / 4 for one in expected],
        "a float32 has four bytes, and a byte has eight bits": [one / 32 for one in expected],
        "that is one way only: the sums travel back": [one / 2 for one in expected],
        "the server does not send to itself: K-1, not K": [2 * k * s for k, s in zip(sizes, once, strict=True)],
        "that is the ring's time; the server's link carries everything": [
            one / size for one, size in zip(expected, sizes, strict=True)
        ],
        "that does not grow with K, but all tensors pass through the server's link": [2 * s for s in once],
    }
    about = [f"{k} ranks, {p:,} parameters, {b:,} bit/s" for k, p, b in cases]
    compare_numbers(evidence, expected, about, faults, "s", chosen)
