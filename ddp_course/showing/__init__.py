"""What the notebooks show: figures, sketches, widgets, and the source of the package itself."""

from importlib import import_module

from .source import diff, source  # noqa: F401 (or the module would hide the function)

_NAMES = {
    "plots": ("curves", "bars", "images", "timeline_figure", "compare_figure", "STAGE_COLOURS", "BUSY"),
    "widgets": ("predict", "progress"),
    "shell": ("command",),
    "simulator_plots": ("scaling_figure", "winners_figure", "predictions_figure"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = {"plots", "sketches", "widgets"}
__all__ = sorted([*_HOME, *_MODULES, "diff", "source"])


def __getattr__(name):
    """Import on first use: matplotlib and ipywidgets take a while to load."""
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return __all__
