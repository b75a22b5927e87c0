"""What torch does not promise stands in two modules, and does what others rely on.

The others are stages and exercises.
"""

import ast
import re
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import ddp_course
from ddp_course import launch
from ddp_course.base import torch_private
from manyranks import torch_inside

ROOT = Path(ddp_course.__file__).parents[1]
HOMES = [Path(torch_private.__file__), Path(torch_inside.__file__)]
FOLDERS = (
    "manyranks",
    "ddp_course",
    "ddp_exercises",
    "ddp_predictions",
    "authoring",
    "exercises",
    "benchmarks",
)
ELSEWHERE = {
    # Lessons show these to learners.
    ("06_complete_ddp.py", "torch._dynamo.reset"),
    ("06_complete_ddp.py", "torch.nn.parallel.distributed._MixedPrecision"),
    ("11_when_things_fail.py", "torch._C._distributed_c10d._dump_fr_trace"),
    ("11_when_things_fail.py", "torch.testing._internal.distributed.fake_pg.FakeStore"),
    # Known answers use these, as learners do.
    ("05.py", "torch.autograd.Variable._execution_engine"),
    ("05.py", "torch.distributed._compute_bucket_assignment_by_size"),
    # These are loaded before they are needed; where there is none, ranks go without.
    ("agent.py", "torch._dynamo"),
    ("server.py", "torch._dynamo"),
    ("server_handle.py", "torch._dynamo"),
}
# These belong to groups, options and storages.
ON_OBJECTS = {
    "_cdata",
    "_device_types",
    "_get_backend",
    "_timeout",
    "_world",
}
DOCUMENTED = ("torch._foreach_", "torch.ops.")
OF_TORCH = ("torch", "dist", "distributed_c10d")


def private_uses(source):
    """Return dotted names of all private parts of torch that a source uses.

    They may be in its code or in a text. The methods that its classes define for torch to call by a
    private name count, too.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch[.:][\w.:]+", str(node.value)):
            found.add(node.value.replace(":", "."))
        elif isinstance(node, ast.Attribute):
            words = ast.unparse(node)
            on_object = node.attr in ON_OBJECTS and not words.startswith("self.")
            if words.split(".")[0] in OF_TORCH or on_object:
                found.add(words)
        elif isinstance(node, ast.ClassDef):
            found |= methods_for_torch(node)
    found = {words for words in found if re.search(r"\._[^_]", words)}
    found = {words for words in found if not words.startswith(DOCUMENTED)}
    longest = set()
    for words in found:
        if not any(longer.startswith(f"{words}.") for longer in found):
            longest.add(words)
    return longest


def methods_for_torch(node):
    """Return the private methods of a class derived from one of torch's that torch's has, too."""
    found = set()
    for base in map(ast.unparse, node.bases):
        if not base.startswith(("torch.", "dist.", "torch_inside.")):
            continue
        first, *words = base.split(".")
        parent = {"torch": torch, "dist": dist, "torch_inside": torch_inside}.get(first)
        for word in words:
            parent = getattr(parent, word, None)
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and hasattr(parent, method.name):
                found.add(f"{base}.{method.name}")
    return found


def test_no_other_module_names_a_private_part_of_torch():
    uses = {
        (path.name, words)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if path not in HOMES
        for words in private_uses(path.read_text(encoding="utf-8"))
    }
    assert uses == ELSEWHERE
    for path in HOMES:
        assert len(private_uses(path.read_text(encoding="utf-8"))) > 8


def test_the_search_finds_texts_and_methods_too():
    source = """
class Work(dist.Work):
    def _source_rank(self): ...
    def wait(self): ...
class Group(torch_inside.InPlaceOfGloo):
    def _get_backend(self, device): ...
late = part("torch.optim:_Nowhere", "the moon")
"""
    assert private_uses(source) == {
        "dist.Work._source_rank",
        "torch_inside.InPlaceOfGloo._get_backend",
        "torch.optim._Nowhere",
    }


def names_given_by(path):
    """Return the names that other modules import from one of the two.

    They are functions, constants, and what it imports under a name of its own.
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
    assert len(private) > 10
    assert len(inside) > 10
    assert not set(private) & set(inside)


def twin_of_the_default_group():
    """Return, on a rank, whether its ranks and timeout are the group's, and messages stay apart.

    Messages on one must leave the other alone.
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


def test_torch_compile_leaves_an_uncompiled_function_as_it_is():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph.code)
        return graph.forward

    @torch_private.uncompiled
    def left(numbers):
        return numbers.sinh()

    def function(numbers):
        return left(numbers.cos()).tan()

    numbers = torch.ones(3)
    result = torch.compile(function, backend=backend)(numbers)

    assert torch.equal(result, numbers.cos().sinh().tan())
    code = " ".join(compiled)
    assert "cos" in code
    assert "tan" in code
    assert "sinh" not in code
