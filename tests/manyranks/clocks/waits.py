"""Find by its name and its parameters all in the standard library and in torch that lets a thread
wait, or stop another one.
"""

import importlib
import inspect
import re

MODULES = (
    "_thread",
    "asyncio",
    "concurrent.futures",
    "fcntl",
    "multiprocessing.connection",
    "multiprocessing.managers",
    "multiprocessing.pool",
    "multiprocessing.process",
    "multiprocessing.queues",
    "multiprocessing.synchronize",
    "os",
    "queue",
    "sched",
    "select",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch.distributed",
    "torch.distributed.rpc",
    "torch.futures",
    "torch.jit",
    "torch.multiprocessing",
    "torch.utils.data",
)
SAYS_SO = re.compile(
    "wait|sleep|join|acquire|select|poll|barrier|recv|accept|pause|communicate|lockf|flock|"
    "result$|^get$|^put$|^run$|^start$|^notify|^set$|^fork"
)
PARAMETERS = {"timeout", "block", "blocking", "timeout_s", "async_op"}


def can_wait(name, function):
    """Return whether a function's name or parameters say that a thread may wait in it."""
    if SAYS_SO.search(name):
        return True
    try:
        return bool(PARAMETERS & set(inspect.signature(function).parameters))
    except (TypeError, ValueError):
        return False


def public(module):
    """Yield the public names of a module, and what they stand for, if that is from the same
    package.
    """
    names = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
    package = module.__name__.split(".")[0]
    for name in names:
        value = getattr(module, name, None)
        home = getattr(value, "__module__", None) or package
        # A package's half in C has an underscore, as `_queue`; that of `os` is called posix.
        if callable(value) and home.split(".")[0].lstrip("_") in (package.lstrip("_"), "posix"):
            yield name, value


def waits_of(name):
    """Return the full names of all in a module by which a thread may wait."""
    found = set()
    for own_name, value in public(importlib.import_module(name)):
        if inspect.isclass(value):
            for method, function in vars(value).items():
                if method[0] != "_" and callable(function) and can_wait(method, function):
                    found.add(f"{name}.{own_name}.{method}")
        elif can_wait(own_name, value):
            found.add(f"{name}.{own_name}")
    return found
