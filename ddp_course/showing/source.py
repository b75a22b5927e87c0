"""The package's own source, shown in notebook cells: read live, so that it cannot drift from what runs."""

import difflib
import inspect
import textwrap
from collections.abc import Callable
from html import escape
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

_COLOURS = {"+": "background:rgba(0,158,115,0.22)", "-": "background:rgba(213,94,0,0.22)", " ": ""}
_BLOCK = "font-family:monospace;font-size:0.9em;line-height:1.35;white-space:pre-wrap;overflow-x:auto;"
_THEMED = "color:var(--jp-content-font-color1, inherit);"  # of JupyterLab, light or dark; elsewhere the page's own


def source(*things: Callable, click: str = "") -> Any:
    """Show the source of functions, classes or methods, coloured; with `click`, behind a line that opens it."""
    return Source("\n\n".join(text(thing) for thing in things).rstrip("\n"), click)


class Source:
    """A text of Python, coloured where HTML can be shown."""

    def __init__(self, text, click=""):
        self.text, self.click = text, click

    def __repr__(self):
        return self.text

    def _repr_html_(self):
        coloured = highlight(self.text, PythonLexer(), HtmlFormatter(noclasses=True, nowrap=True))
        shown = f'<div style="{_BLOCK}color:#111;background:#F7F7F7;padding:0.4em 0.6em">{coloured}</div>'
        return f"<details><summary>{escape(self.click)}</summary>{shown}</details>" if self.click else shown


def text(thing: Callable) -> str:
    """The source of a function or class as text, without the indentation it has in its file."""
    return textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))


def diff(before: Callable, after: Callable) -> Any:
    """Show what changed from one function to another: lines taken away in red, new ones in green."""
    return Diff(text(before), text(after))


class Diff:
    """The difference between two texts; `changed` counts the lines that were added or taken away."""

    def __init__(self, before, after):
        self.lines = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] != "?"]
        self.changed = sum(line[0] in "+-" for line in self.lines)

    def __repr__(self):
        return "\n".join(self.lines)

    def _repr_html_(self):
        rows = (f'<div style="{_COLOURS[line[0]]}">{escape(line) or " "}</div>' for line in self.lines)
        return f'<div style="{_BLOCK}{_THEMED}">{"".join(rows)}</div>'
