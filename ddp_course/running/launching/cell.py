"""The part of `%%ranks` that each rank runs: the text of one notebook cell."""

import ast
from typing import Any

import torch
import torch.distributed as dist

from ..devices import rank_device

PROVIDED = ("rank", "world_size", "dist", "torch", "device")

_names: dict = {}  # the cells that run on this rank share these global names
_sent: dict = {}  # this maps each name to the value that the notebook sent last


def compile_cell(source: str, filename: str) -> tuple:
    """Compile a cell to its statements and its last expression, which is None if there is none or
    ";" silences it.
    """
    tree = ast.parse(source, filename)
    last = None
    end = tree.body[-1] if tree.body else None
    if isinstance(end, ast.Expr) and not source.rstrip().endswith(";"):
        tree.body.pop()
        last = compile(ast.Expression(end.value), filename, "eval")
    return compile(tree, filename, "exec"), last


def used_names(source: str) -> set:
    """Collect the names that a cell mentions."""
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def run_cell(source: str, filename: str, pull: list, /, **given: Any) -> dict:
    """Run a cell on this rank with the names in `given`; print its last expression; rank 0 returns
    the names `pull`.

    On kept ranks, names that an earlier cell has assigned keep their values; the notebook sends all
    other names.
    """
    statements, last = compile_cell(source, filename)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    provided = dict(zip(PROVIDED, (rank, world_size, dist, torch, rank_device()), strict=True))
    given = {"__name__": "__main__", **given, **provided}
    assigned_here = {name for name, value in _names.items() if value is not _sent.get(name, _sent)}
    _sent.update({name: value for name, value in given.items() if name not in assigned_here})
    _names.update({name: value for name, value in _sent.items() if name not in assigned_here})
    exec(statements, _names)
    value = eval(last, _names) if last else None
    if value is not None:
        print(repr(value))
    if rank != 0:
        return {}
    return {name: on_cpu(_names[name]) for name in pull if name in _names}


def on_cpu(value: Any) -> Any:
    """A value as the notebook can use it: a tensor without its graph, in the processor's memory."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
