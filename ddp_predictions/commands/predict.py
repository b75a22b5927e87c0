"""`ddp-course predict` predicts a run, or each line of a table, or shows the scoreboard."""

import argparse
import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from ddp_course.base import files
from manyranks import presets

from ..answers import Answer, answer_of, predict
from ..runs import UnknownAccelerator, read_run

# These options are fields of a run.
TEXTS = {
    "model": "a name such as llama-3.1-8b, gpt2-xl, mpt-7b",
    "gpu": "such as H100-80GB, A100-40GB, RTX 4090",
    "gpus": "how many",
    "gpus-per-host": "default 8",
    "way": "fsdp, zero1, zero2, hybrid, ddp (default fsdp)",
    "micro-batch": "sequences of a micro-batch",
    "accumulate": "micro-batches of a step",
    "seq": "tokens of a sequence",
    "tensor": "tensor parallel ways",
    "pipeline": "pipeline stages",
    "recompute": "none, selective or full",
    "network": "Gbit/s of all cards of a host",
    "inside": 'link between GPUs of a host, such as "PCIe 4"',
    "precision": '"bf16 mixed" or "bf16 pure"',
}
NOT_FORETOLD = "not foretold"  # The column with this title says why.


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to its parser."""
    parser.add_argument("file", nargs="?", type=Path, help="a CSV table, a run in each line")
    parser.add_argument("--config", type=Path, help="config.json of a model on Hugging Face")
    for name, text in TEXTS.items():
        parser.add_argument(f"--{name}", help=text)
    parser.add_argument(
        "--accelerator",
        action="append",
        default=[],
        metavar="NAME=FLOP/s,BYTES/s",
        help='one that no table has, as in "X1=500TFLOP/s,2TB/s", and where they are known its'
        ' size, link and network, as in ",96GB,NVLink H100,3200Gbit"; may be given several times',
    )
    parser.add_argument("--decide", action="store_true", help="choose the way; --batch: sequences")
    parser.add_argument("--batch", help="sequences of a whole step")
    parser.add_argument("--figure", type=Path, help="write the picture to this PNG file")
    parser.add_argument("--out", help="the table with new columns; without a run: a folder for all")


def main(args: argparse.Namespace) -> None:
    """Predict one run or a table; without either show the scoreboard.

    Raises ValueError for a table and a run together.
    """
    for text in args.accelerator:
        presets.teach(text)
    names = [name.replace("-", "_") for name in (*TEXTS, "batch")]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.file:
        if given or args.config:
            raise ValueError("a table and options of one run do not go together; take one of them")
        predict_table(args.file, args.out)
    elif given or args.config:
        predict_one_run(args, given)
    else:
        show_scoreboard(args.out)


def predict_one_run(args: argparse.Namespace, given: dict[str, Any]) -> None:
    """Print the answer for the run of the options, and write its picture if asked to.

    Raises ValueError for a config.json that cannot be read.
    """
    fields = given
    if args.config:
        try:
            config = json.loads(args.config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read {args.config} ({error}); give a config.json") from None
        if not isinstance(config, dict):
            raise ValueError(f"{args.config} is no config.json: names and values were expected")
        fields = {"model": config.get("model_type", "a transformer"), **config, **given}
    if args.decide:
        from ..plans import decide

        decision = decide(**fields)
        print(decision.words())
        result = decision.chosen
    else:
        result = predict(**fields)
        print(result.words())
    if args.figure and result:
        files.replace_file(args.figure, result.figure().png())


def predict_table(source: Path, target: str | None) -> None:
    """Predict every line of a table; raises ValueError, which names a wrong line and column.

    A line whose GPU nobody knows has a last column that says what to give.
    """
    rows = read_table(source)
    errors = []
    assumed = []
    unknown = []  # the numbers of the lines whose GPU nobody knows
    for number, row in enumerate(rows, 2):
        if None in row:
            raise ValueError(f"{source}, line {number}: it has more cells than there are titles")
        try:
            assumed += foretell(row)
        except ValueError as wrong:
            raise ValueError(f"{source}, line {number}: {wrong}") from None
        if NOT_FORETOLD in row:
            unknown.append(str(number))
        elif "error" in row:
            errors.append(abs(float(row["error"])))
    titles = dict.fromkeys(title for row in rows for title in row)
    text = io.StringIO()
    # The column that says why there is no prediction comes last.
    in_order = sorted(titles, key=NOT_FORETOLD.__eq__)
    writer = csv.DictWriter(text, in_order, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    if target:
        files.replace_file(Path(target), text.getvalue().encode())
    else:
        sys.stdout.write(text.getvalue())
    # What several lines assume is said once.
    for sentence in remarks(unknown, list(dict.fromkeys(assumed)), errors):
        print(sentence, file=sys.stderr)


def read_table(source: Path) -> list[dict[str, Any]]:
    """Return the lines of a table; raises ValueError if there are none, or they cannot be read."""
    try:
        with source.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
    except (OSError, UnicodeError, csv.Error) as problem:
        raise ValueError(f"cannot read {source} ({problem}); give a CSV file") from None
    if not rows:
        raise ValueError(f"{source} has no lines below its titles; write one line per run")
    return rows


def foretell(row: dict[str, Any]) -> list[str]:
    """Add the prediction to a row of a table, or why there is none; return what is assumed.

    Raises ValueError for a row that cannot be.
    """
    try:
        run, assumed = read_run(row)
    except UnknownAccelerator as wrong:
        row[NOT_FORETOLD] = str(wrong)
        return []
    answer = answer_of(run, assumed)
    error = error_of(answer, row)
    row |= answer.columns()
    if error is not None:
        row["error"] = f"{error:+.3f}"
    return assumed


def remarks(unknown: list[str], assumed: list[str], errors: list[float]) -> Iterator[str]:
    """Yield sentences about a table: the lines whose GPU is `unknown`, assumptions, and errors."""
    if unknown:
        yield (
            f"Not foretold, for their GPU is unknown: line {', '.join(unknown)}; the column"
            f' "{NOT_FORETOLD}" says what to give.'
        )
    if assumed:
        yield f"Assumed where a line says nothing: {'; '.join(assumed)}."
    if errors:
        words = f"median error of {len(errors)} lines: {median(errors):.1%}"
        yield f"{words}, worst {max(errors):.1%}"


def error_of(answer: Answer, row: dict[str, Any]) -> float | None:
    """Return predicted over measured, minus 1; None without a measurement.

    The row may have tokens per second or milliseconds. Raises ValueError for a measurement that is
    no positive number.
    """
    predicted = {
        "tokens_per_s_per_gpu": answer.tokens_per_s_per_gpu,
        "iteration time (ms)": 1000 * answer.step_s,
    }
    for column, value in predicted.items():
        if row.get(column):
            try:
                measured = float(row[column])
            except ValueError:
                measured = 0.0
            if not 0 < measured < float("inf"):
                raise ValueError(f'"{column}" is {row[column]}; a number above 0 was expected')
            return value / measured - 1
    return None


def show_scoreboard(folder_name: str | None) -> None:
    """Print the scoreboard; write its rows, page and picture into a folder if one is given."""
    from .. import scoreboard
    from ..figures import predictions_figure

    tables = scoreboard.scoreboard()
    print(f"Errors, median / nine in ten / worst:\n\n{scoreboard.overview(tables)}\n")
    if not folder_name:
        print(
            "An error above 1000% is one row: 32 KiB on four hosts, published as 6 ms, 14 times\n"
            "what its neighbours say (lesson 13).\n"
            "--out results writes all rows, a page and a picture."
        )
        return
    folder = files.writable_folder(folder_name)
    rows = [row for table in tables for row in table.rows]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    files.replace_file(folder / "predictions.json", f"[\n{lines}\n]\n".encode())
    files.replace_file(folder / "predictions.md", scoreboard.page(tables).encode())
    files.replace_file(folder / "predictions.png", predictions_figure(rows).png())
    print(f"{len(rows)} rows: {folder / 'predictions.json'}; page: {folder / 'predictions.md'}")
