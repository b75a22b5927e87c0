"""The part of `%%ranks` that each rank runs: the text of one notebook cell."""

import ast
from typing import Any

import torch
import torch.distributed as dist

from ..devices import rank_device

PROVIDED = ("rank", "world_size", "dist", "torch", "device")


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
    """
    statements, last = compile_cell(source, filename)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    provided = dict(zip(PROVIDED, (rank, world_size, dist, torch, rank_device()), strict=True))
    names = {"__name__": "__main__", **given, **provided}
    exec(statements, names)
    value = eval(last, names) if last else None
    if value is not None:
        print(repr(value))
    if rank != 0:
        return {}
    return {name: on_cpu(names[name]) for name in pull if name in names}


def on_cpu(value: Any) -> Any:
    """A value as the notebook can use it: a tensor without its graph, in the processor's memory."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
