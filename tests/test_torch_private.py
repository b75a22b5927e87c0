"""What torch does not promise stands in two modules, and does there what stages and exercises rely
on.
"""

import ast
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import ddp_course
from ddp_course import launch, torch_private
from manyranks import torch_inside

PACKAGE = Path(ddp_course.__file__).parent
HOMES = [Path(torch_private.__file__), Path(torch_inside.__file__)]
# Lesson 05 shows it.
TAUGHT = {("stage5_bucketed.py", "torch.autograd.Variable._execution_engine.queue_callback")}
# These belong to groups, options and storages.
ON_OBJECTS = {
    "_cdata",
    "_device_types",
    "_get_backend",
    "_timeout",
    "_world",
}
DOCUMENTED = ("torch._foreach_", "torch.ops.")


def private_uses(source):
    """The private parts of torch that a module's source names, each as dotted words."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {
                f"{node.module}.{alias.name}"
                for alias in node.names
                if "._" in f".{node.module}.{alias.name}"
            }
        elif isinstance(node, ast.Attribute):
            words = ast.unparse(node)
            ours = (
                words.split(".")[0] in ("torch", "dist", "distributed_c10d")
                and "._" in words
                and "__" not in words
            )
            if ours or (node.attr in ON_OBJECTS and not words.startswith("self.")):
                found.add(words)
    found = {words for words in found if not words.startswith(DOCUMENTED)}
    longest = set()
    for words in found:
        if not any(longer.startswith(f"{words}.") for longer in found):
            longest.add(words)
    return longest


def test_no_other_module_names_a_private_part_of_torch():
    uses = {
        (path.name, words)
        for path in PACKAGE.rglob("*.py")
        if path not in HOMES
        for words in private_uses(path.read_text(encoding="utf-8"))
    }
    assert uses == TAUGHT
    for path in HOMES:
        assert len(private_uses(path.read_text(encoding="utf-8"))) > 8


def names_given_by(path):
    """The names that other modules import from one of the two: functions, constants, and what it
    imports under a name of its own.
    """
    names = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets]
        elif isinstance(node, ast.ImportFrom):
            names += [alias.asname for alias in node.names if alias.asname]
    return names


def test_each_part_has_one_home():
    private, inside = map(names_given_by, HOMES)
    assert len(private) > 10 and len(inside) > 10
    assert not set(private) & set(inside)


def twin_of_the_default_group():
    """On a rank: are its ranks and timeout the group's, and do messages on one leave the other
    alone?
    """
    group = torch_private.default_group()
    twin = torch_private.group_like(group)
    mine = torch.ones(1)
    theirs = torch.full((1,), 10.0)
    waiting = dist.all_reduce(mine, group=group, async_op=True)
    dist.all_reduce(theirs, group=twin)
    waiting.wait()
    same = dist.get_process_group_ranks(twin) == dist.get_process_group_ranks(group)
    same_timeout = (
        torch_private.timeout_of(twin) == torch_private.timeout_of(group) > timedelta(seconds=1)
    )
    return twin is not group, same, same_timeout, mine.item(), theirs.item()


def test_a_twin_has_the_same_ranks_and_timeout_and_messages_of_its_own():
    assert launch(twin_of_the_default_group, world_size=2) == [(True, True, True, 2.0, 20.0)] * 2
