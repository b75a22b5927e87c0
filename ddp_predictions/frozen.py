"""What was fitted at development time: constants.csv says what each is, and why it is plausible.

`make bench predictions` fits all of it anew.
"""

import csv
import json
from functools import cache
from importlib.resources import files


@cache
def constants(column: str = "today") -> dict[str, float]:
    """The frozen constants of the model, {name: value}; `column` is "today" or "of_2021"."""
    with (files(__package__) / "constants.csv").open(encoding="utf-8") as file:
        return {row["name"]: float(row[column]) for row in csv.DictReader(file)}


@cache
def numbers(name: str) -> list[float]:
    """The frozen numbers of one of the models that are not of transformers.

    Their functions say what each number is.
    """
    text = (files(__package__) / "numbers.json").read_text(encoding="utf-8")
    return json.loads(text)[name]
