"""How a page without a kernel makes an explorer again: the call that made it, written as JSON into the notebook.

Functions and classes are written by name, "module:name", so only what a module defines can be written.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

MIME = "application/vnd.ddp-course+json"  # no notebook program shows this type; the course's web site does


def explorer(make: Callable) -> Callable:
    """Decorate a function that makes an explorer: its call is kept as the explorer's `recipe`, or None."""

    @wraps(make)
    def made(*arguments, **named):
        built = make(*arguments, **named)
        try:
            built.recipe = {"explorer": encoded(make), "arguments": encoded(arguments), "named": encoded(named)}
        except TypeError:
            built.recipe = None
        return built

    return made


def again(recipe: dict) -> Any:
    """The explorer that `recipe` describes, made anew."""
    return decoded(recipe["explorer"])(*decoded(recipe["arguments"]), **decoded(recipe["named"]))


def encoded(thing: Any) -> Any:
    """`thing` as JSON has it; TypeError for what no name leads to, such as a cell's own function."""
    if thing is None or isinstance(thing, (bool, int, float, str)):
        return thing
    if isinstance(thing, dict):
        return {"pairs": [[encoded(key), encoded(value)] for key, value in thing.items()]}
    if isinstance(thing, (list, tuple)):
        items = [encoded(item) for item in thing]
        return {"of": _name(type(thing)), "items": items} if hasattr(thing, "_fields") else items
    return {"name": _name(thing)}


def decoded(thing: Any) -> Any:
    """What `encoded` was given; plain lists come back as tuples."""
    if isinstance(thing, list):
        return tuple(decoded(item) for item in thing)
    if not isinstance(thing, dict):
        return thing
    if "pairs" in thing:
        return {decoded(key): decoded(value) for key, value in thing["pairs"]}
    if "of" in thing:
        return _thing_called(thing["of"])(*decoded(thing["items"]))
    return _thing_called(thing["name"])


def _name(thing):
    name = f"{getattr(thing, '__module__', None)}:{getattr(thing, '__qualname__', '<')}"
    if "<" in name or name.startswith("__main__:"):
        raise TypeError(f"{thing!r} has no name to find it by")
    return name


def _thing_called(name):
    module, _, path = name.partition(":")
    if module.split(".")[0] != "ddp_course":
        raise ValueError(f'a recipe names only what the course defines, not "{name}"')
    thing = import_module(module)
    for part in path.split("."):
        thing = getattr(thing, part)
    return thing
