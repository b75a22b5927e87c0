"""`ddp-course claims`: what people say about distributed training, with the verdict, and the lesson
that decides.
"""

import argparse

from tabulate import tabulate

from ..measuring import claims


def main(args: argparse.Namespace) -> None:
    """Print the table."""
    # A lesson's name begins with its number, in two digits.
    rows = [
        [claim.number, claim.text, f"{claim.verdict} ({claim.kind})", claim.lesson[:2]]
        for claim in claims.decided()
    ]
    print(tabulate(rows, ["", "claim", "verdict", "lesson"], maxcolwidths=[None, 60, 40, None]))
