"""Figures with sliders, and questions that ask for a guess.

An `Explorer` redraws one figure when a slider moves. Where no slider can work, as on a printed
page, the figure of its first setting is shown. The course's web site draws every setting
beforehand: the call that made an explorer is written into the notebook as its recipe, the
function's name and plain values.
"""

import base64
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from html import escape
from pkgutil import resolve_name
from typing import Any

import ipywidgets
from IPython.display import display

from ..learners_copy import keep
from ..measuring import theory
from . import plots, sketches
from .plots import STAGE_COLOURS, Picture, panels

_LAYOUT = ipywidgets.Layout(width="560px", max_width="100%")
_WIDE = {"description_width": "160px"}
BANDWIDTHS = ["100Mbit", "1Gbit", "10Gbit", "100Gbit", "200Gbit", "400Gbit"]
LAG_SECONDS = 0.3  # A figure that takes longer says that it is being drawn.
# Screen readers read this; nobody sees it, unless the screen is so narrow that figures shrink.
HIDDEN = (
    '<span class="title-for-all" style="position:absolute;height:1px;overflow:hidden;'
    'clip-path:inset(50%);white-space:nowrap">{}</span>'
)
# No notebook program shows this type; the course's web site does.
MIME = "application/vnd.ddp-course+json"


class Box(ipywidgets.VBox):
    """Widgets, and what is shown in their place where there can be none: subclasses add it."""

    # That of ipywidgets 7, which Colab has, would show the widgets alone.
    _ipython_display_ = None

    def _repr_mimebundle_(self, **options):
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return {"application/vnd.jupyter.widget-view+json": view}


class Explorer(Box):
    """Sliders over a figure, which `draw` returns for the values of the `controls`, by name.

    `rebuild(recipe)` makes such an explorer again; `maker` names the function that made it from
    `arguments`, as "module:name".
    """

    def __init__(self, draw, maker, *arguments, **controls):
        self.draw = draw
        self.controls = controls
        self.recipe = {"explorer": maker, "arguments": arguments}
        self.image = ipywidgets.Image(
            layout=ipywidgets.Layout(align_self="flex-start", max_width="calc(100% - 4px)")
        )
        # HTML wraps a long text, which a Label would cut.
        self.message = ipywidgets.HTML()
        # It has its place also when it says nothing, so that the figure stays where it is.
        self.state = ipywidgets.HTML(layout=ipywidgets.Layout(min_height="24px"))
        super().__init__([*controls.values(), self.state, self.image, self.message])
        for control in controls.values():
            control.observe(self.redraw, "value")
        self.redraw()

    def redraw(self, *_: Any) -> None:
        """Draw the figure for the present values.

        While it is drawn, the browser keeps the last position of a slider, and sends that alone.
        """
        with self.saying_so():
            picture = self.picture()
            # The browser keeps so much room while it loads the new image; otherwise the page would
            # jump.
            width, height = picture.bbox.size
            self.image.width = str(int(width))
            self.image.height = str(int(height))
            self.image.value = picture.png()
            caption = escape(picture.caption)
            self.message.value = HIDDEN.format(caption) if picture.has_title else caption
            self.alt = picture.alt
            self.caption = picture.caption

    @contextmanager
    def saying_so(self) -> Iterator[None]:
        """Say that a figure is being drawn where this block takes longer than one waits gladly."""
        timer = threading.Timer(LAG_SECONDS, setattr, (self.state, "value", "<i>drawing …</i>"))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # What it says can no longer come after the next line.
            self.state.value = ""

    def picture(self) -> Picture:
        """Return the figure of the present values, as a plain `Picture`."""
        return self.draw(**{name: control.value for name, control in self.controls.items()})

    def _repr_mimebundle_(self, **options):
        bundle = super()._repr_mimebundle_(**options) | {
            "image/png": base64.b64encode(self.image.value).decode(),
            "text/plain": self.caption,
            MIME: self.recipe,
        }
        return bundle, {"image/png": {"alt": self.alt}}


def explorer(**sliders: tuple[str, Sequence[Any]]) -> Callable:
    """Decorate a function that draws a figure, so that it makes an `Explorer` with sliders.

    `sliders` are {argument: (title, values)}, one for each argument of the function. A slider
    begins at the argument of the call.
    """

    def decorate(figure):
        """Return the function that makes explorers of `figure`."""

        @wraps(figure)
        def make(*arguments, **named):
            """Return an explorer that begins with the arguments of this call."""
            call = inspect.signature(figure).bind(*arguments, **named)
            call.apply_defaults()
            controls = {}
            for name, (title, values) in sliders.items():
                controls[name] = choice(title, call.arguments[name], values)
            # In its module, the figure's name is now that of `make`.
            maker = f"{figure.__module__}:{figure.__name__}"
            return Explorer(figure, maker, *call.args, **controls)

        return make

    return decorate


def rebuild(recipe: dict[str, Any]) -> Explorer:
    """Return a new explorer as `recipe` describes it."""
    return resolve_name(recipe["explorer"])(*recipe["arguments"])


def choice(name: str, value: Any, options: Any) -> Any:
    """Return a slider over a list of values or of (label, value) pairs."""
    return ipywidgets.SelectionSlider(
        value=value, options=options, description=name, layout=_LAYOUT, style=_WIDE
    )


def ring_stepper(world_size: int = 4) -> Any:
    """Return an explorer that steps through the chunked ring, with what each chunk adds up."""
    ranks = choice("ranks K", world_size, range(2, 9))
    step = ipywidgets.IntSlider(description="step", layout=_LAYOUT, style=_WIDE)
    # The kernel decides how many steps there are; the browser keeps button and slider in step.
    ipywidgets.dlink((ranks, "value"), (step, "max"), lambda ranks: 2 * (ranks - 1))
    stepper = Explorer(
        sketches.ring_step, f"{__name__}:ring_stepper", world_size, world_size=ranks, step=step
    )
    play = ipywidgets.Play(min=0, max=step.max, interval=1200, repeat=True)
    for trait in ("value", "max"):
        ipywidgets.jslink((step, trait), (play, trait))
    stepper.children = [ranks, ipywidgets.HBox([play, step]), *stepper.children[2:]]
    return stepper


class Prediction(Box):
    """A question with `answers` to choose from; `reveal` shows the choice beside the truth."""

    def __init__(self, question, answers):
        self.question = question
        self.answers = list(answers)
        options = [("I have not decided", None)]
        options += [(str(answer), answer) for answer in self.answers]
        self.buttons = ipywidgets.RadioButtons(
            options=options, layout=ipywidgets.Layout(width="auto")
        )
        super().__init__([ipywidgets.HTML(f"<b>{question}</b>"), self.buttons])

    def reveal(
        self, result: str, answer: Any, kind: str = "measured", why: dict[Any, str] | None = None
    ) -> None:
        """Show the guess beside the `result` (text) and its kind.

        `answer` is the right one among the answers. `why`, {answer: sentence}, says why each is
        right or wrong. Raises ValueError for an `answer` that nobody could choose.
        """
        reasons = why or {}
        if answer not in self.answers:
            raise ValueError(f"{answer!r} is not among the answers {self.answers}")
        guess = self.buttons.value
        line = f"The answer: {result} ({kind})."
        if guess is not None:
            keep("guesses", self.question, guess == answer)
            keep("guessed", self.question, str(guess))
            verdict = ", which is right" if guess == answer else ""
            line = f"You guessed {guess}{verdict}. {line} {reasons.get(guess, '')}".rstrip()
        # The web site, without a kernel, judges by this index, and has a reason for each answer.
        judged = {
            "right": self.answers.index(answer),
            "why": [reasons.get(each, "") for each in self.answers],
        }
        display({"text/plain": line, MIME: judged}, raw=True)

    def _repr_mimebundle_(self, **options):
        lines = [self.question, *(f"  ( ) {answer}" for answer in self.answers)]
        return super()._repr_mimebundle_(**options) | {"text/plain": "\n".join(lines)}


predict = Prediction  # `predict` asks before the experiment, `reveal` answers after it.


def nearest(value: Any, answers: Sequence[Any]) -> Any:
    """Return the number among a prediction's `answers` that is nearest to `value` in ratio."""
    return min(answers, key=lambda answer: abs(math.log(answer / value)))


@explorer(
    bandwidth=("bandwidth", BANDWIDTHS),
    latency=("latency", ["1us", "10us", "100us", "1ms", "10ms"]),
    world_size=("ranks K", [2, 3, 4, 6, 8, 12, 16, 64, 256, 1024]),
)
def alpha_beta_explorer(
    bandwidth: str = "10Gbit", latency: str = "100us", world_size: int = 8
) -> Picture:
    """Draw the times of four all-reduces, by their closed forms, against the message's size."""
    from manyranks.units import bits_per_second, seconds

    from .simulator_plots import ALGORITHM_COLOURS, CONTENDERS, label

    costs = theory.Costs.of_link(bits_per_second(bandwidth), seconds(latency))
    sizes = [2.0**power for power in range(6, 31, 2)]  # These are 64 bytes to 1 GiB.
    lines = {}
    for name in CONTENDERS:
        times_ms = [1000 * theory.seconds(name, size, world_size, costs) for size in sizes]
        lines[label(name)] = (sizes, times_ms, ALGORITHM_COLOURS[name])
    setting = f"{world_size} ranks, {bandwidth}/s, {latency}"
    title = f"Fastest on {setting}:\nsmall: {fastest(lines, 0)};\nlarge: {fastest(lines, -1)}"
    picture = plots.curves(
        {},
        "size of the message",
        "time (ms)",
        title,
        theory=lines,
        log="xy",
        height=3.9,
        kind="derived",
    )
    [axes] = picture.axes
    # The last line covers others where algorithms take equally long.
    axes.lines[-1].set_linestyle("--")
    axes.set_xticks(list(plots.MESSAGE_TICKS), plots.MESSAGE_TICKS.values())
    # Minor ticks took half of the time to draw, and no reader needs them.
    axes.minorticks_off()
    return picture


def fastest(lines: dict[str, Any], place: int) -> str:
    """Return the algorithms whose time at a place of their lines is within 1 % of the best."""
    times = {name: times_ms[place] for name, (_, times_ms, _) in lines.items()}
    longest = 1.01 * min(times.values())
    return ", ".join(name for name, time in times.items() if time <= longest)


@explorer(
    # 8.6 is the setting of `compare`.
    share=("gradients (% of a step)", [0.5, 2, 8.6, 20, 50, 200]),
    world_size=("ranks K", [2, 4, 8]),
    latency=("latency (% of a step)", [0, 0.1, 1]),
)
def strategies_explorer(world_size: int = 4, share: float = 8.6, latency: float = 0) -> Picture:
    """Draw how many times as fast as one device each stage is, as `compare` predicts for digits.

    `share` is the time to send the gradients once over a link, and `latency` that of a message,
    both in percent of a step of one device.
    """
    from manyranks.devices import Device

    from ... import ladder
    from ...job import make_job
    from ..measuring import ideals

    job = make_job("digits", world_size)
    # Any device would do, as only ratios are shown.
    device = Device("1GFLOP/s")
    alone_s = job.work(device).compute_s
    bandwidth = 8 * job.gradient_bytes / (share / 100 * alone_s)
    costs = theory.Costs.of_link(bandwidth, latency / 100 * alone_s)
    no_pipeline = world_size > 5  # The model has five layers to share out.
    speed_ups = {}
    colours = {}
    best = 1.0
    conclusion = "none is faster than one"
    for stage in ladder.STAGES.values():
        if stage.step is None or (stage.step == "pipelined" and no_pipeline):
            continue
        label = on_lines(stage.name)
        speed_up = alone_s / ideals.STEPS[stage.step](stage, job, device, costs)
        speed_ups[label] = speed_up
        colours[label] = stage.colour
        if speed_up > best:
            best = speed_up
            conclusion = f"{stage.name} is {best:.1f} times as fast as one"
    if no_pipeline:
        conclusion += "; five layers are no pipeline"
    sending = f"all gradients cross a link in {share:g} % of one device's step"
    title = f"{world_size} devices, {sending}:\n{conclusion}"
    return plots.bars(
        speed_ups,
        "times as fast as one device",
        title,
        colours,
        width=11,
        form="{:.2g}",
        kind="derived",
    )


def on_lines(name: str) -> str:
    """Return a name with a line for each word, and for each part of a word with a hyphen."""
    return name.replace("-", "-\n").replace(" ", "\n")


def bucket_explorer(
    profile: Any, world_size: int, network: Any, measured: dict, caps: Sequence[float]
) -> Explorer:
    """Return an explorer of bucket caps (MiB) for the simulated step of `profile`.

    The figure has the simulated step times beside those `measured`.
    """
    from ..measuring.simulate import simulate

    rows = []
    for cap in caps:
        step = simulate(profile, world_size, network, bucket_cap_mb=cap)
        hidden = 1.0
        if step.communication_s:
            hidden -= min(1.0, step.exposed_s / step.communication_s)
        rows.append([cap, len(step.buckets), 1000 * step.step_s, 100 * hidden, step.spans])
    return caps_explorer(rows, list(measured.items()))


def caps_explorer(steps: list[Any], measured: list[Any]) -> Any:
    """Return an explorer of bucket caps from plain values, which a recipe can hold.

    `steps` are [cap, number of buckets, ms, percent that is hidden, spans], `measured` [cap, ms].
    """
    positions = [(f"{cap:g}", row) for row, (cap, *_) in enumerate(steps)]
    slider = choice("bucket cap (MiB)", len(steps) // 2, positions)
    draw = partial(bucket_figure, steps, measured)
    return Explorer(draw, f"{__name__}:caps_explorer", steps, measured, row=slider)


def bucket_figure(steps: list[Any], measured: list[Any], row: int) -> Picture:
    """Draw the figure of `caps_explorer` for one row of `steps`."""
    cap, buckets, step_ms, hidden, spans = steps[row]
    message = (
        f"cap {cap:g} MiB (buckets: {buckets}): simulated step {step_ms:.0f} ms,"
        f" {hidden:.0f} % of the communication hidden"
    )
    caps, _, simulated_ms, *_ = zip(*steps, strict=True)
    measured_caps, measured_ms = zip(*measured, strict=True)
    with panels(2, 1, height=4.4, message=message, kind="simulated", height_ratios=[1, 3]) as (
        picture,
        (above, below),
    ):
        plots.draw_lane(above, 0, spans)
        plots.name_spans(picture, [spans], loc="outside lower center")
        above.set(xlabel="time in the simulated step (ms)", ylim=(0.6, -0.6), yticks=[])
        above.set_xlim(0, 1.05 * max(simulated_ms))
        colour = STAGE_COLOURS["5"]
        below.plot(caps, simulated_ms, color=colour, label="simulated")
        below.plot(measured_caps, measured_ms, "o", color=colour, label="program, in virtual time")
        shortest_ms, best_cap = min(zip(measured_ms, measured_caps, strict=True))
        below.annotate(
            f"the program's shortest: {shortest_ms:.0f} ms, at {best_cap:g} MiB",
            (best_cap, shortest_ms),
            xytext=(0.5, 0.4),
            textcoords="axes fraction",
            ha="center",
            arrowprops={"arrowstyle": "->"},
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
        below.axvline(cap, color="#777777", linestyle=":", label="the cap above")
        plots.logarithmic(below, "x")
        below.margins(y=0.1)
        below.set(xlabel="bucket cap (MiB)", ylabel="step (ms)", ylim=(0, None))
        below.legend(loc="lower left")
    return picture


SCHEDULES = {
    "gpipe": "GPipe",
    "one_forward_one_backward": "1F1B",
    "interleaved": "Interleaved",
    "zero_bubble": "Zero bubble",
}


@explorer(
    schedule=("schedule", [(name, function) for function, name in SCHEDULES.items()]),
    world_size=("ranks K", range(2, 9)),
    microbatches=("micro-batches M", [1, 2, 4, 8, 12, 16]),
)
def pipeline_explorer(
    world_size: int = 4, microbatches: int = 8, schedule: str = "gpipe"
) -> Picture:
    """Draw a pipeline's timetable, with the share of time in which the ranks idle.

    `schedule` names a function of `stage8_pipeline`. Interleaved ranks have two stages of half the
    layers, and as many micro-batches as the next multiple of K.
    """
    from ... import stage8_pipeline

    stages_per_rank = 1
    note = ""
    if schedule == "interleaved":
        stages_per_rank = 2
        missing = -microbatches % world_size  # so many more make a multiple of K
        if missing:
            microbatches += missing
            note = f" (a multiple of {world_size})"
    instructions = getattr(stage8_pipeline, schedule)(world_size, microbatches)
    # A rank's whole share takes 1 forward and 2 backward.
    rows = stage8_pipeline.timetable(
        instructions, forward=1 / stages_per_rank, backward=2 / stages_per_rank
    )
    title = f"{SCHEDULES[schedule]}, {world_size} ranks, {microbatches} micro-batches{note}"
    return sketches.schedules({title: rows})
