"""Shows the package's own source in notebooks, read live, so that it is the source that runs."""

import difflib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, repr=False)
class Shown:
    """What notebooks show as `html`, and a terminal as `text`."""

    text: str
    html: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html


def source(*things: Callable | str, click: str = "") -> Shown:
    """Return the coloured source of functions or classes, behind a line `click` that opens it."""
    code = "\n\n".join(map(text_of, things)).rstrip("\n")
    coloured = highlight(code, PythonLexer(), HtmlFormatter(noclasses=True, nowrap=True))
    style = f"{_BLOCK}color:#111;background:#FCFCFC;padding:0.4em 0.6em"
    block = f'<div style="{style}">{coloured}</div>'
    if click:
        block = f"<details><summary>{escape(click)}</summary>{block}</details>"
    return Shown(code, block)


def diff(before: Callable | str, after: Callable | str) -> Shown:
    """Return the changes between functions or texts: old lines are red, new ones green."""
    compared = difflib.ndiff(text_of(before).splitlines(), text_of(after).splitlines())
    lines = [line for line in compared if line[0] != "?"]
    rows = [f'<div style="{_COLOURS[line[0]]}">{escape(line)}</div>' for line in lines]
    block = f'<div style="{_BLOCK}{_THEMED}">{"".join(rows)}</div>'
    return Shown("\n".join(lines), block)


def text_of(thing: Callable | str) -> str:
    """Return the source of a function or class, without its indentation; a text as it is."""
    if isinstance(thing, str):
        return thing
    return textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))
