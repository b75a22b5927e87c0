"""Shows predictions beside what others measured: as tables, an overview and a page.

The rows are in scoreboard.json. A row is a dict: the table, the keys of the setting, the `quantity`
with its unit, `measured` (None if not known here), `predicted`, `error` (predicted over measured,
minus 1) and `calibrated`, which says whether the fit saw this row. If the fit saw every row,
`left_out` is the model's median error on rows that a second fit did not see.
"""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from tabulate import tabulate

from ddp_course.lab.measuring import facts

from .frozen import lines_of
from .plans import score
from .runs import Row

# These are median errors on rows that a second fit did not see; `make bench predictions` measures
# them again.
LEFT_OUT = {
    "nccl_ring_a100x8_sizes": 0.044,
    "pipeline_schedules_a100": 0.010,
    "gpt_step_ms_a100_3d": 0.032,
    "transformer_throughput": 0.036,
}
PAGE = """# What we predict, beside what others measured

Written by `ddp-course predict --out results`. Error: predicted over measured, minus 1, without \
its sign; median / nine in ten / worst.
Rows that the fit saw are *calibrated*; *left out* is the median error on rows that a second fit \
did not see;
*held back* rows are predicted in predictions.json, and their truth is known to others only.

![predicted over measured, a point per row](predictions.png)

{}"""

SCORE = """## Choosing a way

The model of `decide` chooses among published runs of one model on as many GPUs, with sequences as
long and as many tokens per step: {0.groups} groups of two ways or more. A blind choice takes any
run of a group. A way that nobody published is not scored.

| choice | groups within 5 % of the best | speed kept, of the best (mean) |
|:-------|------------------------------:|-------------------------------:|
| ours   | {0.within:.0%} | {0.kept:.3f} |
| blind  | {0.blind_within:.0%} | {0.blind_kept:.3f} |"""


class Table(NamedTuple):
    """The predictions for one published table, and what was `fitted`, in words."""

    name: str
    rows: list[Row]
    fitted: str

    @property
    def left_out(self) -> float | None:
        """The median error on rows that a second fit did not see, as the benchmark measured it."""
        return LEFT_OUT.get(self.name)

    @property
    def held_back(self) -> int:
        """The number of rows of which no measurement is known."""
        return len(self.rows) - len(known_rows(self.rows))

    def errors(self, calibrated: bool) -> list[float]:
        """Return (median, nine in ten, worst) of the rows that the fit saw, or of all others."""
        known = known_rows(self.rows)
        return spread([abs(row["error"]) for row in known if row["calibrated"] == calibrated])


def scoreboard() -> list[Table]:
    """Return all tables, as `make bench predictions` wrote them with the models of its time."""
    text = (files(__package__) / "scoreboard.json").read_text(encoding="utf-8")
    return [Table(**table) for table in json.loads(text)]


def rehearsed() -> list[Row]:
    """Return published runs in tokens per second and GPU, beside two predictions of each.

    One is by formula, the other by rehearsal.

    `make bench rehearsals` wrote them: no constant was fitted to a row's model, nor to a rehearsal.
    """
    rows = lines_of("rehearsals.csv")
    for row in rows:
        for name in ("gpus", "seq", "formula", "rehearsal", "measured"):
            row[name] = float(row[name])
    return rows


def known_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose measurement, and so whose error, is known."""
    return [row for row in rows if row["error"] is not None]


def spread(errors: Sequence[float]) -> list[float]:
    """Return the median, the error that nine in ten stay below, and the worst; [] without any."""
    return np.quantile(errors, (0.5, 0.9, 1.0)).tolist() if errors else []


def overview(tables: Sequence[Table]) -> str:
    """Return the errors of all tables as text, which is a table in Markdown, too."""
    titles = ["table", "rows", "calibrated", "predicted", "left out", "held back"]
    lines = []
    for table in tables:
        lines.append(
            [
                table.name,
                len(table.rows),
                percents(table.errors(calibrated=True)),
                percents(table.errors(calibrated=False)),
                percents([table.left_out]),
                table.held_back,
            ]
        )
    sides = ["left"] + ["right"] * 5
    return tabulate(lines, titles, tablefmt="pipe", colalign=sides, disable_numparse=True)


def page(tables: Sequence[Table]) -> str:
    """Return the scoreboard in Markdown: errors by table, what was fitted, the largest misses."""
    parts = [PAGE.format(overview(tables))]
    for table in tables:
        parts += [f"## {table.name}", facts.SOURCES[table.name], f"Fitted: {table.fitted}."]
        if facts.ASSUMED[table.name]:
            parts.append(f"Assumed: {facts.ASSUMED[table.name]}.")
        parts.append(misses(table))
    parts.append(SCORE.format(score()))
    return "\n\n".join(parts) + "\n"


def misses(table: Table) -> str:
    """Return the three largest misses of a table as a list in Markdown."""
    worst_first = sorted(known_rows(table.rows), key=lambda row: -abs(row["error"]))
    not_of_the_setting = ("table", "measured", "predicted", "error", "calibrated", "quantity")
    lines = ["Largest misses:", ""]
    for row in worst_first[:3]:
        setting = [f"{key} {value}" for key, value in row.items() if key not in not_of_the_setting]
        values = f"predicted {row['predicted']:g}, measured {row['measured']:g}"
        lines.append(f"- {row['error']:+.0%}: {values} ({', '.join(setting)})")
    return "\n".join(lines)


def percents(errors: Any) -> str:
    """Return errors as text, "1.2% / 3.4%"; a dash if there are none, or only None."""
    return " / ".join(f"{error:.1%}" for error in errors if error is not None) or "–"
