"""`launch(fn, hosts=…)`: one launch over several machines, each with an ipyparallel engine that has
joined.

    caller (head) ── ipyparallel, CurveZMQ ── engine on host a ── ranks 0 … 3, as in a launch there
                                          └── engine on host b ── ranks 4 … 7

The head packs the call once, tells every engine its ranks and the store's address, and then keeps
asking for news. Gradients go from host to host through torch.distributed alone.
"""

import json
import pickle
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

from ...errors import LaunchError
from ..files import connection_folder, replace_file
from ..torch_inside import serve_store_on
from . import engine
from .launched import Launch, Ranks

SILENCE_SECONDS = 2.5  # an engine that sends no answer for this many seconds counts as lost
SURVEY_SECONDS = 20.0  # the first call to an engine imports torch there
ENDING_SECONDS = SILENCE_SECONDS + 0.5  # all hosts end their ranks within this many seconds
POLL_SECONDS = 0.005
HOSTS_BEFORE = "hosts.json"  # this file, beside the keys, has the names of hosts that have answered


def run_on_hosts(
    hosts: str | list,
    payload: IO[bytes],
    world_size: int,
    device: Any,
    timeout: float,
    link: Any,
    progress: bool | int,
    show: Callable,
) -> list:
    """Run a packed call on ranks of several hosts; return results in rank order, or raise an error
    naming the host.
    """
    if link is not None:
        raise ValueError(
            "between real hosts links are not emulated; launch without link, or without hosts"
        )
    with connect() as client:
        members = members_of(client, hosts)[:world_size]
        request = {
            "world_size": world_size,
            "device": device,
            "timeout": timeout,
            "progress": progress,
        }
        return (
            Launch(RanksOnHosts(members, request), world_size, timeout, progress, show)
            .run(payload)
            .outcome()
        )


def connect() -> Any:
    """Return a client of the controller that `ddp-course hosts start` has started."""
    file = connection_folder() / "ipcontroller-client.json"
    if not file.is_file():
        raise LaunchError(
            f"no hosts have been brought together ({file} is missing); run: ddp-course hosts start"
        )
    from ipyparallel import (
        Client,
    )  # the extra ddp-course[hosts] installs it; no host starts without that extra

    try:
        return Client(str(file), timeout=5)
    except Exception as error:  # the error may be an OSError or ipyparallel's TimeoutError
        raise LaunchError(
            f"the controller of {file} does not answer; run: ddp-course hosts start\n{error}"
        ) from None


def members_of(client: Any, hosts: str | list) -> list:
    """Return the hosts that were asked for, sorted by their names.

    Raises LaunchError if hosts are missing, or have other versions than this machine.
    """
    if hosts != "all" and not isinstance(hosts, (list, tuple)):
        raise ValueError(f'hosts is {hosts!r}; choose "all", or a list of their names')
    expected = hosts_before() if hosts == "all" else set(hosts)
    joined = survey(client)
    names = {host.name for host in joined}
    replace_file(
        connection_folder() / HOSTS_BEFORE, json.dumps(sorted(names | hosts_before())).encode()
    )
    if not names or expected - names:
        missing = ", ".join(sorted(expected - names)) or "all"
        here = f"here are {', '.join(sorted(names))}" if names else "none has joined"
        without = f"; or launch without: hosts={sorted(names)}" if names and hosts == "all" else ""
        raise LaunchError(
            f"missing: {missing}; {here}. On each host: ddp-course hosts join FILE{without}"
        )
    chosen = joined if hosts == "all" else [host for host in joined if host.name in hosts]
    for host in chosen:
        for name, value in engine.versions().items():
            if (theirs := host.versions[name]) != value:
                raise LaunchError(
                    f"{host.name} has {name} {theirs}, this machine {value}; install the same"
                )
    return chosen


def hosts_before() -> set:
    """Return the names of all hosts that have answered since the controller was started."""
    file = connection_folder() / HOSTS_BEFORE
    return set(json.loads(file.read_text())) if file.is_file() else set()


def survey(client: Any) -> list:
    """Return all hosts whose engines answer, sorted by name, as engines are numbered in the order
    of joining.
    """
    views = [client[number] for number in sorted(client.ids)]
    replies = [view.apply_async(engine.survey, head_address()) for view in views]
    hosts = []
    for view, reply in zip(views, replies, strict=True):
        with suppress(Exception):  # ipyparallel's errors for a lost engine have no common base
            hosts.append(Host(view, *reply.get(timeout=SURVEY_SECONDS)))
    return sorted(hosts, key=lambda host: host.name)


def head_address() -> str:
    """Return the controller's address, as the engines know it."""
    return json.loads((connection_folder() / "ipcontroller-engine.json").read_text())["location"]


@dataclass(eq=False)
class Host:
    """A host: ipyparallel's view of its engine, the engine's `survey`, its ranks, and the reply
    with their news.
    """

    view: Any
    name: str
    card: str
    versions: dict
    ranks: list = field(default_factory=list)
    news: Any = None
    asked_at: float = 0.0

    def ask_for_news(self, number: int) -> None:
        """Ask for the events of a launch's ranks; the reply comes later, in `news`."""
        self.news, self.asked_at = self.view.apply_async(engine.news, number), time.monotonic()


class RanksOnHosts(Ranks):
    """The ranks of a launch over several hosts, whose engines are asked for the ranks' events again
    and again.
    """

    def __init__(self, hosts: list, request: dict):
        self.hosts, self.request, self.number = hosts, request, secrets.randbits(64)
        for rank in range(request["world_size"]):
            hosts[rank * len(hosts) // request["world_size"]].ranks.append(rank)
        self.left = list(hosts)  # these hosts still have processes of this launch
        self.lost: list = []  # each entry says in words why a host is lost
        self.store: Any = None

    def gather(self, replies: list) -> list:
        """Return the answers of all hosts, in their order; raises LaunchError if one of the answers
        is an exception.
        """
        answers = []
        for host, reply in zip(self.hosts, replies, strict=True):
            try:
                answers.append(reply.get(timeout=SURVEY_SECONDS))
            except Exception as error:
                words, *_ = str(error).split("\n")
                raise LaunchError(f"{host.name} cannot take part: {words}") from None
        return answers

    def start(self, payload: IO[bytes]) -> None:
        """Open the store here, and start the ranks on all hosts."""
        packed, device = payload.read(), self.request["device"]
        replies = [
            host.view.apply_async(engine.backend, len(host.ranks), device) for host in self.hosts
        ]
        backends = set(self.gather(replies))
        self.store = serve_store_on(socket.create_server((head_address(), 0), backlog=1024))
        self.request |= {
            "store": (self.store.host, self.store.port),
            "backend": backends.pop() if len(backends) == 1 else "gloo",
        }
        begin = partial(engine.begin, self.number, self.request, packed)
        self.gather([host.view.apply_async(begin, host.ranks, host.card) for host in self.hosts])
        for host in self.hosts:
            host.ask_for_news(self.number)

    def step(self, seconds: float) -> bool:
        """Pass on what engines answer within `seconds`, and ask them again; return False if nothing
        came.
        """
        deadline = time.monotonic() + seconds
        while (
            not (came := any([self.take(host) for host in self.left.copy()]))
            and time.monotonic() < deadline
        ):
            time.sleep(POLL_SECONDS)
        return came

    def take(self, host: Host) -> bool:
        """Pass on the news of one host; return whether there was any."""
        silent = time.monotonic() > host.asked_at + SILENCE_SECONDS
        if not host.news.ready() and not silent:
            return False
        try:
            events = pickle.loads(host.news.get(timeout=0))
        except Exception:  # the engine died: ipyparallel's errors for that have no common base
            self.leave(host, f"lost {host.name} in mid-launch")
            return True
        if not events or events[-1][0] != "over":
            host.ask_for_news(self.number)
        for kind, rank, value in events:
            if kind == "over":  # here rank and value say whether the ranks ended too soon, and why
                self.leave(host, f"{host.name}: {value}" if rank else "")
            elif kind == "refused":
                self.hear(kind, rank, LaunchError(f"{host.name}: {value}"))
            else:
                self.hear(kind, rank, value)
        return bool(events)

    def leave(self, host: Host, reason: str) -> None:
        """Note that no process of this launch is left on a host; `reason` says why, if that was too
        soon.
        """
        self.left.remove(host)
        self.gone |= not self.left or bool(reason)
        if reason:
            self.cut_off = True
            self.lost.append(reason)

    def order(self, word: bytes) -> None:
        for host in self.left:
            host.view.apply_async(engine.call, self.number, "order", word)

    def look(self, pids: dict) -> tuple[dict, dict, dict]:
        statuses, dumps, calls = {}, {}, {}
        replies = [
            host.view.apply_async(engine.call, self.number, "look", pids) for host in self.left
        ]
        for reply in replies:
            with suppress(Exception):  # the engine died: nothing is known of its ranks
                own_statuses, own_dumps, own_calls = reply.get(timeout=SILENCE_SECONDS)
                statuses |= own_statuses
                dumps |= own_dumps
                calls |= own_calls
        return statuses, dumps, calls

    def host_of(self, rank: int) -> str:
        return next(host.name for host in self.hosts if rank in host.ranks)

    def close(self) -> None:
        """Have all hosts end their ranks, wait until they have, and close the store."""
        for host in self.left:
            host.view.apply_async(engine.end, self.number)
            if host.news is None:
                host.ask_for_news(self.number)
        self.read_for(ENDING_SECONDS, lambda: not self.left)
        self.store = None

    def explain(self) -> str:
        return "; ".join(sorted(self.lost))
