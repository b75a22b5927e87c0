"""The report of a rehearsal: the parts of a step's time, its collectives, and memory."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..units import with_unit
from . import spans
from .script import RankRecord

EVEN = 0.01  # If the ranks' idle times differ by a smaller part of a step, no rank is slow.
COLUMNS = f"  {'times':>6}  {'bytes':>10}  {'time':>11}  {'exposed':>11}  what, and where"


@dataclass
class Step:
    """The parts of one step of one rank, in seconds.

    `hidden` is communication while the device computes, `exposed` is other communication, and
    `waiting` is the rest, in which the rank waits for other ranks or for the host.
    """

    rank: int
    seconds: float
    computing: float
    hidden: float
    exposed: float
    waiting: float


@dataclass
class Site:
    """All collectives or messages of one line in a step.

    The rank sends (or receives) `nbytes` in `times` calls; `seconds` and `exposed` are the sums of
    their times.
    """

    name: str
    ranks: int
    file: str
    line: int
    text: str
    times: int = 0
    nbytes: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0


class Report:
    """What a rehearsal of the script at `path` found, from the `records` of its ranks.

    `request` describes the machines. A step ends when an optimizer has made its step, and the first
    one begins with the script. `last` has the parts of the last step, on the rank for which it
    takes longest.
    """

    def __init__(self, path: str, request: dict, records: Sequence[RankRecord]):
        self.path = path
        self.request = request
        self.records = records
        self.peaks = [each.peak for each in records]
        fewest = min(len(each.steps) for each in records)
        self.steps = [self.parts(number) for number in range(fewest)]
        self.last = max(self.steps[-1], key=lambda step: step.seconds) if self.steps else None
        self.sites = self.sites_of(self.last) if self.last else []

    def window(self, rank: int, number: int) -> tuple[int, int]:
        """Return the moments at which a step begins and ends."""
        moments = [0, *self.records[rank].steps]
        return moments[number], moments[number + 1]

    def parts(self, number: int) -> list[Step]:
        """Return the parts of a step on each rank."""
        steps = []
        for rank, record in enumerate(self.records):
            start, end = self.window(rank, number)
            busy = spans.within(self.busy(record), start, end)
            sending = spans.within(self.sent(record), start, end)
            exposed = spans.outside(sending, busy)
            computing = spans.length(busy)
            step = Step(
                rank,
                seconds=(end - start) / 1e12,
                computing=computing / 1e12,
                hidden=(spans.length(sending) - exposed) / 1e12,
                exposed=exposed / 1e12,
                waiting=(end - start - computing - exposed) / 1e12,
            )
            steps.append(step)
        return steps

    def busy(self, record: RankRecord) -> spans.Spans:
        """Return the moments at which any stream of a rank computes."""
        return spans.union(span for stream in record.busy.values() for span in stream)

    def sent(self, record: RankRecord) -> spans.Spans:
        """Return when a rank sends or receives, as far as somebody waited for that."""
        return spans.union(call.span for call in record.calls if call.span)

    def sites_of(self, step: Step) -> list[Site]:
        """Return the sites at which the rank of the last step communicates in that step."""
        record = self.records[step.rank]
        start, end = self.window(step.rank, len(self.steps) - 1)
        busy = self.busy(record)
        sites: dict[tuple, Site] = {}
        for call in record.calls:
            if call.span is None or not start <= call.joined < end:
                continue
            begun, ended = call.span
            line = call.line
            members = len(call.ranks)
            new = Site(call.name, members, line.file, line.number, line.text)
            site = sites.setdefault((call.name, members, line), new)
            site.times += 1
            site.nbytes += call.nbytes
            site.seconds += (ended - begun) / 1e12
            site.exposed += spans.outside([call.span], spans.within(busy, begun, ended)) / 1e12
        return sorted(sites.values(), key=lambda site: -site.exposed)

    def summary(self) -> dict[str, Any]:
        """Return the few numbers that a team may keep, and compare with later ones."""
        if self.last is None:
            return {"steps": 0}
        sent = self.last.hidden + self.last.exposed
        hidden = self.last.hidden / sent if sent else 1.0
        return {
            "steps": len(self.steps),
            "step_s": self.last.seconds,
            "computing_s": self.last.computing,
            "communication_s": sent,
            "hidden": hidden,
            "collectives": sum(site.times for site in self.sites),
            "bytes": round(sum(site.nbytes for site in self.sites)),
            "peak_bytes": max(self.peaks),
        }

    def describe(self) -> dict[str, Any]:
        """Return all that was found, for JSON."""
        return {
            "script": self.path,
            "request": self.request,
            "summary": self.summary(),
            "steps": [list(map(asdict, ranks)) for ranks in self.steps],
            "sites": [asdict(site) for site in self.sites],
            "peak_bytes": self.peaks,
            "mistakes": list(self.mistakes()),
        }

    def mistakes(self) -> Iterator[str]:
        """Yield what is wrong with the script, as far as this run shows it."""
        counts = {len(record.steps) for record in self.records}
        if not all(record.made_group for record in self.records):
            yield "the script never calls init_process_group: under torchrun it would fail"
        if len(counts) > 1:
            yield f"ranks make unlike numbers of steps: {sorted(counts)}"
        if self.last and len(self.records) > 1 and not self.sites:
            yield "no rank sends anything in a step: the model is not wrapped"

    def line(self) -> str:
        """Return the summary in one line."""
        summary = self.summary()
        if self.last is None:
            ended = self.records[0].ended / 1e12
            return f"no optimizer made a step; the script ends at {ended:.6g} s"
        number = summary["collectives"]
        what = "collective or message" if number == 1 else "collectives and messages"
        return (
            f"step {duration(summary['step_s'])}: {number} {what}, {size(summary['bytes'])} sent by"
            f" a rank, {summary['hidden']:.0%} hidden, peak {size(summary['peak_bytes'])}"
        )

    def words(self) -> str:
        """Return the report as text."""
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        yield self.line()
        if self.last is None:
            yield from self.mistakes()
            return
        step = self.last
        known = f"the last of {len(self.steps)}"
        if len(self.steps) == 1:
            known = "the only one, from the script's start on: with two steps it is more certain"
        yield f"  step            {duration(step.seconds):>11}   rank {step.rank}, {known}"
        yield f"  computing       {duration(step.computing):>11}"
        sending = step.hidden + step.exposed
        hidden = duration(step.hidden)
        exposed = duration(step.exposed)
        yield f"  communication   {duration(sending):>11}   {hidden} hidden, {exposed} exposed"
        yield f"  waiting         {duration(step.waiting):>11}{self.slowest()}"
        peak = max(self.peaks)
        yield f"  peak memory     {size(peak):>11}   rank {self.peaks.index(peak)}"
        if self.sites:
            yield f"Collectives and messages of that step on rank {step.rank}:"
            yield COLUMNS
        for site in self.sites:
            yield (
                f"  {site.times:>6}  {size(site.nbytes):>10}  {duration(site.seconds):>11}"
                f"  {duration(site.exposed):>11}  {site.name} of {site.ranks} ranks,"
                f" {site.file} line {site.line}: {site.text[:60]}"
            )
        for mistake in self.mistakes():
            yield f"Look at this: {mistake}."

    def slowest(self) -> str:
        """Return in words for which rank the others wait; "" if they wait for none."""
        steps = self.steps[-1]
        idle = [step.waiting for step in steps]
        if max(idle) - min(idle) <= EVEN * steps[0].seconds:
            return ""
        return f"   others wait up to {duration(max(idle))} for rank {idle.index(min(idle))}"


def duration(seconds: float) -> str:
    """Return a time with its unit."""
    for unit, one in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= one:
            return f"{seconds / one:,.3f} {unit}"
    return f"{seconds * 1e6:.3f} µs"


def size(nbytes: float) -> str:
    """Return a number of bytes with its unit."""
    return with_unit(nbytes, "B")
