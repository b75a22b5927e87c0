"""Measurements that figures show, and with which the simulator is compared.

Others published them, but for `elastic_job` and `stages_on_one_h200`, which are this project's own.
Each table is a CSV file in this folder; `sources.csv` says where it comes from, and what
predictions of it assume.
"""

import csv
from importlib.resources import files
from typing import Any


def rows(name: str) -> list[dict[str, Any]]:
    """Return the lines of table `name`, a key of SOURCES, as dicts with numbers as floats.

    Raises ValueError for an unknown name.
    """
    if name not in SOURCES:
        raise ValueError(f'there is no table "{name}"; choose one of {", ".join(SOURCES)}')
    numbers = []
    for line in _lines(name):
        numbers.append({key: _number(value) for key, value in line.items()})
    return numbers


def _lines(name):
    with (files(__package__) / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _number(text):
    try:
        return float(text)
    except ValueError:
        return text


SOURCES = {row["table"]: row["source"] for row in _lines("sources")}
ASSUMED = {row["table"]: row["assumed"] for row in _lines("sources")}
