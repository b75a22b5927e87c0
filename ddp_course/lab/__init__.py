"""What notebooks show and measure: comparisons, timelines, closed forms, figures, commands.

compare      every stage trains on the same batches, and is compared with the others and theory
show         figures, sliders, guesses, and the package's own source
theory       closed forms of collectives        simulate   a step, layer by layer
timeline     what each rank did, and when       timing     seconds of a function on ranks
claims       what people say, put to the test   facts      what others measured
traces       profiles of real GPUs              on_your_gpus   the stages on real devices
"""

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from .interrupts import tell_in_one_line

# People and checkers see the types here; at run time a name is imported on its first use.
if TYPE_CHECKING:
    from . import showing

    show = showing
    from .commands import compare as compare
    from .commands import doctor as doctor
    from .measuring import claims as claims
    from .measuring import facts as facts
    from .measuring import simulate as simulate
    from .measuring import theory as theory
    from .measuring import timeline as timeline
    from .measuring import timing as timing
    from .measuring import traces as traces
    from .measuring.on_your_gpus import on_your_gpus as on_your_gpus

_HOMES = {
    "claims": "measuring.claims",
    "compare": "commands.compare",
    "doctor": "commands.doctor",
    "facts": "measuring.facts",
    "on_your_gpus": "measuring.on_your_gpus:on_your_gpus",
    "show": "showing",
    "simulate": "measuring.simulate",
    "theory": "measuring.theory",
    "timeline": "measuring.timeline",
    "timing": "measuring.timing",
    "traces": "measuring.traces",
}
__all__ = list(_HOMES)

tell_in_one_line()

if not TYPE_CHECKING:  # Otherwise a checker would accept any name.

    def __getattr__(name):
        """Import on first use: matplotlib and scikit-learn take seconds."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return resolve_name(f"{__name__}.{_HOMES[name]}")


def __dir__():
    return __all__
