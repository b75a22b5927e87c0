"""Reads the constants and numbers that were fitted at development time.

constants.csv says what each constant is, and why it is plausible. `make bench predictions` fits all
of them again.
"""

import csv
import json
from functools import cache
from importlib.resources import files
from typing import Any


def lines_of(name: str) -> list[dict[str, Any]]:
    """Return the lines of a CSV file of this package, each {title: cell}."""
    with (files(__package__) / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def constants(column: str = "today") -> dict[str, float]:
    """Return the model's frozen constants by name; `column` is "today" or "of_2021"."""
    return {line["name"]: float(line[column]) for line in lines_of("constants.csv")}


@cache
def numbers(name: str) -> list[float]:
    """Return the frozen numbers of a model that is not of transformers.

    The functions that use the numbers say what each is.
    """
    text = (files(__package__) / "numbers.json").read_text(encoding="utf-8")
    return json.loads(text)[name]
