"""Explorers for a page without a kernel: the picture of every position of the sliders, drawn
beforehand.

Neighbouring pictures are SVG files that differ in few lines. So each line is kept once, and a
picture is a list of line numbers; assets/course.js puts them together again.
"""

import io
import json
import math

import ipywidgets
import matplotlib

from ddp_course.showing import widgets
from ddp_course.showing.plots import style

SVG = {
    "svg.hashsalt": "ddp_course",
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
}


def drawn(recipe: dict, most: int) -> str:
    """The explorer that `recipe` describes as JSON for the script: its sliders, and about `most`
    pictures or fewer.

    Where there are more positions than that, the longest sliders lose some in their middle.
    """
    explorer = widgets.rebuild(recipe)
    first = {name: control.value for name, control in explorer.controls.items()}
    for control in explorer.controls.values():
        control.unobserve(explorer.redraw, "value")
    every = {name: positions(control) for name, control in explorer.controls.items()}
    whole = {name: every[name] for name in movable_ends(explorer)}
    others = {name: pairs for name, pairs in every.items() if name not in whole}
    kept = every | thinned(others, first, max(1, most // math.prod(map(len, whole.values()))))
    lines = {}
    labels = {name: [] for name in kept}
    tree = branch(explorer, kept, list(kept), lines, labels)
    sliders = [
        {
            "name": explorer.controls[name].description,
            "labels": labels[name],
            "at": place(kept[name], first[name]),
        }
        for name in kept
    ]
    return json.dumps(
        {"sliders": sliders, "lines": list(lines), "tree": tree}, separators=(",", ":")
    )


def positions(control):
    """All (label, value) pairs that a slider can stand at now."""
    if isinstance(control, ipywidgets.SelectionSlider):
        return list(zip(control._options_labels, control._options_values, strict=True))
    return [(str(value), value) for value in range(control.min, control.max + 1, control.step)]


def movable_ends(explorer):
    """Sliders of whole numbers behind the first: how far they go may depend on those before
    them.
    """
    return [
        name
        for name in [*explorer.controls][1:]
        if not isinstance(explorer.controls[name], ipywidgets.SelectionSlider)
    ]


def place(pairs, value):
    """Which of the (label, value) `pairs` has this value."""
    return [each for _, each in pairs].index(value)


def thinned(every, first, most):
    """`every` {name: positions}, with positions left out of the longest until `most` pictures
    remain.

    Each slider's `first` value stays, and its ends as long as that can be.
    """
    kept = {name: list(pairs) for name, pairs in every.items()}
    while math.prod(map(len, kept.values())) > most:
        name = max(kept, key=lambda control: len(kept[control]))
        others = [pair for pair in kept[name] if pair[1] != first[name]]
        inner = [pair for pair in others if pair not in (kept[name][0], kept[name][-1])]
        removable = inner or others
        kept[name].remove(removable[len(removable) // 2])
    return kept


def branch(explorer, kept, names, lines, labels):
    """The tree of pictures: a list for each slider, and at its ends [message, alternative text,
    line numbers].

    `lines` and `labels` are filled on the way.
    """
    if not names:
        picture = explorer.picture()
        rows = [lines.setdefault(line, len(lines)) for line in svg(picture).splitlines()]
        return [picture.message, picture.alt, rows]
    name, *rest = names
    control = explorer.controls[name]
    branches = []
    pairs = positions(control) if name in movable_ends(explorer) else kept[name]
    labels[name] = max(labels[name], [label for label, _ in pairs], key=len)
    for _, value in pairs:
        control.value = value
        branches.append(branch(explorer, kept, rest, lines, labels))
    return branches


def svg(picture) -> str:
    """A picture as SVG, the same at every run."""
    file = io.StringIO()
    with style(), matplotlib.rc_context(SVG):
        picture.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()
