"""The part of `%%ranks` that each rank runs: the text of one notebook cell."""

import ast
from typing import Any

import torch
import torch.distributed as dist

from ..devices import rank_device

PROVIDED = ("rank", "world_size", "dist", "torch", "device")


def compile_cell(source: str, filename: str) -> tuple:
    """Compile a cell to its statements and its last expression.

    The expression is None if the cell ends with no expression, or with ";".
    """
    tree = ast.parse(source, filename)
    expression = None
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr) and not source.rstrip().endswith(";"):
        tree.body.pop()
        expression = compile(ast.Expression(last.value), filename, "eval")
    return compile(tree, filename, "exec"), expression


def used_names(source: str) -> set:
    """Return the names that a cell mentions."""
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def run_cell(source: str, filename: str, pull: list, /, **given: Any) -> dict:
    """Run a cell on this rank with the names in `given`; print the value of its last expression.

    Return the values of the names in `pull` on rank 0, and nothing elsewhere.
    """
    statements, expression = compile_cell(source, filename)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    provided = dict(zip(PROVIDED, (rank, world_size, dist, torch, rank_device()), strict=True))
    names = {"__name__": "__main__", **given, **provided}
    exec(statements, names)
    value = eval(expression, names) if expression else None
    if value is not None:
        print(repr(value))
    if rank != 0:
        return {}
    return {name: on_cpu(names[name]) for name in pull if name in names}


def on_cpu(value: Any) -> Any:
    """Return a value that the notebook can use: a tensor is copied to the CPU without its graph."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
