"""Figures with sliders, and a recorder for predictions.

An `Explorer` redraws one figure when a slider moves. Where no slider can work, on a printed page or a web page
without a kernel, the figure of its first setting stands in its place.
"""

import base64

import ipywidgets

from . import sketches

_LAYOUT = ipywidgets.Layout(width="460px")
_WIDE = {"description_width": "170px"}


class Explorer(ipywidgets.VBox):
    """Sliders over a figure: `draw(**values)` returns a `Picture` for the values of the `controls` by name."""

    def __init__(self, draw, **controls):
        self.draw, self.controls = draw, controls
        self.image = ipywidgets.Image(format="png")
        self.message = ipywidgets.Label()
        super().__init__([*controls.values(), self.image, self.message])
        for control in controls.values():
            control.observe(self.redraw, "value")
        self.redraw()

    def redraw(self, change=None):
        """Draw the figure for the present values."""
        picture = self.picture()
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
