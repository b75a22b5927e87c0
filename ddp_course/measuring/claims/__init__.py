"""Twenty sentences that people say about distributed training, each put to the test.

    claim           a claim, its conditions, and how outcomes become a verdict
    averaging       what averaging does: 1, 7, 14, 15, 16, 20
    communication   time and traffic: 2, 3, 4, 9, 11, 17, 19
    running         how it all runs: 5, 6, 8, 10, 12, 13, 18

`claims.test(4)` runs the experiments of claim 4; `ddp-course claims` runs them all.
"""

from importlib import import_module

from .claim import Claim, Finding, Outcome, judge

__all__ = ["Claim", "Finding", "Outcome", "add_parser", "all_claims", "judge", "test"]


def all_claims():
    """All claims by number."""
    modules = [import_module(f".{name}", __name__) for name in ("averaging", "communication", "running")]
    return {claim.number: claim for claim in sorted((c for m in modules for c in m.CLAIMS), key=lambda c: c.number)}


def test(number, only=None):
    """Run the experiments of claim `number`, under its conditions or those named in `only`; return a `Finding`."""
    claims = all_claims()
    if number not in claims:
        raise ValueError(f"there is no claim {number}; choose 1 to {max(claims)}")
    return claims[number].test(only)


def add_parser(subparsers):
    """Add `claims` to the command line."""
    from .command import main

    parser = subparsers.add_parser("claims", help="test what people say about distributed training")
    parser.add_argument("numbers", nargs="*", type=int, metavar="N", help="only these claims (default: all)")
    parser.add_argument("--json", metavar="FILE", help="write the findings to a file as well")
    parser.set_defaults(run=main)
