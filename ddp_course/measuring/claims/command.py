"""`ddp-course claims`: a table of claims, verdicts and the numbers that decided them."""

import json
import textwrap
import time
from pathlib import Path

from . import all_claims


def main(args):
    """Test the chosen claims one after the other and print each as it is decided."""
    claims = all_claims()
    unknown = [number for number in args.numbers if number not in claims]
    if unknown:
        raise ValueError(f"there is no claim {unknown[0]}; choose 1 to {max(claims)}")
    findings, start = [], time.perf_counter()
    print(f"{'claim':<72} verdict, and the numbers that decided it")
    for number in args.numbers or claims:
        findings.append(claims[number].test())
        print(row(findings[-1]), flush=True)
    print(f"{len(findings)} claims tested in {time.perf_counter() - start:.0f} s")
    if args.json:
        from ...running.files import replace_file

        replace_file(Path(args.json), (json.dumps([record(finding) for finding in findings], indent=1) + "\n").encode())
    return 0


def row(finding):
    """One claim as lines of the table, its text on the left."""
    left = textwrap.wrap(f"{finding.claim.number:>2} {finding.claim.text}", 70, subsequent_indent="   ")
    right = textwrap.wrap(finding.verdict, 78) + textwrap.wrap(finding.numbers, 78, subsequent_indent="  ")
    left += [""] * (len(right) - len(left))
    right += [""] * (len(left) - len(right))
    return "\n".join(f"{one:<72} {other}".rstrip() for one, other in zip(left, right, strict=True)) + "\n"


def record(finding):
    """One finding, ready for JSON."""
    return {
        "claim": finding.claim.number,
        "text": finding.claim.text,
        "verdict": finding.verdict,
        "numbers": {name: outcome.number for name, outcome in finding.outcomes.items()},
        "why": finding.claim.why,
    }
