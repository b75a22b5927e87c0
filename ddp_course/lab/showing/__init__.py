"""Shows things in notebooks: figures, sketches, widgets, and the source of the package itself."""

from importlib import import_module

# This is imported at once: by `__getattr__`, `showing.source` would be the module.
from .source import diff, source  # noqa: F401

_HOMES = {
    "curves": "plots",
    "bars": "plots",
    "images": "plots",
    "timeline_figure": "plots",
    "compare_figure": "plots",
    "STAGE_COLOURS": "plots",
    "sketches": "sketches",
    "widgets": "widgets",
    "predict": "widgets",
    "first_ring": "first_task",
    "questions": "opening",
    "command": "shell",
    "progress": "shell",
    "trace": "trace_plot",
    "own_trace": "trace_plot",
    "verdict": "order_plot",
    "scaling_figure": "simulator_plots",
}
__all__ = sorted([*_HOMES, "diff", "source"])


def __getattr__(name):
    """Import on first use: matplotlib and ipywidgets take a while to load."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{_HOMES[name]}", __name__)
    # If the module has no attribute of this name, the module itself is meant.
    return getattr(module, name, module)


def __dir__():
    return __all__
