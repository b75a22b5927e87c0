"""Tables as CSV: what a teacher hands in, and what spreadsheets and gradebooks read."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ddp_course.errors import GradingError


def read_table(path: str | Path, titles: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a teacher's file, {title: cell}. Without any of the `titles` in its first line it
    is a list, a line each, of what the first title says. GradingError for a file that cannot be
    read.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GradingError(f'"{path}" cannot be read: {error}') from error
    rows = [list(map(str.strip, row)) for row in csv.reader(lines)]
    if not rows or not set(titles) & set(rows[0]):
        rows.insert(0, [titles[0]])
    header, *others = rows
    return [dict(zip(header, row, strict=False)) for row in others]


def as_csv(titles: Sequence[str], rows: Iterable[dict[str, Any]]) -> str:
    """CSV text with these columns. What is no number is no formula for a spreadsheet either."""
    file = io.StringIO()
    writer = csv.DictWriter(file, titles, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({title: cell_of(value) for title, value in row.items()})
    return file.getvalue()


def cell_of(value: object) -> str:
    """A number, a text or nothing, as a cell of a table."""
    if isinstance(value, int | float):
        return f"{value:g}"
    return re.sub(r"^(?=[=+@\t-])", "'", str(value or ""))
