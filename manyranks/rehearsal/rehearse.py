"""The launch of a rehearsal, from a request to a report."""

from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .. import presets
from ..devices.device import Device
from ..errors import EmulationError, LaunchError
from ..launching.launch import launch
from ..launching.watch import Launch
from ..links import Link
from ..orders.every import every_order
from ..orders.verdict import Verdict
from ..torch_inside import around
from .folding import check_alike, print_with_last, run_folded, with_last
from .report import Report
from .script import RankRecord, find_script, run_for_orders, run_script


@dataclass
class Request:
    """The machines on which a script is rehearsed: `hosts` have equally many ranks, in blocks.

    `link` joins all ranks, or the ranks of each host where `between` joins the hosts. With `fold`
    two ranks are run, and the others are booked as their copies; with `module` the script is given
    by a module's name. Raises EmulationError, or ValueError, for a request that cannot be met.
    """

    ranks: int
    device: Device
    link: str | None = None
    hosts: int | None = None
    between: str | None = None
    latency: str = "0ms"
    sizes_only: bool = False
    fold: bool = False
    module: bool = False
    answer: float | None = None
    timeout: float = 3600.0
    progress: bool = False
    emulated: Link | None = field(init=False)

    def __post_init__(self):
        if self.hosts is not None and (self.hosts < 1 or self.ranks % self.hosts):
            raise ValueError(f"{self.ranks} ranks do not share {self.hosts} hosts evenly")
        if (self.hosts or 1) > 1 and self.between is None:
            raise EmulationError(
                f"{self.hosts} hosts need a link: --between 100Gbit joins them, --link NVLink the"
                " ranks of each"
            )
        if self.fold and not (self.sizes_only and self.ranks > 1):
            raise EmulationError("--fold is for several ranks with --sizes-only")
        if self.between is not None and not self.hosts:
            raise EmulationError("--between joins hosts: say how many, as in --hosts 2")
        name = self.device.name
        inside = None
        if self.link is not None:
            inside = f"{presets.bandwidth(self.link, name)}bit"
        self.emulated = None
        if self.between is not None:
            self.emulated = Link(self.between, self.latency, self.hosts, inside=inside)
        elif inside is not None:
            self.emulated = Link(inside, self.latency)

    @property
    def per_host(self) -> int:
        """The number of ranks on each host."""
        return self.ranks // (self.hosts or 1)

    def describe(self) -> dict[str, Any]:
        """Return the request for JSON."""
        return {
            "ranks": self.ranks,
            "hosts": self.hosts or 1,
            "device": self.device.describe(),
            "reach": self.device.reach._asdict(),
            "streams": self.device.streams,
            "link": self.emulated and self.emulated.describe(),
            "sizes_only": self.sizes_only,
            "folded": self.fold,
            "answer": self.answer,
        }


def rehearse(path: str, arguments: list[str], request: Request) -> Report:
    """Run the script on all ranks in virtual time, and return a report of what it did.

    Raises the errors of `launch`.
    """
    script = find_script(path, request.module)
    what_runs = (script, arguments, request.device, request.per_host)
    options: dict[str, Any] = {
        "device": request.device,
        "sizes_only": request.sizes_only,
        "answer": request.answer,
        "timeout": request.timeout,
        "progress": request.progress and ("rehearsal", True),
    }
    if request.fold:
        records = folded(what_runs, request, options)
    else:
        records = launch(
            run_script, *what_runs, world_size=request.ranks, link=request.emulated, **options
        )
    return Report(path, request.describe(), records)


def folded(what_runs: tuple, request: Request, options: dict[str, Any]) -> list[RankRecord]:
    """Run the script as the first and the last rank; return what the first one did.

    Raises the errors of `launch`, and EmulationError where the two are not alike.
    """
    last = request.ranks - 1
    links = (request.emulated, request.ranks)
    try:
        with around(Launch, "print", partial(print_with_last, last)):
            records = launch(run_folded, *what_runs, *links, world_size=2, **options)
    except LaunchError as error:
        raise with_last(error, last) from None
    check_alike(records, last)
    return records[:1]


def orders_of(path: str, arguments: list[str], request: Request) -> Verdict:
    """Return a verdict on whether the script is right in every order of its messages.

    Raises ValueError if tensors have sizes only, as results are compared by their values.
    """
    if request.sizes_only:
        raise ValueError("orders are compared by values: leave out --sizes-only, or --orders")
    device = copy(request.device)
    device.streams = False
    script = find_script(path, request.module)
    per_host = request.per_host
    return every_order(
        run_for_orders, script, arguments, device, per_host, world_size=request.ranks
    )
