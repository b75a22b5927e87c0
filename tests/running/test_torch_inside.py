"""What torch does not promise stands in one module, and does there what the rest of the package
relies on.
"""

import ast
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import ddp_course
from ddp_course import launch
from ddp_course.running import torch_inside

PACKAGE = Path(ddp_course.__file__).parent
INSIDE = Path(torch_inside.__file__)
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
        if path != INSIDE
        for words in private_uses(path.read_text(encoding="utf-8"))
    }
    assert uses == TAUGHT
    assert len(private_uses(INSIDE.read_text(encoding="utf-8"))) > 10


def test_a_backward_pass_has_a_number_and_calls_back_at_its_end():
    seen = []
    weight = torch.ones(3, requires_grad=True)

    def note(gradient):
        seen.append(torch_inside.backward_pass())
        torch_inside.after_backward(lambda: seen.append(weight.grad is not None))

    doubled = weight * 2
    doubled.register_hook(note)
    assert torch_inside.backward_pass() == -1
    doubled.sum().backward()
    assert seen[0] >= 0 and seen[1:] == [True]
    (weight * 2).sum().backward()
    assert seen[1:] == [True]


def twin_of_the_default_group():
    """On a rank: are its ranks and timeout the group's, and do messages on one leave the other
    alone?
    """
    group = torch_inside.default_group()
    twin = torch_inside.group_like(group)
    mine = torch.ones(1)
    theirs = torch.full((1,), 10.0)
    waiting = dist.all_reduce(mine, group=group, async_op=True)
    dist.all_reduce(theirs, group=twin)
    waiting.wait()
    same = dist.get_process_group_ranks(twin) == dist.get_process_group_ranks(group)
    same_timeout = (
        torch_inside.timeout_of(twin) == torch_inside.timeout_of(group) > timedelta(seconds=1)
    )
    return twin is not group, same, same_timeout, mine.item(), theirs.item()


def test_a_twin_has_the_same_ranks_and_timeout_and_messages_of_its_own():
    assert launch(twin_of_the_default_group, world_size=2) == [(True, True, True, 2.0, 20.0)] * 2
