"""The command `ddp-course predict`: what our models say of published runs, and of a table of
yours.
"""

import argparse
import csv
import io
import json
import sys
from pathlib import Path
from statistics import median

from ddp_course.running import files
from ddp_course.running.units import positive_number

from .. import predict, published

COLUMN = "predicted iteration time (ms)"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="?", choices=["all", "gpt"], default="all", help="gpt: the settings in --csv"
    )
    parser.add_argument(
        "--csv", type=Path, help=f"settings with the columns of {published.GPT}.csv"
    )
    parser.add_argument(
        "--out", help="folder of predictions.json, .md and .png (default: results); for gpt a file"
    )


def main(args: argparse.Namespace) -> None:
    """Write the scoreboard, or fill a column for the settings in a file."""
    if bool(args.csv) != (args.what == "gpt"):
        raise ValueError(
            f"gpt and --csv FILE go together: a table with the columns of {published.GPT}.csv"
        )
    if args.csv:
        gpt(args.csv, args.out)
        return
    from ..figures import predictions_figure

    folder, tables = files.writable_folder(args.out or "results"), predict.scoreboard()
    rows = [row for table in tables for row in table.rows]
    content = "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n"
    files.replace_file(folder / "predictions.json", content.encode())
    files.replace_file(folder / "predictions.md", predict.page(tables).encode())
    files.replace_file(folder / "predictions.png", predictions_figure(rows).png())
    print(f"Errors, median / worst:\n\n{predict.overview(tables)}\n")
    print(f"{len(rows)} rows: {folder / 'predictions.json'}; page: {folder / 'predictions.md'}")


def gpt(source: Path, target: str | None) -> None:
    """Predict the step of every line of a CSV file. ValueError names a line that cannot be
    predicted.
    """
    try:
        with source.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
    except (OSError, UnicodeError, csv.Error) as error:
        raise ValueError(
            f"cannot read {source} ({error}); give a CSV file like {published.GPT}.csv"
        ) from None
    if not rows:
        raise ValueError(f"{source} has no lines below its titles; write one line per setting")
    machine = published.machine()
    errors = []
    for number, row in enumerate(rows, 2):
        try:
            row[COLUMN] = f"{published.gpt_ms(row, machine):.1f}"
            if row.get(published.GPT_MS):
                measured = positive_number(row[published.GPT_MS])
                errors.append(abs(float(row[COLUMN]) / measured - 1))
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ValueError(f"{source}, line {number}: {error}") from None
    text = io.StringIO()
    writer = csv.DictWriter(
        text, [*(reader.fieldnames or ()), COLUMN], extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    if target:
        files.replace_file(Path(target), text.getvalue().encode())
    else:
        sys.stdout.write(text.getvalue())
    if errors:
        print(
            f"median error of {len(errors)} lines: {median(errors):.1%}, worst {max(errors):.1%}",
            file=sys.stderr,
        )
