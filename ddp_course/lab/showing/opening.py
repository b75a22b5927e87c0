"""The questions with which a lesson opens, as buttons to choose from."""

from functools import partial
from typing import Any

import ipywidgets

from ..learners_copy import find_copy, keep
from ..questions import answered, asked_by, read_questions, title
from .widgets import MIME, Box

INTRODUCTION = "Before you begin: what do you remember of earlier lessons?"


class Opening(Box):
    """Questions that are judged, with a reason, as soon as an answer is chosen.

    The first answer in a lesson counts: it is kept in the learner's copy.
    """

    def __init__(self, lesson: int):
        self.lesson = lesson
        known = read_questions()
        self.asked = {name: known[name] for name in asked_by(lesson, find_copy())}
        self.buttons = {}
        children = [ipywidgets.HTML(INTRODUCTION)]
        for name, question in self.asked.items():
            buttons = ipywidgets.RadioButtons(
                options=list(question["answers"]),
                value=None,
                layout=ipywidgets.Layout(width="auto"),
            )
            reason = ipywidgets.HTML()
            buttons.observe(partial(self.judge, name, reason), "value")
            self.buttons[name] = buttons
            children += [ipywidgets.HTML(f"<b>{title(question)}</b>"), buttons, reason]
        super().__init__(children)

    def judge(self, name: str, reason: ipywidgets.HTML, change: Any) -> None:
        """Say whether the chosen answer is right, and why, and keep it."""
        change.owner.disabled = True
        right = self.asked[name]["right"]
        reasons = self.asked[name]["answers"]
        if change.new == right:
            reason.value = f"Right. {reasons[right]}"
        else:
            reason.value = f"No. {reasons[change.new]}<br>It is: {right}. {reasons[right]}"
        if name not in answered(find_copy(), self.lesson, self.lesson):
            keep("questions", f"{self.lesson:02} {name}", change.new == right)

    def _repr_mimebundle_(self, **options):
        """Add the questions as text, and as data, for viewers without widgets."""
        texts = [INTRODUCTION]
        for question in self.asked.values():
            choices = "\n".join(f"  ( ) {answer}" for answer in question["answers"])
            texts.append(f"{title(question)}\n{choices}")
        questions = {"questions": list(self.asked.values())}
        words = {"text/plain": "\n\n".join(texts), MIME: questions}
        return super()._repr_mimebundle_(**options) | words


questions = Opening  # A lesson's first cell calls it by this name: `show.questions(4)`.
