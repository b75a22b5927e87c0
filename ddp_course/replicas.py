"""Replicas: only what is whole on every rank can be broadcast and averaged.

A stage that leaves a part of a parameter on each rank gives that parameter a method
`refuse_average(name, group)`, which raises ValueError where the ranks of `group` have other parts.
"""

from typing import Any


def check_replicas(parameters: dict[str, Any], group: Any) -> None:
    """Raise ValueError if one of {name: parameter} has no average over the ranks of `group`."""
    for name, parameter in parameters.items():
        if hasattr(parameter, "refuse_average"):
            parameter.refuse_average(name, group)
