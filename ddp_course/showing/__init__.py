"""What the notebooks show: figures, sketches, widgets, and the source of the package itself."""

from importlib import import_module

from .source import diff, source  # noqa: F401 (or the module would hide the function)

_NAMES = {
    "plots": (
        "plots",
        "curves",
        "bars",
        "images",
        "timeline_figure",
        "compare_figure",
        "STAGE_COLOURS",
    ),
    "sketches": ("sketches",),
    "widgets": ("widgets", "predict"),
    "shell": ("command", "progress"),
    "trace_plot": ("trace", "own_trace"),
    "simulator_plots": ("scaling_figure",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted([*_HOME, "diff", "source"])


def __getattr__(name):
    """Import on first use: matplotlib and ipywidgets take a while to load."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{_HOME[name]}", __name__)
    # Where the module lacks the name, the name means the module.
    return getattr(module, name, module)


def __dir__():
    return __all__
