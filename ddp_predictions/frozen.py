"""Reads the constants and numbers that were fitted at development time.

constants.csv says what each constant is, and why it is plausible. `make bench predictions` fits all
of them again.
"""

import csv
import json
from functools import cache
from importlib.resources import files


@cache
def constants(column: str = "today") -> dict[str, float]:
    """Return the model's frozen constants by name; `column` is "today" or "of_2021"."""
    with (files(__package__) / "constants.csv").open(encoding="utf-8") as file:
        return {row["name"]: float(row[column]) for row in csv.DictReader(file)}


@cache
def numbers(name: str) -> list[float]:
    """Return the frozen numbers of a model that is not of transformers.

    The functions that use the numbers say what each is.
    """
    text = (files(__package__) / "numbers.json").read_text(encoding="utf-8")
    return json.loads(text)[name]
