"""What an answer may import and name: looked up in its source, before anything of it runs.

The process in which an answer runs has the whole course in memory. So an answer imports only what computes, what its
notebook imports and what its task adds; and it names nothing that leads from an object to the process around it, or
that builds names at run time.
"""

import ast
from collections.abc import Iterator

MOST_SOURCE = 100_000
COMPUTES = frozenset({
    "__future__", "abc", "array", "bisect", "collections", "concurrent", "contextlib", "copy", "dataclasses",
    "decimal", "enum", "fractions", "functools", "gc", "heapq", "io", "itertools", "json", "math", "numbers",
    "numpy", "operator", "queue", "random", "re", "statistics", "string", "struct", "threading", "time", "torch",
    "typing", "warnings",
})  # fmt: skip
LEADS_OUT = frozenset({
    "ctypes", "ctypeslib", "_getframe", "currentframe", "f_back", "f_globals", "f_locals", "f_builtins", "tb_frame",
    "tb_next", "gi_frame", "cr_frame", "ag_frame", "__traceback__", "__closure__", "__code__", "__globals__",
    "__builtins__", "__subclasses__", "__bases__", "__mro__", "__base__", "__dict__", "__loader__", "__spec__",
    "__import__", "__getattribute__", "__reduce__", "__reduce_ex__", "__wrapped__", "__self__", "__func__",
    "settrace", "setprofile", "get_objects", "get_referrers", "get_referents", "attrgetter", "methodcaller",
    "_exit", "kill", "killpg", "abort", "fork", "system", "popen", "sys", "importlib", "import_module", "builtins",
    "bltns", "inspect", "runpy", "pkgutil", "subprocess", "linecache", "cpp_extension", "PackageImporter",
    "CompilationUnit", "get_type_hints", "ForwardRef", "runstring", "_exec_with_source", "pickle", "cloudpickle",
    "multiprocessing", "_observers", "ddp_course",
})  # fmt: skip
AROUND_THE_WIRE = frozenset({
    "tell", "observing", "counting", "_observers", "throttle", "TCPStore", "FileStore", "HashStore", "PrefixStore",
    "share_memory_", "shared_memory", "_functional_collectives", "allreduce", "allgather_into_tensor_coalesced",
    "_allgather_base", "alltoall", "alltoall_base", "recv_anysource", "distributed_c10d", "set_trace",
})  # fmt: skip
BUILDS_NAMES = frozenset({"eval", "exec", "compile", "globals", "locals", "vars"})
BY_NAME = frozenset({"getattr", "setattr", "delattr", "hasattr"})
FILES = frozenset({"open", "os", "pathlib", "tempfile", "shutil", "glob"})
READERS = frozenset({"load", "from_file", "fromfile", "memmap", "loadtxt", "genfromtxt", "load_library"})


def at_first_sight(source: str, allowed: frozenset[str] = frozenset()) -> str:
    """What is wrong with an answer before it runs, or "": not Python, too long, or out of bounds.

    `allowed` are dotted names that it may import, and names that it may use, besides those that only compute.
    """
    if len(source) > MOST_SOURCE:
        return f"the answer has {len(source):,} characters; at most {MOST_SOURCE:,} are read"
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        line = source.splitlines()[error.lineno - 1].strip() if error.lineno and source.splitlines() else ""
        magic = " (no magics or shell commands in an answer)" if line.startswith(("%", "!")) else ""
        return f"line {error.lineno} is not Python ({error.msg}): {line[:80]}{magic}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"the answer cannot be read as Python: {error}"
    return strange_import(tree, allowed) or strange_name(tree, allowed)


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a piece of Python imports; relative ones begin with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def strange_import(tree: ast.AST, allowed: frozenset[str]) -> str:
    """What an answer imports that it may not, in words."""
    for line, name in imports_of(tree):
        root, *rest = name.split(".")
        strange = out_of_bounds(set(rest), allowed) or set(rest) & (READERS - allowed)
        if name not in allowed and (strange or root not in COMPUTES | allowed):
            what = "the parts of the course that its notebook imports" if root == "ddp_course" else "what computes"
            return f"line {line} imports {name}: an answer to this task may import {what}, and no more"
    return ""


def strange_name(tree: ast.AST, allowed: frozenset[str]) -> str:
    """What an answer names that it may not, in words."""
    plain = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and written_out(node, allowed)}
    for node in ast.walk(tree):
        names = names_of(node)
        found = out_of_bounds(names, allowed)
        if isinstance(node, ast.Name) and id(node) not in plain:
            found |= names & (BUILDS_NAMES | BY_NAME)
        if isinstance(node, ast.Attribute):
            found |= (names & (READERS | AROUND_THE_WIRE)) - allowed
        if found:
            by_name = "; write the attribute's name out, as in x.name" if found & BY_NAME else ""
            line = getattr(node, "lineno", "?")
            return f"line {line}: the answer uses {min(found)}, which no answer to this task needs{by_name}"
    return ""


def out_of_bounds(names: set[str], allowed: frozenset[str]) -> set[str]:
    """Those of some names that no answer may use; modules also under the names that other modules give them."""
    return {name for name in names if {name, name.removeprefix("_")} & (LEADS_OUT | FILES) and name not in allowed}


def names_of(node: ast.AST) -> set[str]:
    """What one node names: a variable, an attribute, or the attributes of a pattern."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute):
        return {node.attr}
    return set(node.kwd_attrs) if isinstance(node, ast.MatchClass) else set()


def written_out(node: ast.AST, allowed: frozenset[str]) -> bool:
    """Whether a node is a call like getattr(x, "name"), with a name in plain sight that is not out of bounds."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME):
        return False
    name = node.args[1] if len(node.args) > 1 else None
    if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
        return False
    return not out_of_bounds({name.value}, allowed) and name.value not in READERS
