"""The results of a comparison. Their fields are the keys of compare.json."""

import json
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ... import ladder
from ...ladder import Stage
from . import timeline
from .recording import Recording

VERSION = 2  # A file with other keys, or other meanings of them, gets another number.


@dataclass
class RankReport:
    """What one rank brings back from its training with one stage."""

    record: Recording
    loss: list[float]  # of its share of the batch, each step
    difference: float  # the largest of a weight from the single device's
    evaluation: dict[str, float] | None  # rank 0's, on held-out samples
    weights: torch.Tensor | None  # the single device's


@dataclass
class StageResult:
    """What one stage did on all its ranks: the slowest and the busiest rank count."""

    stage: str
    name: str
    step_ms: float  # median
    communication_ms: float | None  # what the backward pass did not hide
    # Of the busiest rank in a step. None where torch or threads do the sending.
    bytes_sent_max: int | None
    bytes_received_max: int | None
    messages_max: int | None  # sent and received
    loss: list[float]  # of the global batch, each step
    max_abs_diff_vs_single: float
    evaluation: dict[str, float] | None
    # A lane for each device, in rank order, of [name, start, end, lane] in seconds from the first
    # rank's start.
    timeline: list[list[list]]
    bytes_formula: int | None = None  # what the busiest rank should send
    ideal_ms: float | None = None  # what a step should take (`ideals`); None on real devices
    device: str = ""
    speed_up: float = 1.0  # over one device

    @property
    def label(self) -> str:
        """How the stage is called in figures and tables: "3 parameter server", "torch's DDP"."""
        return self.name if self.stage == "torch" else f"{self.stage} {self.name}"

    @property
    def colour(self) -> str:
        """The colour of the stage in every figure."""
        return ladder.STAGES[self.stage].colour

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
        """The text of compare.json. Raises ValueError for a number that JSON cannot hold."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Comparison":
        """The comparison of which `to_json` made this text."""
        fields = json.loads(text)
        fields["stages"] = [StageResult(**stage) for stage in fields["stages"]]
        return cls(**fields)


def summarise(stage: Stage, ranks: list[RankReport]) -> StageResult:
    """The result of a stage, from what each of its ranks reports.

    Timeline and communication are those of a typical step: the one whose time is nearest to the
    median.
    """
    records = [rank.record for rank in ranks]
    timed_s = seconds_of_slowest(records, records[0].steps(with_spans=False))
    recorded_s = seconds_of_slowest(records, records[0].steps(with_spans=True))
    median = statistics.median(recorded_s.values())
    typical = min(recorded_s, key=lambda step: abs(recorded_s[step] - median))
    lanes = lanes_of(records, typical)
    exposed = max(timeline.exposed(record.spans[typical]) for record in records)
    # On real devices nobody sees the copies between the threads of one process.
    unseen = stage.all_reduce and all(name != "communication" for name, *_ in lanes[0])
    counted = [record.traffic for record in records] if stage.counted else []
    messages = [traffic.messages_sent + traffic.messages_received for traffic in counted]
    losses = zip(*(rank.loss for rank in ranks), strict=True)
    return StageResult(
        stage=stage.key,
        name=stage.name,
        step_ms=1000 * statistics.median(timed_s.values()),
        communication_ms=None if unseen else 1000 * exposed,
        bytes_sent_max=max((traffic.bytes_sent for traffic in counted), default=None),
        bytes_received_max=max((traffic.bytes_received for traffic in counted), default=None),
        messages_max=max(messages, default=None),
        loss=[statistics.fmean(step) for step in losses],
        max_abs_diff_vs_single=max(rank.difference for rank in ranks),
        evaluation=ranks[0].evaluation,
        timeline=lanes,
    )


def seconds_of_slowest(records: list[Recording], steps: list[int]) -> dict[int, float]:
    """{step: how long it took the slowest rank}."""
    seconds = {}
    for step in steps:
        seconds[step] = max(record.seconds(step) for record in records)
    return seconds


def lanes_of(records: list[Recording], step: int) -> list[list[list]]:
    """The timeline of one step: the spans of each device, from the first rank's start."""
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
