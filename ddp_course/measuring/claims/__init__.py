"""Sentences that people say about distributed training, each put to the test.

    claim           a claim, its conditions, and how outcomes become a verdict
    averaging       what averaging does
    communication   time and traffic
    running         how it all runs

Every module here with a list CLAIMS is read, so a new claim is an entry in one of these lists. `claims.test(4)` runs
the experiments of claim 4, `claims.test(7, 13)` those of two; `ddp-course claims` runs them all.
"""

from importlib import import_module
from pkgutil import iter_modules

from .claim import Claim, Finding, Outcome, Table, verdict_on

__all__ = ["Claim", "Finding", "Outcome", "all_claims", "test", "verdict_on"]


def all_claims() -> dict[int, Claim]:
    """All claims by number."""
    modules = [import_module(f".{module.name}", __name__) for module in iter_modules(__path__)]
    found = sorted((c for m in modules for c in getattr(m, "CLAIMS", [])), key=lambda claim: claim.number)
    return {claim.number: claim for claim in found}


def test(number: int, *more: int, only: list[str] | None = None) -> Finding | Table:
    """Run the experiments of claim `number`, all or those named in `only`; a `Finding`, or a `Table` of several."""
    claims = all_claims()
    for each in (number, *more):
        if each not in claims:
            raise ValueError(f"there is no claim {each}; choose 1 to {max(claims)}")
    findings = [claims[each].test(only) for each in (number, *more)]
    return Table(findings) if more else findings[0]


def decide(number: int, text: str, kind: str, outcomes: dict[str, bool], why: str) -> None:
    """Print a claim, the verdict that follows from its outcome under each condition, and why."""
    verdict = verdict_on({name: Outcome(holds, "") for name, holds in outcomes.items()})
    print(f"“{text}”\nClaim {number} ({kind}): {verdict}\n{why}")
