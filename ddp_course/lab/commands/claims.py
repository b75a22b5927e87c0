"""`ddp-course claims`: a table of what people say, the verdicts, and the lessons that decide."""

import argparse

from tabulate import tabulate

from ..measuring import claims


def main(args: argparse.Namespace) -> None:
    """Print the table of claims."""
    # A lesson's name begins with its number, in two digits.
    rows = [
        [claim.number, claim.text, f"{claim.verdict} ({claim.kind})", claim.lesson[:2]]
        for claim in claims.decided()
    ]
    print(tabulate(rows, ["", "claim", "verdict", "lesson"], maxcolwidths=[None, 60, 40, None]))
