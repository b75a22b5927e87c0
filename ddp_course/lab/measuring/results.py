"""The results of a comparison, whose fields are the keys of compare.json."""

import json
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ... import ladder
from ...ladder import Stage
from . import timeline
from .recording import Recording

# Weights of a sum in another order differ by less; in float32 and 48 steps it is about 1e-6.
ROUNDING = 1e-3
VERSION = 2  # A file with other keys, or other meanings of them, gets another number.


@dataclass
class RankReport:
    """What one rank brings back from its training with one stage."""

    record: Recording
    loss: list[float]  # the loss of its share of the batch in each step
    # These are the largest differences of a weight from the single device's, after early steps and
    # at the end.
    differences: list[float]
    evaluation: dict[str, float] | None  # rank 0's measures on held-out samples
    weights: list[torch.Tensor] | None  # the single device's weights at the same moments


@dataclass
class StageResult:
    """What one stage did on all its ranks, by the slowest and the busiest rank."""

    stage: str
    name: str
    step_ms: float  # the median time of a step
    communication_ms: float | None  # the communication that the backward pass did not hide
    # These three are those of the busiest rank in a step, and None where torch or threads send.
    bytes_sent_max: int | None
    bytes_received_max: int | None
    messages_max: int | None  # the messages sent and received
    loss: list[float]  # the loss of the global batch in each step
    max_abs_diff_vs_single: float
    evaluation: dict[str, float] | None
    # Each device has a lane, in rank order, of [name, start, end, lane] in seconds from the first
    # rank's start.
    timeline: list[list[list]]
    bytes_formula: int | None = None  # the bytes that the busiest rank should send
    ideal_ms: float | None = None  # the time that a step should take; None on real devices
    differs_from_step: int | None = None  # the first step whose weights are not the single device's
    on_sockets: float | None = None  # its step on real sockets, in steps of virtual time
    device: str = ""
    speed_up: float = 1.0  # how many times as fast as one device it is

    @property
    def label(self) -> str:
        """The stage's name in figures and tables: "3 parameter server", "torch's DDP"."""
        return self.name if self.stage in ("torch", "yours") else f"{self.stage} {self.name}"

    @property
    def colour(self) -> str:
        """The colour of the stage in every figure; a learner's own is red."""
        return "#B8003C" if self.stage == "yours" else ladder.STAGES[self.stage].colour

    @property
    def difference(self) -> str:
        """The largest difference of a weight from the single device's, and since when, if large."""
        if self.differs_from_step is None:
            return f"{self.max_abs_diff_vs_single:.2g}"
        since = "at the end"  # Only early steps are looked at, and the last one.
        if self.differs_from_step < len(self.loss):
            since = f"from step {self.differs_from_step} on"
        return f"{self.max_abs_diff_vs_single:.1g} {since}"

    @property
    def last_loss(self) -> float:
        """The loss after the last step."""
        return self.loss[-1]


@dataclass
class Comparison:
    """What was trained on which machine, and what each stage did."""

    problem: str
    world_size: int
    steps: int
    dtype: str
    global_batch: int
    parameters: int
    gradient_bytes: int
    torch: str
    device: str
    backend: str
    emulated_device: dict[str, Any] | None
    link: dict[str, Any] | None
    stages: list[StageResult]
    measured_on: str | None = None  # real devices in words: "4 × NVIDIA H100"
    message: str | None = None  # what the numbers say of these devices
    version: int = VERSION

    @property
    def max_abs_diff(self) -> float:
        """The largest distance of any weight of any stage from the single device's."""
        return max(stage.max_abs_diff_vs_single for stage in self.stages)

    def to_json(self) -> str:
        """Return the text of compare.json; raises ValueError for a number that JSON cannot hold."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Comparison":
        """Return the comparison from which `to_json` made this text."""
        fields = json.loads(text)
        fields["stages"] = [StageResult(**stage) for stage in fields["stages"]]
        return cls(**fields)


def summarise(stage: Stage, ranks: list[RankReport]) -> StageResult:
    """Return the result of a stage, from what each of its ranks reports.

    Timeline and communication are those of a typical step, whose time is nearest to the median.
    """
    records = [rank.record for rank in ranks]
    timed_s = seconds_of_slowest(records, records[0].steps(with_spans=False))
    recorded_s = seconds_of_slowest(records, records[0].steps(with_spans=True))
    median = statistics.median(recorded_s.values())
    typical = min(recorded_s, key=lambda step: abs(recorded_s[step] - median))
    if stage.key == "yours":
        for record in records:
            note_unseen_messages(record, typical)
    lanes = lanes_of(records, typical)
    exposed = max(timeline.exposed(record.spans[typical]) for record in records)
    # On real devices nobody sees the copies between the threads of one process.
    unseen = stage.all_reduce and all(name != "communication" for name, *_ in lanes[0])
    counted = [record.traffic for record in records] if stage.counted else []
    if stage.key == "yours" and not any(traffic.messages_sent for traffic in counted):
        # The function sends by a way on which nobody counts.
        counted = []
    messages = [traffic.messages_sent + traffic.messages_received for traffic in counted]
    losses = zip(*(rank.loss for rank in ranks), strict=True)
    of_ranks = [rank.differences for rank in ranks]
    differences = [max(after_step) for after_step in zip(*of_ranks, strict=True)]
    return StageResult(
        stage=stage.key,
        name=stage.name,
        step_ms=1000 * statistics.median(timed_s.values()),
        communication_ms=None if unseen else 1000 * exposed,
        bytes_sent_max=max((traffic.bytes_sent for traffic in counted), default=None),
        bytes_received_max=max((traffic.bytes_received for traffic in counted), default=None),
        messages_max=max(messages, default=None),
        loss=[statistics.fmean(step) for step in losses],
        max_abs_diff_vs_single=differences[-1],
        differs_from_step=first_different(differences, len(ranks[0].loss)),
        evaluation=ranks[0].evaluation,
        timeline=lanes,
    )


def note_unseen_messages(record: Recording, step: int) -> None:
    """Note what follows a backward pass, if the step has no collective of the course's own.

    It is communication where messages were counted, and waiting where nobody knows.
    """
    spans = sorted(record.spans[step], key=lambda span: span.start)
    if any(span.name == "communication" for span in spans):
        return
    name = "communication" if record.traffic.messages_sent else "wait"
    ends = [*(span.start for span in spans[1:]), record.began[step + 1]]
    for span, end in zip(spans, ends, strict=True):
        if span.name == "backward" and end > span.end:
            record.spans[step].append(timeline.Span(name, span.end, end))


def first_different(differences: list[float], steps: int) -> int | None:
    """Return the first step after which weights differ by more than rounding; None if none is.

    `differences` are those after the early steps, and after the last of `steps`.
    """
    for step, difference in enumerate(differences[:-1], 1):
        if not difference < ROUNDING:
            return step
    return None if differences[-1] < ROUNDING else steps


def seconds_of_slowest(records: list[Recording], steps: list[int]) -> dict[int, float]:
    """Return the seconds of the slowest rank for each step, by the step's number."""
    seconds = {}
    for step in steps:
        seconds[step] = max(record.seconds(step) for record in records)
    return seconds


def lanes_of(records: list[Recording], step: int) -> list[list[list]]:
    """Return the timeline of one step: the spans of each device, from the first rank's start."""
    first = min(record.began[step] - record.zero for record in records)
    lanes = []
    for record in records:
        begin = record.zero + first
        for spans in timeline.laid_out(record.spans[step]):
            lane = []
            for span in spans:
                start = timeline.between(begin, span.start)
                end = timeline.between(begin, span.end)
                lane.append([span.name, start, end, span.lane])
            lanes.append(lane)
    return lanes
