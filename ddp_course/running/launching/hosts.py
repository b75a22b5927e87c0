"""`launch(fn, hosts=…)`: one launch over several machines, each with an ipyparallel engine that has joined.

    caller (head) ── ipyparallel, CurveZMQ ── engine on host a ── its own launch of ranks 0 … 3
                                          └── engine on host b ── its own launch of ranks 4 … 7

The head packs the call once, tells every engine its ranks and where the store is, and then keeps asking for news.
torch.distributed does the training: nothing of ours moves a gradient from host to host.
"""

import json
import math
import pickle
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import IO, Any

from ...errors import LaunchError
from ..files import connection_folder, replace_file
from . import engine
from .launched import Launch

SILENCE_SECONDS = 2.5  # an engine that has not answered for so long is gone
SURVEY_SECONDS = 20.0  # the first call to an engine imports torch there
JOIN_SECONDS = 10.0  # for hosts that are still joining
GRACE_SECONDS = 0.5  # after the first failure, for other ranks to report theirs
STATES_SECONDS = 5.0  # for all hosts to say where their ranks were
POLL_SECONDS = 0.005
HOSTS_BEFORE = "hosts.json"  # beside the keys: the names of hosts that have answered


def run_on_hosts(
    hosts: str | int | list, payload: IO[bytes], world_size: int, device: Any, timeout: float, link: Any,
    progress: bool | int, show: Callable,
) -> list:  # fmt: skip
    """Run a packed call on ranks of several hosts; results in rank order, errors with the name of the host."""
    if link is not None:
        raise ValueError("between real hosts links are not emulated; launch without link, or without hosts")
    payload.seek(0)
    packed = payload.read()
    with connect() as client:
        members = choose(hosts, survey_all(client, hosts))
        if len(members) > world_size:
            members = members[:world_size]
        launched = LaunchOnHosts(client, members, world_size, timeout, show, progress)
        try:
            launched.begin(packed, device, progress)
            launched.watch()
        finally:
            launched.close()
        return launched.outcome()


def connect() -> Any:
    """A client of the controller that `ddp-course hosts start` has started."""
    file = connection_folder() / "ipcontroller-client.json"
    if not file.is_file():
        raise LaunchError(f"no hosts have been brought together ({file} is missing); run: ddp-course hosts start")
    try:
        from ipyparallel import Client
        from ipyparallel.error import TimeoutError as NoAnswer
    except ImportError:
        raise LaunchError('several hosts need the package ipyparallel; run: pip install "ddp-course[hosts]"') from None
    try:
        return Client(str(file), timeout=5)
    except (NoAnswer, OSError) as error:
        raise LaunchError(f"the controller of {file} does not answer; run: ddp-course hosts start\n{error}") from None


def survey_all(client: Any, hosts: str | int | list) -> list:
    """All engines that answer, sorted by the name of their host: engine ids only follow the order of joining.

    Waits a moment while hosts are missing that were asked for, or that have answered before.
    """
    deadline = time.monotonic() + JOIN_SECONDS
    expected = set(hosts) if isinstance(hosts, (list, tuple)) else hosts_before() if hosts == "all" else set()
    while True:
        replies = {number: client[number].apply_async(engine.survey, head_address()) for number in client.ids}
        answers = {number: survey_of(number, reply) for number, reply in replies.items()}
        members = [{"engine": number, **answer} for number, answer in answers.items() if answer]
        names = {member["host"] for member in members}
        enough = expected <= names and len(members) >= (hosts if isinstance(hosts, int) else 1)
        if enough or time.monotonic() > deadline:
            replace_file(connection_folder() / HOSTS_BEFORE, json.dumps(sorted(names | hosts_before())).encode())
            return sorted(members, key=lambda member: (member["host"], member["engine"]))
        time.sleep(0.2)


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
    settings = json.loads((connection_folder() / "ipcontroller-engine.json").read_text())
    listening = settings["interface"].rpartition("/")[2]
    return settings["location"] if listening in ("*", "0.0.0.0") else listening


def choose(hosts: str | int | list, members: list) -> list:
    """The members that were asked for; LaunchError if some are missing, or run other versions than this machine."""
    names = [member["host"] for member in members]
    if not isinstance(hosts, (int, list, tuple)) and hosts != "all":
        raise ValueError(f'hosts is {hosts!r}; choose "all", a number of hosts, or a list of their names')
    if isinstance(hosts, int):
        short = max(hosts, 1) - len(members)
        missing, chosen = [f"{short} more"] * (short > 0), members[:hosts]
    elif isinstance(hosts, str):
        missing, chosen = sorted(hosts_before() - set(names)) or ["1 more"] * (not members), members
    else:
        missing = [name for name in hosts if name not in names]
        chosen = [member for member in members if member["host"] in hosts]
    if missing:
        here = f"here are {', '.join(names)}" if names else "none has joined"
        without = f"; or launch without: hosts={names}" if names and hosts == "all" else ""
        raise LaunchError(f"missing: {', '.join(missing)}; {here}. On each host: ddp-course hosts join FILE{without}")
    ours = engine.versions()
    for member in chosen:
        for name, value in ours.items():
            if member[name] != value:
                raise LaunchError(f"{member['host']} has {name} {member[name]}, this machine {value}; install the same")
    return chosen


class LaunchOnHosts(Launch):
    """A launch over several hosts: their engines are asked for news until its fate is known."""

    tick = POLL_SECONDS

    def __init__(
        self, client: Any, members: list, world_size: int, timeout: float, show: Callable, progress: bool | int
    ):
        super().__init__(list(range(world_size)), timeout, progress, show)
        self.client, self.members, self.number = client, members, secrets.randbits(64)
        count = len(members)
        self.ranks_on = [[r for r in self.ranks if r * count // world_size == index] for index in range(count)]
        self.broken, self.lost, self.over = {}, [], set()
        self.requests: dict = {}  # by host, the reply to the last request for news, and when that was made

    def call(self, index: int, function: Callable, *arguments: Any) -> Any:
        """Call a function in the engine of one host; returns at once, with what will be its answer."""
        return self.client[self.members[index]["engine"]].apply_async(function, *arguments)

    def call_all(self, function: Callable, *arguments: list) -> list:
        """Call a function in all engines at once, each with its own arguments; the answers, in the hosts' order."""
        replies = [self.call(index, function, *each) for index, each in enumerate(zip(*arguments, strict=True))]
        return [self.answer(index, reply) for index, reply in enumerate(replies)]

    def answer(self, index: int, reply: Any) -> Any:
        """The answer of an engine; LaunchError, with the name of its host, for an exception there."""
        try:
            return reply.get(timeout=SURVEY_SECONDS)
        except Exception as error:
            host, words = self.members[index]["host"], str(error).split("\n")[0]
            raise LaunchError(f"{host} cannot take part: {words}") from None

    def begin(self, packed: bytes, device: Any, progress: bool | int) -> None:
        """Open the store on the first host, and start the ranks on all."""
        count, first = len(self.members), self.members[0]["address"]
        sizes = [len(ranks) for ranks in self.ranks_on]
        prepared = self.call_all(engine.prepare, [self.number] * count, sizes, [device] * count,
                                 [first, *[None] * (count - 1)])  # fmt: skip
        backends = {backend for backend, _ in prepared}
        common = {
            "world_size": len(self.ranks), "device": device, "timeout": self.timeout, "progress": progress,
            "store": (first, prepared[0][1]), "backend": backends.pop() if len(backends) == 1 else "gloo",
        }  # fmt: skip
        requests = [
            {**common, "ranks": ranks, "card": member["card"]}
            for ranks, member in zip(self.ranks_on, self.members, strict=True)
        ]
        self.call_all(engine.begin, [self.number] * count, requests, [packed] * count)
        for index in range(count):
            self.ask(index)

    def ask(self, index: int) -> None:
        """Ask one host for news."""
        self.requests[index] = self.call(index, engine.news, self.number), time.monotonic()

    def watch(self) -> None:
        """Take news until all results are in, or something failed, or a host is gone."""
        self.read_for(math.inf, self.is_decided)
        if not self.lost and not self.broken:
            if self.failures:
                self.read_for(GRACE_SECONDS, self.all_have_reported)
            if self.states:
                self.read_for(STATES_SECONDS, lambda: len(self.states) == len(self.ranks) or self.failures)

    def is_decided(self) -> bool:
        """Whether nothing but the end is left to wait for."""
        return bool(super().is_decided() or self.broken or self.lost or len(self.over) == len(self.members))

    def step(self, seconds: float) -> bool:
        """Take what engines have answered by now, and ask them again; if nothing came, wait, and return False."""
        came = False
        for index, (reply, since) in list(self.requests.items()):
            if reply.ready():
                came = True
                self.take(index, reply)
            elif time.monotonic() > since + SILENCE_SECONDS:
                self.lose(index)
        if not came:
            time.sleep(seconds)
        return came

    def take(self, index: int, reply: Any) -> None:
        """Take the news of one host."""
        try:
            messages = pickle.loads(reply.get(timeout=0))
        except Exception:  # the engine died: ipyparallel has no common base for what it then raises
            self.lose(index)
            return
        for message in messages:
            self.note(index, message)
        if index in self.over:
            del self.requests[index]
        else:
            self.ask(index)

    def lose(self, index: int) -> None:
        """A host is gone."""
        del self.requests[index]
        self.lost.append(self.members[index]["host"])

    def note(self, index: int, message: tuple) -> None:
        """Note one piece of a host's news; the times of failures are relative to now."""
        host, now = self.members[index]["host"], time.monotonic()
        match message:
            case "line", rank, stream, text:
                self.show(self.bar, f"{rank} {host}", stream, text)
            case "steps", steps:
                self.bar.advance_to(steps)
            case "results", results:
                self.results |= results
            case "failures", failures:
                self.failures |= {f.rank: replace(f, time=now + f.time, host=host) for f in failures}
            case "states", states, calls, entered:  # time is up there
                self.states += [replace(state, host=host) for state in states]
                self.calls |= {rank: made for rank, made in calls.items() if rank in self.ranks_on[index]}
                self.entered |= entered
            case "broken", words:  # the host could not start its ranks, or they were ended from outside
                self.broken[host] = words
            case ("over",):  # nothing of this launch is left there
                self.over.add(index)

    def end(self) -> None:
        """Have all hosts end their ranks, and wait until they have."""
        for index in self.requests:
            self.call(index, engine.end, self.number)
        self.read_for(SILENCE_SECONDS + GRACE_SECONDS, lambda: not self.requests)

    def release(self) -> None:
        """Nothing is open."""

    def outcome(self) -> list:
        """As for every launch; a host that is lost or could not take part is named."""
        if self.lost and all(failure.consequence for failure in self.failures.values()):
            raise LaunchError(f"lost {' and '.join(sorted(self.lost))} in mid-launch; all other ranks were ended")
        if self.broken and not self.failures:
            raise LaunchError("; ".join(f"{host}: {words}" for host, words in self.broken.items()))
        return super().outcome()
