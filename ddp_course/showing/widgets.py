"""Figures with sliders, and a recorder for predictions.

An `Explorer` redraws one figure when a slider moves. Where no slider can work, on a printed page or a web page
without a kernel, the figure of its first setting stands in its place.
"""

import base64

import ipywidgets

from . import sketches
from .plots import STAGE_COLOURS, binary_bytes, curves, draw_lane, logarithmic, panels, style

_LAYOUT = ipywidgets.Layout(width="460px")
_WIDE = {"description_width": "170px"}
BANDWIDTHS = ["100Mbit", "1Gbit", "10Gbit", "100Gbit", "400Gbit"]
CAPS = (0.06, 0.12, 0.18, 0.25, 0.31, 0.37, 0.5)
LATENCIES = ["1us", "10us", "100us", "1ms", "10ms"]


class Explorer(ipywidgets.VBox):
    """Sliders over a figure: `draw(**values)` returns a `Picture` for the values of the `controls` by name."""

    def __init__(self, draw, **controls):
        self.draw, self.controls = draw, controls
        self.image = ipywidgets.Image(format="png", layout=ipywidgets.Layout(align_self="flex-start", max_width="100%"))
        self.message = ipywidgets.Label()
        super().__init__([*controls.values(), self.image, self.message])
        for control in controls.values():
            control.observe(self.redraw, "value")
        self.redraw()

    def redraw(self, change=None):
        """Draw the figure for the present values."""
        picture = self.picture()
        # The browser keeps this much room while it loads the new image: else all that is below would jump.
        self.image.width, self.image.height = (str(int(pixels)) for pixels in picture.bbox.size)
        self.image.value = picture.png()
        self.message.value = picture.message

    def picture(self):
        """The figure of the present values, as a plain `Picture`."""
        return self.draw(**{name: control.value for name, control in self.controls.items()})

    def _repr_mimebundle_(self, **options):
        bundle = super()._repr_mimebundle_(**options)
        return {**bundle, "image/png": base64.b64encode(self.image.value).decode(), "text/plain": self.message.value}


def whole(name, value, low, high, step=1):
    """A slider for a whole number."""
    return ipywidgets.IntSlider(
        value=value, min=low, max=high, step=step, description=name, layout=_LAYOUT, style=_WIDE
    )


def choice(name, value, options):
    """A slider over a list of values or of (label, value) pairs."""
    return ipywidgets.SelectionSlider(value=value, options=options, description=name, layout=_LAYOUT, style=_WIDE)


def ring_stepper(world_size=4):
    """Step through the chunked ring: which chunk is where, and which ranks' gradients are added up in it."""
    ranks = whole("ranks K", world_size, 2, 8)
    step = whole("step", 0, 0, 2 * (world_size - 1))

    def limit(change):
        step.max = 2 * (change["new"] - 1)

    ranks.observe(limit, "value")
    return Explorer(lambda K, step: sketches.ring_step(K, min(step, 2 * (K - 1))), K=ranks, step=step)


def predict(question, answers):
    """Ask before the experiment: returns a `Prediction`, whose `reveal` is called after it."""
    return Prediction(question, answers)


class Prediction(ipywidgets.VBox):
    """A question with `answers` to choose from. The choice is kept until `reveal` shows it beside the truth."""

    def __init__(self, question, answers):
        self.question, self.answers = question, list(answers)
        text = ipywidgets.HTML(f"<b>{question}</b>")
        unknown = [("I have not decided", None)]
        self.buttons = ipywidgets.RadioButtons(
            options=unknown + [(str(answer), answer) for answer in self.answers], layout=ipywidgets.Layout(width="auto")
        )
        super().__init__([text, self.buttons])

    @property
    def guess(self):
        """The answer chosen so far, or None."""
        return self.buttons.value

    @guess.setter
    def guess(self, answer):
        self.buttons.value = answer

    def reveal(self, measured, answer):
        """Print the guess beside the measurement (text); `answer` is the right one among the answers."""
        if answer not in self.answers:
            raise ValueError(f"{answer!r} is not among the answers {self.answers}")
        guess = "you did not guess" if self.guess is None else f"your guess: {self.guess}"
        verdict = "" if self.guess is None else (" – right" if self.guess == answer else " – a surprise")
        print(f"{guess}; measured: {measured}{verdict}")

    def _repr_mimebundle_(self, **options):
        bundle = super()._repr_mimebundle_(**options)
        listed = "\n".join(f"  ( ) {answer}" for answer in self.answers)
        return {**bundle, "text/plain": f"{self.question}\n{listed}"}


def nearest(value, answers):
    """The number among `answers` that is nearest to `value` in ratio: to find the right one of a `Prediction`."""
    return min(
        answers, key=lambda answer: max(value, 1e-300) / answer if answer < value else answer / max(value, 1e-300)
    )


def alpha_beta_explorer(bandwidth="10Gbit", latency="100us", world_size=8):
    """Which all-reduce is the fastest for which message size: sliders for the link and the number of ranks."""
    return Explorer(
        alpha_beta_figure,
        bandwidth=choice("bandwidth", bandwidth, BANDWIDTHS),
        latency=choice("latency", latency, LATENCIES),
        world_size=choice("ranks K", world_size, [2, 4, 8, 16, 64, 256, 1024]),
    )


def alpha_beta_figure(bandwidth="10Gbit", latency="100us", world_size=8):
    """Time of an all-reduce by message size for four algorithms, from the closed forms of `theory`."""
    from ..measuring import theory
    from ..running.units import bits_per_second, seconds

    costs = theory.Costs.of_link(bits_per_second(bandwidth), seconds(latency))
    sizes = [2.0**power for power in range(6, 31, 2)]
    chosen = {"server": "parameter_server", "ring": "ring", "tree": "tree", "halving-doubling": "halving_doubling"}
    colours = dict(zip(chosen, [STAGE_COLOURS["3"], STAGE_COLOURS["4"], "#009E73", "#CC79A7"], strict=True))
    times = {name: [theory.seconds(form, n, world_size, costs) for n in sizes] for name, form in chosen.items()}
    first, last = (min(times, key=lambda name: times[name][at]) for at in (0, -1))
    winners = f"{first} wins" if first == last else f"{first} wins small, {last} large"
    title = f"{bandwidth}/s, {latency}, {world_size} ranks: {winners}"
    lines = {name: (sizes, [1000 * t for t in times[name]], colours[name]) for name in chosen}
    picture = curves({}, "message", "time (ms)", title, theory=lines, log="xy", height=3.6)
    picture.axes[0].set_xticks([2**6, 2**10, 2**15, 2**20, 2**25, 2**30])
    binary_bytes(picture.axes[0].xaxis)
    picture.axes[0].minorticks_off()  # nobody reads those, and they took more than half of the time to draw
    return picture


def bucket_explorer(profile, world_size, network, measured, caps=CAPS):
    """Choose the bucket cap: the simulated step of `profile`, and step times by cap beside `measured` {MiB: ms}."""
    steps = simulated_steps(profile, world_size, network, caps)
    cap = choice("bucket cap (MiB)", caps[len(caps) // 2], [(f"{size:g}", size) for size in caps])
    return Explorer(lambda cap: _bucket_figure(steps, measured, cap), cap=cap)


def bucket_figure(profile, world_size, network, measured, cap):
    """The plain figure of `bucket_explorer` for one `cap`."""
    return _bucket_figure(simulated_steps(profile, world_size, network, sorted({*CAPS, cap})), measured, cap)


def simulated_steps(profile, world_size, network, caps):
    """{cap in MiB: simulated step} of stage 5 with `profile`."""
    from ..measuring.simulate import simulate

    return {cap: simulate(profile, world_size, network, bucket_cap_mb=cap) for cap in caps}


def _bucket_figure(steps, measured, cap):
    step = steps[cap]
    hidden = 100 * (1 - min(1.0, step.exposed_s / step.communication_s)) if step.communication_s else 100
    message = f"cap {cap:g} MiB: {len(step.buckets)} bucket(s), step {1000 * step.step_s:.1f} ms, {hidden:.0f} % hidden"
    picture, (above, below) = panels(2, 1, height=4.2, message=message, alt=message, height_ratios=[1, 3])
    with style():
        draw_lane(above, 0, [[span.name, span.start, span.end, span.lane] for span in step.spans])
        above.set(xlim=(0, 1050 * max(one.step_s for one in steps.values())), ylim=(0.6, -0.6), yticks=[])
        above.set(title=message)
        above.set_xlabel("time in the simulated step (ms)")
        below.plot(
            list(steps), [1000 * one.step_s for one in steps.values()], color=STAGE_COLOURS["5"], label="simulated"
        )
        below.plot(list(measured), list(measured.values()), "o", color=STAGE_COLOURS["5"], label="measured")
        below.axvline(cap, color="#777777", linestyle=":")
        logarithmic(below, "x")
        below.set(xlabel="bucket cap (MiB)", ylabel="step (ms)", ylim=(0, None))
        below.legend(loc="lower left")
    return picture


def decision_chart(billions=7, memory_gb=24, devices=8, bandwidth="100Gbit"):
    """Which strategy for which model and machine: sliders, memory a device for each strategy, and a recommendation."""
    return Explorer(
        decision_figure,
        billions=choice("parameters (billions)", billions, [0.1, 0.3, 1, 3, 7, 13, 30, 70, 180, 400]),
        memory_gb=choice("memory a device (GB)", memory_gb, [8, 16, 24, 40, 80, 141, 192]),
        devices=choice("devices", devices, [1, 2, 4, 8, 16, 64, 256, 1024]),
        bandwidth=choice("link between devices", bandwidth, BANDWIDTHS),
    )


def memory_needed(billions, devices):
    """GB a device for each strategy: 16 bytes a parameter (float32, Adam) and a fifth more for activations.

    Fully sharded, two blocks of 1/32 of the model are whole at a time.
    """
    whole = 1.2 * 16 * billions
    return {
        "DDP": whole,
        "ZeRO-1": 1.2 * (8 + 8 / devices) * billions,
        "fully sharded": whole / devices + 2 * 4 * billions / 32,
        "pipeline": whole / devices,
    }


def decide(billions, memory_gb, devices, bandwidth):
    """Return (strategy, reason): the simplest one that fits, fully sharded only where its traffic takes under 60 s."""
    from ..running.units import bits_per_second

    needed = memory_needed(billions, devices)
    fits = [name for name, size in needed.items() if size <= memory_gb]
    if devices == 1:
        return ("one device", "it fits") if "DDP" in fits else ("more devices", "one is too small for this model")
    gathering_s = 3 * (devices - 1) / devices * 4e9 * billions * 8 / bits_per_second(bandwidth)
    if "fully sharded" in fits and "ZeRO-1" not in fits and gathering_s > 60 and "pipeline" in fits:
        return "pipeline", f"gathering parameters would take {gathering_s:,.0f} s a step"
    reasons = {"DDP": "everything fits on each device", "ZeRO-1": "all but the optimizer state fits"}
    for name in ("DDP", "ZeRO-1", "fully sharded", "pipeline"):
        if name in fits:
            return name, reasons.get(name, f"only split over {devices} devices it fits")
    return "more devices", f"even split over {devices} it does not fit"


def decision_figure(billions=7, memory_gb=24, devices=8, bandwidth="100Gbit"):
    """The plain figure of `decision_chart`."""
    needed = memory_needed(billions, devices)
    name, reason = decide(billions, memory_gb, devices, bandwidth)
    message = f"{billions:g} billion parameters, {devices} x {memory_gb} GB: {name} ({reason})"
    picture, axes = panels(width=7.2, height=2.6, message=message, alt=f"Bars of memory a device. {message}")
    with style():
        colours = [STAGE_COLOURS["6"], STAGE_COLOURS["7"], STAGE_COLOURS["7"], STAGE_COLOURS["8"]]
        shades = [
            colour if size <= memory_gb else "#D9D9D9" for colour, size in zip(colours, needed.values(), strict=True)
        ]
        axes.barh(range(4), list(needed.values()), color=shades, height=0.6)
        axes.axvline(memory_gb, color="black", linestyle="--")
        logarithmic(axes, "x")
        low, high = min([*needed.values(), memory_gb]), max([*needed.values(), memory_gb])
        axes.set(xlim=(low / 8, high * 2), ylim=(3.6, -0.6), xlabel="memory a device (GB); dashed: what it has")
        for row, size in enumerate(needed.values()):
            shade = "white" if size <= memory_gb and row != 2 else "black"
            axes.text(low / 7.5, row, f"{size:,.3g} GB", va="center", color=shade, fontsize=9)
        axes.set_yticks(range(4), list(needed))
        axes.grid(axis="y", visible=False)
        axes.set_title(f"{name}: {reason}")
    return picture
