"""The package's own source, shown in notebook cells: read live, so that it cannot drift from what
runs.
"""

import difflib
import inspect
import textwrap
from collections.abc import Callable
from html import escape

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

_COLOURS = {"+": "background:rgba(0,158,115,0.22)", "-": "background:rgba(213,94,0,0.22)", " ": ""}
_BLOCK = (
    "font-family:monospace;font-size:0.9em;line-height:1.35;white-space:pre-wrap;overflow-x:auto;"
)
# JupyterLab sets this colour; other pages inherit theirs.
_THEMED = "color:var(--jp-content-font-color1, inherit);"


class Source:
    """The source of functions, classes or methods, coloured; with `click`, behind a line that opens
    it.
    """

    def __init__(self, *things, click=""):
        self.text = "\n\n".join(text(thing) for thing in things).rstrip("\n")
        self.click = click

    def __repr__(self):
        return self.text

    def _repr_html_(self):
        coloured = highlight(self.text, PythonLexer(), HtmlFormatter(noclasses=True, nowrap=True))
        block = (
            f'<div style="{_BLOCK}color:#111;background:#FCFCFC;padding:0.4em'
            f' 0.6em">{coloured}</div>'
        )
        return (
            f"<details><summary>{escape(self.click)}</summary>{block}</details>"
            if self.click
            else block
        )


def text(thing: Callable | str) -> str:
    """The source of a function or class as text, without the indentation it has in its file; a text
    as it is.
    """
    return (
        thing
        if isinstance(thing, str)
        else textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))
    )


class Diff:
    """What changed from one function or text to another: lines taken away in red, new ones in
    green.

    `changed` counts the lines that were added or taken away.
    """

    def __init__(self, before, after):
        before = text(before).splitlines()
        after = text(after).splitlines()
        self.lines = [line for line in difflib.ndiff(before, after) if line[0] != "?"]
        self.changed = sum(line[0] in "+-" for line in self.lines)

    def __repr__(self):
        return "\n".join(self.lines)

    def _repr_html_(self):
        rows = (
            f'<div style="{_COLOURS[line[0]]}">{escape(line) or " "}</div>' for line in self.lines
        )
        return f'<div style="{_BLOCK}{_THEMED}">{"".join(rows)}</div>'


# Notebooks call the classes by these names.
source = Source
diff = Diff
