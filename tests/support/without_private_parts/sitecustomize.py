"""Each process with this on its path lacks every private part of torch but those of messages."""

import pkgutil

found = pkgutil.resolve_name
NEEDED = ("DisableTorchFunctionSubclass", "_get_default_store", "tree_leaves")


def resolve_name(path):
    """Return what a path names; refuse it where it is torch's and not needed."""
    if path.startswith("torch") and not path.endswith(NEEDED):
        raise AttributeError(path)
    return found(path)


pkgutil.resolve_name = resolve_name
