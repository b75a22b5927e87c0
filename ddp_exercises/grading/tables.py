"""Reads a teacher's tables, and writes those for spreadsheets and gradebooks, as CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ddp_exercises.errors import GradingError


def read_table(path: str | Path, titles: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of a teacher's file, each {title: cell}.

    If its first line has none of the `titles`, it is a list: the first cell of each line stands
    under the first title. Raises GradingError for a file that cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise GradingError(f'"{path}" cannot be read: {error}') from error
    rows = [list(map(str.strip, row)) for row in csv.reader(io.StringIO(text))]
    if not rows or not set(titles) & set(rows[0]):
        rows.insert(0, [titles[0]])
    header, *others = rows
    return [dict(zip(header, row, strict=False)) for row in others]


def as_csv(titles: Sequence[str], rows: Iterable[dict[str, Any]]) -> str:
    """Return CSV text with these columns."""
    file = io.StringIO()
    writer = csv.DictWriter(file, titles, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({title: as_text(value) for title, value in row.items()})
    return file.getvalue()


def as_text(value: object) -> str:
    """Return a number, a text or nothing as a cell of a table.

    A text that a spreadsheet would take for a formula begins with an apostrophe.
    """
    if isinstance(value, int | float):
        return f"{value:g}"
    text = str(value or "")
    return f"'{text}" if text.startswith(("=", "+", "@", "\t", "-")) else text
