"""The part of `%%ranks` that each rank runs: the text of one notebook cell."""

import ast
from typing import Any

import torch
import torch.distributed as dist

from ..devices import rank_device

PROVIDED = ("rank", "world_size", "dist", "torch", "device")

_globals: dict = {}  # the cells that run on this rank share these global names
_sent: dict = {}  # the values that the notebook sent last, by name


def compile_cell(source: str, filename: str) -> tuple:
    """Compile a cell to its statements and its last expression, which is None if there is none or
    ";" silences it.
    """
    tree = ast.parse(source, filename)
    expression = None
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr) and not source.rstrip().endswith(";"):
        tree.body.pop()
        expression = compile(ast.Expression(last.value), filename, "eval")
    return compile(tree, filename, "exec"), expression


def used_names(source: str) -> set:
    """Collect the names that a cell mentions."""
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def run_cell(source: str, filename: str, pull: list, /, **given: Any) -> dict:
    """Run a cell on this rank with the names in `given`; print the value of its last expression. On
    rank 0 return the values of the names in `pull`.

    On kept ranks, names that an earlier cell has assigned keep their values; the notebook sends all
    other names.
    """
    statements, expression = compile_cell(source, filename)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    provided = dict(zip(PROVIDED, (rank, world_size, dist, torch, rank_device()), strict=True))
    given = {"__name__": "__main__", **given, **provided}
    for name, value in given.items():
        was_sent = name in _sent and _globals.get(name) is _sent[name]
        if was_sent or name not in _globals:
            _globals[name] = _sent[name] = value
    exec(statements, _globals)
    value = eval(expression, _globals) if expression else None
    if value is not None:
        print(repr(value))
    if rank != 0:
        return {}
    return {name: on_cpu(_globals[name]) for name in pull if name in _globals}


def on_cpu(value: Any) -> Any:
    """A value as the notebook can use it: a tensor without its graph, in the processor's memory."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
