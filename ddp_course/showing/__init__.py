"""What the notebooks show: figures, sketches, widgets, and the source of the package itself."""

from importlib import import_module

from .source import diff, source  # noqa: F401 (or the module would hide the function)

_HOME = {
    "curves": "plots",
    "bars": "plots",
    "images": "plots",
    "panels": "plots",
    "timeline_figure": "plots",
    "compare_figure": "plots",
    "STAGE_COLOURS": "plots",
    "BUSY": "plots",
    "predict": "widgets",
    "progress": "widgets",
    "command": "shell",
    "stacks": "shell",
    "scaling_figure": "simulator_plots",
    "winners_figure": "simulator_plots",
    "predictions_figure": "simulator_plots",
}
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
