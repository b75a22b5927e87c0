"""Refuses models whose replicas have no average: only what is whole on every rank has one.

A stage that leaves a part of a parameter on each rank gives that parameter, or its layer, a method
`refuse_average(name, group)`, which raises ValueError where the ranks of `group` have other parts.
"""

from typing import Any


def check_replicas(by_name: dict[str, Any], group: Any) -> None:
    """Raise ValueError if a parameter or layer has no average over the ranks of `group`."""
    for name, each in by_name.items():
        if hasattr(each, "refuse_average"):
            each.refuse_average(name, group)
