"""Figures in one style: a stage has one colour, theory is a line, a measurement is a point.

Figures are made without pyplot, so nothing is global and nothing is drawn twice. In a notebook a
`Picture` shows itself, with its message as the title, and a text for those who cannot see it.
"""

import base64
import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from ...ladder import STAGES
from ..measuring import facts
from ..measuring.results import Comparison, StageResult

STAGE_COLOURS = {key: stage.colour for key, stage in STAGES.items()}
SPAN_COLOURS = {
    "forward": "#5B95C2",
    "backward": "#1F4E87",
    "communication": "#C8501B",
    "wait": "#B98A64",
    "update": "#1A1A1A",
}
MESSAGE_TICKS = {2**10: "1 KiB", 2**15: "32 KiB", 2**20: "1 MiB", 2**25: "32 MiB", 2**30: "1 GiB"}
SETTINGS = matplotlib.rc_params_from_file(
    Path(__file__).with_name("course.mplstyle"), use_default_template=False
)
style = partial(matplotlib.rc_context, SETTINGS)  # `with style():` draws in the course's style.


class Picture(Figure):
    """A figure that says in one line, its `message`, what it shows.

    `description` says what is in it, for those who cannot see it. `kind` says where its numbers
    come from: measured, virtual time, counted, simulated, derived. It stands at the right edge.
    """

    def __init__(self, width, height, message, description, kind):
        super().__init__(figsize=(width, height), layout="constrained")
        self.message = message
        self.description = description
        self.kind = kind

    @property
    def caption(self) -> str:
        """The message, with the kind of the numbers."""
        return f"{self.message} ({self.kind})" if self.kind else self.message

    @property
    def has_title(self) -> bool:
        """Whether the message can be read in the figure."""
        drawn = " ".join(text.get_text() for text in self.findobj(Text))
        return " ".join(self.message.split()) in " ".join(drawn.split())

    @property
    def alt(self) -> str:
        """The alternative text: the description and the caption."""
        return ". ".join(filter(None, (self.description, self.caption)))

    def png(self, dpi: float | str = "figure") -> bytes:
        """Return the figure as the bytes of a PNG file."""
        file = io.BytesIO()
        with style():
            self.savefig(file, format="png", dpi=dpi, metadata={"Description": self.message})
        return file.getvalue()

    def _ipython_display_(self):
        from IPython.display import display

        image = base64.b64encode(self.png()).decode()
        display(
            {"image/png": image, "text/plain": self.message or "figure"},
            metadata={"image/png": {"alt": self.alt}},
            raw=True,
        )
        if not self.has_title:
            print(self.caption)


@contextmanager
def panels(
    rows: int = 1,
    columns: int = 1,
    width: float = 7.2,
    height: float = 3.6,
    message: str = "",
    description: str = "",
    kind: str = "",
    **options: Any,
) -> Iterator[tuple[Picture, Any]]:
    """Yield a new figure and its axes, which this block draws in the course's style.

    `options` are those of `Figure.subplots`. If there is a kind, it stands along the right edge of
    the first axes, and the message is their title, on as many lines as it needs.
    """
    with style():
        picture = Picture(width, height, message.replace("\n", " "), description, kind)
        axes = picture.subplots(rows, columns, **options)
        if kind:
            first = picture.axes[0]
            first.set_title(message, wrap=True)
            first.annotate(
                kind,
                (1, 1),
                (5, 0),
                "axes fraction",
                "offset points",
                fontsize=9,
                color="#555555",
                style="italic",
                rotation=90,
                va="top",
            )
        yield picture, axes


def compare_figure(results: Comparison) -> Picture:
    """Return the four panels of `ddp-course compare`: loss, step time, bytes sent, timeline.

    On a processor without emulation times say nothing, so one panel shows the steps of a machine
    with a GPU instead.
    """
    if results.measured_on and results.device == "cpu":
        return figure_of_one_h200(results)
    stages = results.stages
    message = results.message or comparison_message(results)
    # Lanes are so high that both halves of one can be seen, with the gaps between stages.
    lanes = sum(len(stage.timeline) + 0.7 for stage in stages)
    above = 3.6
    below = max(3.6, 1.1 + 0.2 * lanes)
    height = above + below
    description = f"Four panels comparing {len(stages)} stages"
    with panels(
        2,
        2,
        12.5,
        height,
        message,
        description,
        width_ratios=[1, 1.15],
        height_ratios=[above, below],
    ) as (picture, _):
        kind = kind_of_time(results)
        # `panels` gets no kind, which would stand in one panel: the title of each panel has its
        # own.
        picture.kind = f"losses measured; times {kind}"
        if any(stage.bytes_sent_max and stage.bytes_formula for stage in stages):
            picture.kind += "; bytes counted; formulas derived"
        losses, step_times, traffic, timelines = picture.axes
        draw_losses(losses, stages)
        draw_step_times(step_times, stages, kind)
        draw_traffic(traffic, stages)
        draw_stage_timelines(timelines, stages, kind)
        title = f"{setting_of(results)}\n{textwrap.fill(message, 140)}"
        picture.suptitle(title, fontsize=11, fontweight="bold")
    return picture


def figure_of_one_h200(results: Comparison) -> Picture:
    """Return a figure of the step times of these stages on a machine of ours that has a GPU.

    Two ranks shared it, so a stage takes as long as one device, and what it adds itself.
    """
    step_ms = {row["name"]: row["step_ms"] for row in facts.rows("stages_on_one_h200")}
    alone_ms = step_ms["single device"]
    heights = {}
    colours = {}
    for stage in results.stages:
        label = stage.name.replace(" ", "\n", 1)
        heights[label] = step_ms[stage.name]
        colours[label] = stage.colour
    title = f"Elsewhere, a step of one device took {alone_ms:.0f} ms on an NVIDIA H200"
    several = len(heights) > 1
    if several:
        title = (
            "Elsewhere, two ranks shared one GPU: nothing can be faster than one device, and above"
            " the line is what a stage adds: messages, waiting, fixed costs"
        )
    kind = "measured on one NVIDIA H200, 2026-11-26"
    with panels(height=3.6, message=title, kind=kind) as (picture, axes):
        draw_bars(axes, heights, colours, {}, "{:.0f}")
        if several:
            axes.axhline(alone_ms, color="black", label="one device alone")
            axes.legend()
        axes.set_ylabel("a step (ms)")
    return picture


def setting_of(results: Comparison) -> str:
    """Return the real devices of a comparison, or its problem, ranks, devices and links."""
    if results.measured_on:
        return f"measured on {results.measured_on}"
    emulated = results.emulated_device
    device = f"emulated devices of {emulated['text']}" if emulated else results.device
    ranks = f"{results.world_size} ranks"
    return f"{results.problem}, {ranks}, {device}, {link_text(results.link)}"


def comparison_message(results: Comparison) -> str:
    """Return one line on what the comparison shows, computed from its numbers."""
    names = {"3": "server", "4": "ring", "5": "buckets"}
    gains = []
    for stage in results.stages:
        name = names.get(stage.stage, stage.name)
        if stage.stage in (*names, "yours") and not stage.differs_from_step:
            gains.append(f"{stage.speed_up:.1f} ({name})")
    distance = f"weights differ from one device's by at most {results.max_abs_diff:.2g}"
    different = [stage for stage in results.stages if stage.differs_from_step]
    if different:
        distance = "; ".join(
            f"weights of {each.label} differ by {each.difference}" for each in different
        )
    if not gains:
        return distance
    noun = "devices" if results.emulated_device else "ranks"
    speed_ups = ", ".join(gains)
    return f"{results.world_size} {noun} are {speed_ups} times as fast as one device; {distance}"


def draw_losses(axes: Axes, stages: list[StageResult]) -> None:
    """Draw all loss curves on one another, the first as the widest, so that all can be seen."""
    for position, stage in enumerate(stages):
        width = 1.2 + 1.6 * (len(stages) - 1 - position)
        steps = range(1, len(stage.loss) + 1)
        axes.plot(steps, stage.loss, color=stage.colour, linewidth=width, label=stage.label)
    title = "Loss (measured)"
    different = [stage.label for stage in stages if stage.differs_from_step]
    if different:
        title += f": {', '.join(different)} trains something else"
    elif len(stages) > 1:
        title += ": the curves lie on one another"
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 1.08 * max(max(stage.loss) for stage in stages))
    # Two columns fit under a curve that falls slowly.
    axes.legend(ncols=2, handlelength=1.4, columnspacing=1.0)


def kind_of_time(results: Comparison) -> str:
    """Return the kind of a comparison's times: "virtual time", or "measured"."""
    link = results.link or {}
    if link.get("mode") == "virtual" or (not link and results.emulated_device):
        return "virtual time"
    return "measured"


def draw_step_times(axes: Axes, stages: list[StageResult], kind: str) -> None:
    """Draw a bar per stage: compute, then communication that was not hidden.

    A mark across the bar is the prediction.
    """
    hatched: Any = {"height": 0.62, "facecolor": "white", "hatch": "////"}
    longest_ms = max(stage.step_ms for stage in stages)
    for row, stage in enumerate(stages):
        waiting_ms = stage.communication_ms or 0.0
        computing_ms = max(0.0, stage.step_ms - waiting_ms)
        axes.barh(row, computing_ms, color=stage.colour, height=0.62)
        axes.barh(row, waiting_ms, left=computing_ms, edgecolor=stage.colour, **hatched)
        end_ms = stage.step_ms
        if stage.ideal_ms:
            name = "predicted: compute, then the formula" if row == 0 else ""
            ends = [row - 0.42, row + 0.42]
            axes.plot([stage.ideal_ms] * 2, ends, "black", linewidth=2, label=name)
            end_ms = max(end_ms, stage.ideal_ms)
        place = end_ms + 0.01 * longest_ms
        axes.text(place, row, step_text(stage, waiting_ms), va="center", fontsize=9)
    name_rows(axes, [stage.label for stage in stages])
    # The texts beside the bars need the room.
    axes.set(xlim=(0, 1.75 * longest_ms), xlabel="time of a step (ms, median, slowest rank)")
    axes.set_title(f"Step time ({kind}): compute, and waiting for others")
    # Two bars of no length, in grey, put the meaning of the fillings into the legend.
    axes.barh(0, 0, color="#777777", label="compute")
    axes.barh(0, 0, label="waiting for others", edgecolor="#777777", **hatched)
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.2), ncols=3, handlelength=1.4)


def step_text(stage: StageResult, waiting_ms: float) -> str:
    """Return the text beside a bar: " 95.2 ms, 3.4 times as fast, 12 waiting"."""
    parts = [f" {stage.step_ms:.1f} ms"]
    if stage.stage != "1":
        parts.append(f"{stage.speed_up:.1f} times as fast")
    # Less would not change the first number.
    if waiting_ms >= 0.05:
        parts.append(f"{waiting_ms:.0f} waiting")
    return ", ".join(parts)


def draw_traffic(axes: Axes, stages: list[StageResult]) -> None:
    """Draw the bytes that the busiest rank sends: bars are counted, and lines are formulas."""
    sent_mb = {}
    formula_mb = {}
    colours = {}
    for stage in stages:
        if stage.bytes_sent_max is not None:
            label = textwrap.fill(stage.label, 12)
            sent_mb[label] = stage.bytes_sent_max / 1e6
            if stage.bytes_formula is not None:
                formula_mb[label] = stage.bytes_formula / 1e6
            colours[label] = stage.colour
    axes.set_title("Bytes sent by the busiest rank in a step (counted)")
    if sent_mb:
        draw_bars(axes, sent_mb, colours, formula_mb, form="{:.2f}")
        axes.set_ylabel("MB per step")
    else:
        words = "nothing to count: bytes are counted\nonly on the course's own wire"
        axes.text(0.5, 0.5, words, ha="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])


def draw_bars(
    axes: Axes, heights: dict, colours: dict, theory: dict, form: str, dash: str = "formula"
) -> None:
    """Draw the bars and dashes of `bars`, each bar with its number above both."""
    places = range(len(heights))
    bar_colours = [colours.get(label, "#0072B2") for label in heights]
    axes.bar(places, list(heights.values()), width=0.6, color=bar_colours)
    for place, (label, height) in enumerate(heights.items()):
        top = max(height, 0)
        if label in theory:
            top = max(top, theory[label])
            [line] = axes.plot([place - 0.38, place + 0.38], [theory[label]] * 2, "black")
            axes.legend([line], [dash])
        axes.annotate(
            form.format(height),
            (place, top),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    axes.set_xticks(places, list(heights))
    highest = max([*heights.values(), *theory.values(), 0])
    axes.set_ylim(top=1.2 * highest if highest else 1)
    axes.grid(axis="x", visible=False)


def draw_stage_timelines(axes: Axes, stages: list[StageResult], kind: str) -> None:
    """Draw one step of every stage, a lane per rank, with its communication thread below."""
    row = 0.0
    middles = []
    for stage in stages:
        middles.append(row + (len(stage.timeline) - 1) / 2)
        for rank, spans in enumerate(stage.timeline):
            draw_lane(axes, row + rank, spans)
        # A gap is left between stages.
        row += len(stage.timeline) + 0.7
    axes.set_yticks(middles, [stage.label for stage in stages])
    axes.set(
        ylim=(row - 0.4, -0.8),
        xlim=(0, None),
        xlabel="time since the first rank began this step (ms)",
    )
    axes.grid(axis="y", visible=False)
    axes.set_title(f"One step of every stage, a lane per rank ({kind})")
    lanes = [lane for stage in stages for lane in stage.timeline]
    name_spans(axes, lanes, loc="upper center", bbox_to_anchor=(0.4, -0.13))


def name_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Name bars or lanes from the top down, without lines of the grid along them."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)


def draw_lane(axes: Axes, row: float, spans: Sequence[Any], begin: float = 0.0) -> None:
    """Draw `Span`s, or [name, start_s, end_s, lane], at `row`, in ms from `begin` (in s).

    Compute is drawn above, and the communication thread below.
    """
    # A lane is 0.84 high; where messages are in its lower half, each half is 0.42 high.
    height = 0.42 if any(lane == "network" for _, _, _, lane, *_ in spans) else 0.84
    # Neighbours of one name and lane are drawn at once: a trace has hundreds of them.
    for (name, lane), neighbours in groupby(spans, key=itemgetter(0, 3)):
        top = row if lane == "network" else row - 0.42
        axes.broken_barh(
            [(1000 * (start - begin), 1000 * (end - start)) for _, start, end, *_ in neighbours],
            (top, height),
            facecolors=SPAN_COLOURS[name],
            edgecolor="white",
            linewidth=0.8 if lane == "network" else 0,  # Messages that follow at once stay apart.
            zorder=2 if name == "wait" else 1,  # A wait is inside a backward pass.
        )


def timeline_figure(
    lanes: Sequence[Any],
    title: str,
    labels: Sequence[str] = (),
    align: bool = False,
    kind: str = "virtual time",
) -> Picture:
    """Return a figure of lanes of `Span`s or [name, start_s, end_s, lane], one per rank.

    Times are counted from the earliest start. With `align` each lane begins at 0, for lanes that
    did not run at the same time. `kind` is "measured" for real time.
    """
    begins = []
    for lane in lanes:
        begins.append(min((start for _, start, *_ in lane), default=0.0))
    if not align:
        begins = [min(begins)] * len(lanes)
    height = 1.7 + 0.45 * len(lanes)
    description = f"Timeline with {len(lanes)} lanes"
    with panels(1, 1, 8.4, height, title, description, kind) as (picture, axes):
        for row, (lane, begin) in enumerate(zip(lanes, begins, strict=True)):
            draw_lane(axes, row, lane, begin)
        name_rows(axes, labels or [f"rank {rank}" for rank in range(len(lanes))])
        axes.set(xlim=(0, None), xlabel="time (ms)")
        name_spans(picture, lanes, loc="outside lower center")
    return picture


def name_spans(drawing: Picture | Axes, lanes: Sequence[Any], **place: Any) -> None:
    """Add a legend for the spans of these lanes to a figure, or to its axes.

    Names whose spans are all too short to be seen are left out.
    """
    spans = [span for lane in lanes for span in lane]
    # Lanes need not have run at the same time: the longest is as wide as the figure.
    longest = max(lane[-1][2] - lane[0][1] for lane in lanes if lane)
    # A figure has fewer than 1,000 pixels for all spans together.
    visible = {name for name, start, end, *_ in spans if end - start > longest / 1000}
    names = [name for name in SPAN_COLOURS if name in visible]
    handles = [Patch(color=SPAN_COLOURS[name]) for name in names]
    drawing.legend(handles, names, ncols=5, handlelength=1.2, **place)


def curves(
    series: dict[str, Any],
    xlabel: str,
    ylabel: str,
    title: str,
    theory: dict[str, Any] | None = None,
    log: Sequence[str] = (),
    height: float = 3.8,
    points: bool = True,
    nested: bool = False,
    bands: Any = None,
    ticks: Any = None,
    kind: str = "measured",
) -> Picture:
    """Return a figure of points and lines.

    `series` and `theory` are {label: (xs, ys)} or {label: (xs, ys, colour)}. `series` are
    measurements, drawn as points, or without `points` as lines, each wider than the next if they
    are `nested`; `theory` are lines. `log` names the logarithmic axes: "x", "y" or both. `bands`
    are {label: (xs, lows, highs)}, the spread around a line of `series`; `ticks` are the places on
    the x axis that get a number. `kind` says what `series` are.
    """
    kind = with_lines(kind, theory)
    bands = bands or {}
    with panels(height=height, message=title, kind=kind) as (picture, axes):
        for label, values in (theory or {}).items():
            line = draw_line(axes, "-" if points else "--", label, *values)
            if not points and len(set(line.get_ydata())) == 1:
                name_at_its_end(axes, line)
        for position, (label, values) in enumerate(series.items()):
            line = draw_line(axes, "o" if points else "-", label, *values)
            if nested:
                line.set_linewidth(1.8 + 3.6 * (len(series) - 1 - position))
            if label in bands:
                axes.fill_between(*bands[label], color=line.get_color(), alpha=0.18, linewidth=0)
        scale(axes, log, ticks)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        _, labels = axes.get_legend_handles_labels()
        if len(labels) > 1:
            axes.legend()
    return picture


def draw_line(axes: Axes, look: str, label: str, xs: Any, ys: Any, colour: Any = None) -> Any:
    """Draw one entry of `series` or `theory`, in the next colour of the style if it has none."""
    [line] = axes.plot(xs, ys, look, color=colour, label=label)
    return line


def name_at_its_end(axes: Axes, line: Any) -> None:
    """Write the name of a flat line above its right end, as a legend would cover the line."""
    # With the transform below, x is 1 at the right edge.
    right_end = (1, line.get_ydata()[0])
    axes.annotate(
        line.get_label(),
        right_end,
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=9,
    )
    # The legend leaves out a label that begins with an underscore.
    line.set_label(f"_{line.get_label()}")


def with_lines(kind: str, theory: Any) -> str:
    """Return the kind of a figure with lines of theory: "measured; lines derived"."""
    if not theory or any(word in kind for word in ("derived", "simulated", "published")):
        return kind
    return f"{kind}; lines derived"


def scale(axes: Axes, log: Sequence[str], ticks: Any) -> None:
    """Choose the axes' scales, ticks and bounds for what has been drawn.

    `log` and `ticks` are as in `curves`.
    """
    for axis in log:
        logarithmic(axes, axis)
    if ticks:
        axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
    elif "x" not in log:
        # Steps and ranks are whole numbers: they get no tick at 2.5.
        whole = all(line.get_xdata().dtype.kind == "i" for line in axes.lines)
        axes.xaxis.set_major_locator(MaxNLocator(integer=whole))
    low, high = axes.dataLim.intervaly
    # The axis begins at 0, unless that would squeeze all curves into the top of the figure.
    if "y" not in log and 0 <= low < high / 3:
        # A curve that lies at 0 would be hidden by the axis itself.
        axes.set_ylim(bottom=-0.03 * high if low == 0 else 0)


def bars(
    heights: dict[str, float],
    ylabel: str,
    title: str,
    colours: Any = None,
    theory: dict[str, Any] | None = None,
    width: float = 7.2,
    form: str = "{:.3g}",
    dash: str = "formula",
    *,
    kind: str,
) -> Picture:
    """Return a figure with one bar per label: `heights` is {label: number}.

    `kind` says where the numbers come from: "measured", "virtual time", "counted", "derived".
    `theory`, {label: number}, is drawn as dashes across the bars, and `dash` says what they are.
    """
    kind = with_lines(kind, theory)
    with panels(width=width, height=3.4, message=title, kind=kind) as (picture, axes):
        draw_bars(axes, heights, colours or {}, theory or {}, form, dash)
        axes.set_ylabel(ylabel)
    return picture


def images(pictures: Any, titles: Sequence[str], title: str) -> Picture:
    """Return a row of small grey images, such as digits, of (N, H, W) or (N, 1, H, W)."""
    with panels(1, len(pictures), 1.1 * len(pictures), 1.7, title) as (picture, row):
        for axes, image, name in zip(row, pictures, titles, strict=True):
            axes.imshow(image.squeeze().tolist(), cmap="Greys")
            axes.set_title(name, loc="center")
            axes.set_axis_off()
        picture.suptitle(title, fontsize=10.5, fontweight="bold")
    return picture


def logarithmic(axes: Axes, name: str) -> None:
    """Make the "x" or "y" axis logarithmic, with plain numbers, such as 0.2 and 1,000."""
    getattr(axes, f"set_{name}scale")("log")
    axis = getattr(axes, f"{name}axis")
    low, high = axis.get_data_interval()
    # Over a few decades 1, 2 and 5 get ticks in each; over more, only powers of ten do.
    few = high <= 300 * low
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axis.set_major_formatter("{x:,.9g}")
    axis.set_minor_formatter(NullFormatter())


def link_text(link: dict[str, Any] | None) -> str:
    """Return an emulated link in words: "links of 200 Mbit/s (virtual hosts)"."""
    if not link:
        return "links as they are"
    mode = {"hosts": "virtual hosts", "virtual": "virtual time"}[link["mode"]]
    bandwidth = EngFormatter("bit/s")(link["bandwidth_bits_s"])
    return f"links of {bandwidth} ({mode})"
