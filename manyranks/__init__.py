"""Run, time and check `torch.distributed` programs of K ranks on the machine in front of you.

    launch(fn, world_size=4)                 one result per rank; an error names rank and line
    launch(fn, device=Device("2GFLOP/s"), link=Link("100Mbit"))
                                             real messages and sums in virtual time
    every_order(fn)                          one run says whether every order of messages is right
    audit(source)                            the usual mistakes of a training script
    watch_finite(model)                      a NaN is named before an average spreads it
    join()                                   the same code under torchrun and Slurm

README.md beside this file has examples, and says what the library cannot do.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# People and checkers see the types here; at run time a name is imported on its first use.
if TYPE_CHECKING:
    from .auditing import audit as audit
    from .clocks import now as now
    from .devices import Device as Device
    from .devices import rank_device as rank_device
    from .errors import DeadlockError as DeadlockError
    from .errors import LaunchError as LaunchError
    from .errors import LaunchTimeout as LaunchTimeout
    from .errors import ManyranksError as ManyranksError
    from .errors import RankError as RankError
    from .finite import watch_finite as watch_finite
    from .joining.join import join as join
    from .launching.launch import launch as launch
    from .links import Link as Link
    from .orders.every import every_order as every_order
    from .orders.verdict import Verdict as Verdict

_HOMES = {
    "Device": "devices",
    "DeadlockError": "errors",
    "LaunchError": "errors",
    "LaunchTimeout": "errors",
    "Link": "links",
    "ManyranksError": "errors",
    "RankError": "errors",
    "Verdict": "orders.verdict",
    "audit": "auditing",
    "every_order": "orders.every",
    "join": "joining.join",
    "launch": "launching.launch",
    "now": "clocks",
    "rank_device": "devices",
    "watch_finite": "finite",
}
__all__ = [*_HOMES, "load_ipython_extension"]


def load_ipython_extension(ipython: Any) -> None:
    """Register the magic `%%ranks`, when `%load_ext manyranks` asks for it; this needs IPython."""
    from .launching.magic import RanksMagic

    ipython.register_magics(RanksMagic)


if not TYPE_CHECKING:  # Otherwise a checker would accept any name.

    def __getattr__(name):
        """Import on first use: a rank loads only what it needs."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__():
    return __all__
