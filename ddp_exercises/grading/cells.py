"""Reads the cells of a notebook that somebody handed in.

They are read one by one, so that an odd cell costs only itself. Nothing here trusts the file: any
value may be missing, null, or of another type.
"""

import json
import re
from collections.abc import Iterator
from textwrap import dedent
from typing import Any, NamedTuple

from ddp_exercises.errors import GradingError

# A learner may have written anything instead of these.
IDENTITY = re.compile(r"(answer|check|task)[-_](\d{1,4})[-_.](\d{1,4})")
CHECKED = re.compile(r"""\bcheck\(\s*["'](\d{1,4}\.\d{1,4})["']""")
MARKER = re.compile(r"^#[ %]*(\S+)", re.MULTILINE)  # "# %% answer-4-2" in an exported cell
# Cells begin like this in scripts of jupytext, nbconvert and marimo.
SCRIPT = re.compile(r"^(?=# ?%%|# In ?\[|@app\.)", re.MULTILINE)
PARAGRAPH = re.compile(r"\n\n+(?=\S)")  # Colab, Databricks and jupytext's light form show no more.
TEXT = ("markdown", "raw")  # Cells of these types do not run.
FENCED = re.compile(r"^```.*\n((?:.*\n)*?)```", re.MULTILINE)  # code in Markdown


class Cell(NamedTuple):
    """A cell that was handed in: its id and its source, "" where there is none.

    If a `sign` shows that it is the answer to a task, or its check, that is its `role`. A cell
    without code has its type as `text_type`.
    """

    id: str
    source: str
    role: str = ""
    task: str = ""
    sign: str = ""
    text_type: str = ""

    @property
    def checks(self) -> list[str]:
        """The tasks whose checks this cell calls."""
        return [] if self.text_type else CHECKED.findall(self.source)


def read_cells(content: bytes) -> list[Cell]:
    """Return all cells of a notebook of any version.

    Raises GradingError if it has none, JSONDecodeError if it cannot be read.
    """
    # No number in a notebook matters here, and one of 5,000 digits is no int for Python.
    text = content.decode(json.detect_encoding(content), "replace")
    notebook = as_dict(json.loads(text, parse_int=float))
    found = notebook.get("cells")
    # Before version 4 of the format cells lay in worksheets.
    if not isinstance(found, list):
        found = []
        for sheet in as_list(notebook.get("worksheets")):
            found += as_list(as_dict(sheet).get("cells"))
        if not found:
            raise GradingError("cannot be read as a notebook: it has no list of cells")
    return [as_cell(cell) for cell in found if isinstance(cell, dict)]


def read_script(content: bytes) -> list[Cell]:
    """Return the cells of a notebook that was exported as a script; none if it is another one.

    Without marks of cells it is one if it calls checks, and a paragraph counts as a cell.
    """
    cells = []
    text = content.decode()
    parts = SCRIPT.split(text)[1:]
    if not parts and CHECKED.search(text):
        parts = PARAGRAPH.split(text)
    for part in parts:
        source = part
        if part.startswith("@app."):
            _, _, source = part.partition("\n")
        # To marimo a cell is a function, which returns its names.
        if part.startswith("@app.cell"):
            _, _, body = source.partition("):\n")
            source, _, _ = dedent(body).partition("\nreturn")
        cells.append(as_cell({"source": source}))
    return cells


def as_cell(cell: dict) -> Cell:
    """Return a cell, whatever is in it; one without a type counts as code, which does no harm."""
    source = as_text(cell.get("source", cell.get("input")))
    text_type = cell.get("cell_type")
    if text_type == "markdown":
        source = "\n".join(FENCED.findall(source)) or source
    known = Cell(as_text(cell.get("id")), source, text_type=text_type if text_type in TEXT else "")
    for sign, identity in signs_of(cell, source):
        if found := IDENTITY.fullmatch(as_text(identity)):
            role, exercise, number = found.groups()
            return known._replace(role=role, task=f"{exercise}.{number}", sign=sign)
    return known


def signs_of(cell: dict, source: str) -> Iterator[tuple[str, Any]]:
    """Yield the signs by which a cell may belong to a task, each with its text, surest first."""
    metadata = as_dict(cell.get("metadata"))
    about = as_dict(metadata.get("ddp_course"))
    yield "id", cell.get("id")
    yield "tag", f"{about.get('role')}-{about.get('task')}"
    for tag in as_list(metadata.get("tags")):
        yield "tag", tag
    yield "nbgrader's grade_id", as_dict(metadata.get("nbgrader")).get("grade_id")
    yield "Colab's id", metadata.get("id")
    for comment in MARKER.findall(source):
        yield "comment", comment


def as_text(value: Any) -> str:
    """Return a text, or a list of lines, as code; half of an emoji becomes a replacement sign."""
    lines = value if isinstance(value, list) else [value]
    text = "".join(line for line in lines if isinstance(line, str))
    return text.replace("\r\n", "\n").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def as_dict(value: Any) -> dict:
    """Return the value if it is a dict, and else an empty one."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list:
    """Return the value if it is a list, and else an empty one."""
    return value if isinstance(value, list) else []
