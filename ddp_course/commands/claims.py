"""`ddp-course claims`: a table of claims, verdicts and the numbers that decided them."""

import argparse
import json
import textwrap
import time
from pathlib import Path
from typing import Any

from ..measuring.claims import all_claims
from ..measuring.claims.claim import Finding
from ..running.files import replace_file


def add_parser(subparsers: Any) -> None:
    """Add `claims` to the command line."""
    parser = subparsers.add_parser("claims", help="test what people say about distributed training")
    parser.add_argument("numbers", nargs="*", type=int, metavar="N", help="only these claims (default: all)")
    parser.add_argument("--json", metavar="FILE", help="write the findings to a file as well")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Test the chosen claims one after the other and print each as it is decided."""
    claims = all_claims()
    if unknown := [number for number in args.numbers if number not in claims]:
        raise ValueError(f"there is no claim {unknown[0]}; choose 1 to {max(claims)}")
    findings, start = [], time.perf_counter()
    print(f"{'claim':<72} verdict, and the numbers that decided it")
    for number in args.numbers or claims:
        findings.append(claims[number].test())
        print(row(findings[-1]), flush=True)
    print(f"{len(findings)} claims tested in {time.perf_counter() - start:.0f} s")
    if args.json:
        replace_file(Path(args.json), (json.dumps([record(finding) for finding in findings], indent=1) + "\n").encode())
    return 0


def row(finding: Finding) -> str:
    """One claim as lines of the table, its text on the left."""
    left = textwrap.wrap(f"{finding.claim.number:>2} {finding.claim.text}", 70, subsequent_indent="   ")
    right = textwrap.wrap(f"{finding.verdict} ({finding.claim.kind})", 78) + textwrap.wrap(
        finding.numbers, 78, subsequent_indent="  "
    )
    left += [""] * (len(right) - len(left))
    right += [""] * (len(left) - len(right))
    return "\n".join(f"{one:<72} {other}".rstrip() for one, other in zip(left, right, strict=True)) + "\n"


def record(finding: Finding) -> dict[str, Any]:
    """One finding, ready for JSON."""
    return {
        "claim": finding.claim.number,
        "text": finding.claim.text,
        "verdict": finding.verdict,
        "kind": finding.claim.kind,
        "numbers": {name: outcome.number for name, outcome in finding.outcomes.items()},
        "why": finding.claim.why,
    }
