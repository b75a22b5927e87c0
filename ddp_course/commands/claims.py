"""`ddp-course claims`: what people say about distributed training, with the verdict, and the lesson that decides."""

import argparse
from typing import Any

from tabulate import tabulate

from ..measuring import claims


def add_parser(subparsers: Any) -> None:
    """Add `claims` to the command line."""
    parser = subparsers.add_parser("claims", help="the claims that the lessons put to the test, with their verdicts")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table; returns 0."""
    rows = [
        [claim.number, claim.text, f"{claim.verdict} ({claim.kind})", claim.lesson[:2]] for claim in claims.decided()
    ]
    print(tabulate(rows, ["", "claim", "verdict", "lesson"], maxcolwidths=[None, 60, 40, None]))
    return 0
