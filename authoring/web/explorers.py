"""Explorers for a page without a kernel: each position of the sliders is a picture drawn before.

Neighbouring pictures are SVG files that differ in few lines. So each line is kept once, and a
picture is a list of line numbers; assets/course.js puts them together again.
"""

import io
import json
import math

import ipywidgets
import matplotlib

from ddp_course.lab.showing import widgets
from ddp_course.lab.showing.plots import style

SVG = {
    "svg.hashsalt": "ddp_course",
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
}


def drawn(recipe: dict, most: int) -> str:
    """Return the explorer that `recipe` describes as JSON for the script.

    It has its sliders, and about `most` pictures or fewer. Where there are more positions than
    that, the longest sliders lose some in their middle.
    """
    explorer = widgets.rebuild(recipe)
    controls = explorer.controls
    first_values = {name: control.value for name, control in controls.items()}
    for control in controls.values():
        control.unobserve(explorer.redraw, "value")  # `branch` draws each picture itself.
    all_positions = {name: positions(control) for name, control in controls.items()}
    # A slider whose ends move keeps all of its positions; the others share the rest.
    pictures_of_others = most
    others = dict(all_positions)
    for name in movable_ends(explorer):
        pictures_of_others //= len(others.pop(name))
    pairs = all_positions | thinned(others, first_values, max(1, pictures_of_others))
    lines = {}
    labels = {name: [] for name in pairs}
    tree = branch(explorer, pairs, list(pairs), lines, labels)
    sliders = []
    for name in pairs:
        values = [value for _, value in pairs[name]]
        slider = {
            "name": controls[name].description,
            "labels": labels[name],
            "at": values.index(first_values[name]),
        }
        sliders.append(slider)
    whole = {"sliders": sliders, "lines": list(lines), "tree": tree}
    return json.dumps(whole, separators=(",", ":"))


def positions(control):
    """Return all (label, value) pairs that a slider can stand at now."""
    if isinstance(control, ipywidgets.SelectionSlider):
        # The public `options` may be pairs or bare values; these are always both.
        return list(zip(control._options_labels, control._options_values, strict=True))
    return [(str(value), value) for value in range(control.min, control.max + 1, control.step)]


def movable_ends(explorer):
    """Return sliders of whole numbers behind the first.

    How far they go may depend on those before them.
    """
    return [
        name
        for name in list(explorer.controls)[1:]
        if not isinstance(explorer.controls[name], ipywidgets.SelectionSlider)
    ]


def thinned(all_positions, first_values, most):
    """Return `all_positions` with pairs left out of the longest until `most` pictures remain.

    They are {name: (label, value) pairs}. Each slider's first value stays, and its ends as long as
    that can be.
    """
    kept = {name: list(pairs) for name, pairs in all_positions.items()}
    while math.prod(map(len, kept.values())) > most:
        longest = max(kept, key=lambda name: len(kept[name]))
        pairs = kept[longest]
        removable = [pair for pair in pairs if pair[1] != first_values[longest]]
        inner = [pair for pair in removable if pair not in (pairs[0], pairs[-1])]
        if inner:
            removable = inner
        pairs.remove(removable[len(removable) // 2])
    return kept


def branch(explorer, kept, names, lines, labels):
    """Return the tree of pictures: a list for each of the sliders `names`, with positions `kept`.

    At its ends are [message, alternative text, line numbers]. On the way `lines`, {line: its
    number}, and `labels`, {name: labels}, are filled.
    """
    if not names:
        picture = explorer.picture()
        rows = [lines.setdefault(line, len(lines)) for line in svg(picture).splitlines()]
        return [picture.message, picture.alt, rows]
    name, *rest = names
    control = explorer.controls[name]
    branches = []
    pairs = positions(control) if name in movable_ends(explorer) else kept[name]
    # Where the ends move, the page's slider is as long as the longest.
    labels[name] = max(labels[name], [label for label, _ in pairs], key=len)
    for _, value in pairs:
        control.value = value
        branches.append(branch(explorer, kept, rest, lines, labels))
    return branches


def svg(picture) -> str:
    """Return a picture as SVG, the same at every run."""
    file = io.StringIO()
    with style(), matplotlib.rc_context(SVG):
        picture.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()
