"""`launch(fn, hosts=…)`: one launch over several machines, each with an ipyparallel engine that has joined.

    caller (head) ── ipyparallel, CurveZMQ ── engine on host a ── ranks 0 … 3, as in a launch there
                                          └── engine on host b ── ranks 4 … 7

The head packs the call once, tells every engine its ranks and where the store is, and then keeps asking for news.
torch.distributed does the training: nothing of ours moves a gradient from host to host.
"""

import json
import pickle
import secrets
import socket
import time
from collections.abc import Callable
from typing import IO, Any

from ...errors import LaunchError
from ..files import connection_folder, replace_file
from ..torch_inside import serve_store_on
from . import engine
from .launched import Launch, Ranks

SILENCE_SECONDS = 2.5  # an engine that has not answered for so long is gone
SURVEY_SECONDS = 20.0  # the first call to an engine imports torch there
JOIN_SECONDS = 10.0  # for hosts that are still joining
ENDING_SECONDS = SILENCE_SECONDS + 0.5  # seconds in which all hosts end their ranks
POLL_SECONDS = 0.005
HOSTS_BEFORE = "hosts.json"  # beside the keys: the names of hosts that have answered


def run_on_hosts(
    hosts: str | int | list, payload: IO[bytes], world_size: int, device: Any, timeout: float, link: Any,
    progress: bool | int, show: Callable,
) -> list:  # fmt: skip
    """Run a packed call on ranks of several hosts; results in rank order, errors with the name of the host."""
    if link is not None:
        raise ValueError("between real hosts links are not emulated; launch without link, or without hosts")
    with connect() as client:
        members = members_of(client, hosts)[:world_size]
        request = {"world_size": world_size, "device": device, "timeout": timeout, "progress": progress}
        ranks = RanksOnHosts(client, members, request)
        return Launch(ranks, world_size, timeout, progress, show).run(payload).outcome()


def connect() -> Any:
    """A client of the controller that `ddp-course hosts start` has started."""
    file = connection_folder() / "ipcontroller-client.json"
    if not file.is_file():
        raise LaunchError(f"no hosts have been brought together ({file} is missing); run: ddp-course hosts start")
    from ipyparallel import Client  # only the extra ddp-course[hosts] has it, without which no host is started
    from ipyparallel.error import TimeoutError as NoAnswer

    try:
        return Client(str(file), timeout=5)
    except (NoAnswer, OSError) as error:
        raise LaunchError(f"the controller of {file} does not answer; run: ddp-course hosts start\n{error}") from None


def members_of(client: Any, hosts: str | int | list) -> list:
    """What the engines of the hosts that were asked for say of themselves, sorted by the names of their hosts.

    Waits a moment while some are missing. LaunchError if they stay away, or run other versions than this machine.
    """
    expected, count = wanted(hosts)
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        replies = {number: client[number].apply_async(engine.survey, head_address()) for number in client.ids}
        answers = {number: survey_of(number, reply) for number, reply in replies.items()}
        members = [{"engine": number, **answer} for number, answer in answers.items() if answer]
        names = {member["host"] for member in members}
        missing = sorted(expected - names) or [f"{count - len(members)} more"] * (len(members) < count)
        if not missing or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    replace_file(connection_folder() / HOSTS_BEFORE, json.dumps(sorted(names | hosts_before())).encode())
    if missing:
        here = f"here are {', '.join(sorted(names))}" if names else "none has joined"
        without = f"; or launch without: hosts={sorted(names)}" if names and hosts == "all" else ""
        raise LaunchError(f"missing: {', '.join(missing)}; {here}. On each host: ddp-course hosts join FILE{without}")
    members.sort(key=lambda member: (member["host"], member["engine"]))  # engine ids follow the order of joining
    chosen = members[:count] if isinstance(hosts, int) else [m for m in members if m["host"] in (expected or names)]
    for member in chosen:
        for name, value in engine.versions().items():
            if member[name] != value:
                raise LaunchError(f"{member['host']} has {name} {member[name]}, this machine {value}; install the same")
    return chosen


def wanted(hosts: str | int | list) -> tuple[set, int]:
    """The names of the hosts that must take part, and how many it must be; "all" are those that have ever answered."""
    if isinstance(hosts, int):
        return set(), max(hosts, 1)
    if hosts != "all" and not isinstance(hosts, (list, tuple)):
        raise ValueError(f'hosts is {hosts!r}; choose "all", a number of hosts, or a list of their names')
    return hosts_before() if hosts == "all" else set(hosts), 1


def hosts_before() -> set:
    """The names of all hosts that have answered since the controller was started."""
    file = connection_folder() / HOSTS_BEFORE
    return set(json.loads(file.read_text())) if file.is_file() else set()


def survey_of(number: int, reply: Any) -> dict | None:
    """The survey of an engine; None if it is gone. LaunchError if it cannot run the course."""
    try:
        return reply.get(timeout=SURVEY_SECONDS)
    except Exception as error:  # ipyparallel has no common base for what it raises when an engine is gone
        if "ModuleNotFoundError" in str(error) or "ImportError" in str(error):
            raise LaunchError(f"engine {number} cannot import ddp_course: {str(error).splitlines()[0]}") from None
        return None


def head_address() -> str:
    """The controller's address, as the engines know it."""
    return json.loads((connection_folder() / "ipcontroller-engine.json").read_text())["location"]


class RanksOnHosts(Ranks):
    """The ranks of a launch over several hosts: their engines are asked for news of them, again and again."""

    def __init__(self, client: Any, members: list, request: dict):
        self.client, self.members, self.request, self.number = client, members, request, secrets.randbits(64)
        world_size, count = request["world_size"], len(members)
        self.ranks_on = [[r for r in range(world_size) if r * count // world_size == index] for index in range(count)]
        self.requests: dict = {}  # by host, the reply to the last request for news, and when that was made
        self.late = [0.0] * count  # the clock here is so many seconds ahead of each host's
        self.lost: list = []  # each says in words why a host is gone
        self.store: Any = None
        self.left = set(range(count))  # these hosts still have processes of this launch

    def call(self, index: int, function: Callable, *arguments: Any) -> Any:
        """Call a function in the engine of one host; returns at once, with the coming answer."""
        return self.client[self.members[index]["engine"]].apply_async(function, *arguments)

    def call_all(self, function: Callable, *arguments: list) -> list:
        """Call a function in all engines at once, each with its own arguments; LaunchError if one raises an exception.

        The answers are in the hosts' order.
        """
        replies = [self.call(index, function, *each) for index, each in enumerate(zip(*arguments, strict=True))]
        answers = []
        for member, reply in zip(self.members, replies, strict=True):
            try:
                answers.append(reply.get(timeout=SURVEY_SECONDS))
            except Exception as error:
                words = str(error).split("\n")[0]
                raise LaunchError(f"{member['host']} cannot take part: {words}") from None
        return answers

    def start(self, payload: IO[bytes]) -> None:
        """Open the store here, and start the ranks on all hosts."""
        count, sizes = len(self.members), [len(ranks) for ranks in self.ranks_on]
        backends = set(self.call_all(engine.backend, sizes, [self.request["device"]] * count))
        self.store = serve_store_on(socket.create_server((head_address(), 0), backlog=1024))
        self.request |= {
            "store": (self.store.host, self.store.port),
            "backend": backends.pop() if len(backends) == 1 else "gloo",
        }
        requests = [
            {**self.request, "ranks": ranks, "card": member["card"]}
            for ranks, member in zip(self.ranks_on, self.members, strict=True)
        ]
        self.call_all(engine.begin, [self.number] * count, requests, [payload.read()] * count)
        for index in range(count):
            self.ask_for_news(index)

    def ask_for_news(self, index: int) -> None:
        """Ask one host for news."""
        self.requests[index] = self.call(index, engine.news, self.number), time.monotonic()

    def step(self, seconds: float) -> bool:
        """Pass on what engines answer, waiting at most `seconds` for it, and ask them again; False if nothing came."""
        deadline, came = time.monotonic() + seconds, False
        while not came:
            for index, (reply, since) in list(self.requests.items()):
                if reply.ready():
                    came |= self.take(index, reply)
                elif time.monotonic() > since + SILENCE_SECONDS:
                    came = self.lose(index)
            if time.monotonic() > deadline:
                break
            time.sleep(0 if came else POLL_SECONDS)
        return came

    def take(self, index: int, reply: Any) -> bool:
        """Pass on the news of one host; returns whether there was any."""
        try:
            now, events = pickle.loads(reply.get(timeout=0))
        except Exception:  # the engine died: ipyparallel has no common base for what it then raises
            return self.lose(index)
        self.late[index] = time.monotonic() - now
        if not events or events[-1][0] != "over":
            self.ask_for_news(index)
        for kind, rank, value in events:
            if kind == "over":  # then rank and value say whether it ended too soon, and why
                self.leave(index, f"{self.members[index]['host']}: {value}" if rank else "")
            elif kind == "refused":
                self.hear(kind, rank, LaunchError(f"{self.members[index]['host']}: {value}"))
            else:
                self.hear(kind, rank, value, self.late[index])
        return bool(events)

    def lose(self, index: int) -> bool:
        """A host is gone."""
        self.leave(index, f"lost {self.members[index]['host']} in mid-launch")
        self.gone = True
        return True

    def leave(self, index: int, reason: str) -> None:
        """Nothing of this launch is left on a host; `reason`: why, if that was too soon."""
        self.requests.pop(index, None)
        self.left.discard(index)
        self.gone |= not self.left
        if reason:
            self.cut_off = True
            self.lost.append(reason)

    def order(self, word: bytes) -> None:
        """Tell all ranks that there is another call, or that they may leave."""
        for index in self.left:
            self.call(index, engine.call, self.number, "order", word)

    def look(self, pids: dict) -> tuple[dict, dict, dict]:
        """By rank: the state of its process, its stacks, and its last collectives."""
        replies = {index: self.call(index, engine.call, self.number, "look", pids) for index in self.left}
        statuses, dumps, calls = {}, {}, {}
        for index, reply in replies.items():
            try:
                seen = reply.get(timeout=SILENCE_SECONDS)
            except Exception:  # the engine died, as in `take`
                self.lose(index)
                continue
            for everywhere, here in zip((statuses, dumps, calls), seen, strict=True):
                everywhere |= here
            for call in (call for last in seen[2].values() for call in last):
                call.begin += self.late[index]
        return statuses, dumps, calls

    def host_of(self, rank: int) -> str:
        """The name of the host that a rank lives on."""
        return next(m["host"] for m, ranks in zip(self.members, self.ranks_on, strict=True) if rank in ranks)

    def end(self) -> None:
        """Have all hosts end their ranks, and wait until they have."""
        for index in self.left:
            self.call(index, engine.end, self.number)
            if index not in self.requests:
                self.ask_for_news(index)
        self.read_for(ENDING_SECONDS, lambda: not self.requests)

    def release(self) -> None:
        """Close the store."""
        self.store = None

    def explain(self) -> str:
        """Which hosts are gone, and why."""
        return "; ".join(sorted(self.lost))
