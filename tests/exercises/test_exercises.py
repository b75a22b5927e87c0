"""Every exercise: what its checks need, what a check cell prints, and what is committed."""

import json
import math
import re
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name

import nbformat
import pytest
import torch
from answers import EXERCISES, ROOT, edited, of_kind, tried, verdict_on

from ddp_course import wire
from ddp_exercises import CORRECT, check, evidence
from ddp_exercises.attempt import COLLECTIVES, Attempt, Evidence, refusing
from ddp_exercises.diagnosis import Value, relation, same, verdict
from ddp_exercises.errors import Wrong
from ddp_exercises.evidence import explain, gather, solution_attempt
from ddp_exercises.grading.answers import load_exercises
from ddp_exercises.tasks import cells_with, find, known_wrong, of_exercise, solution
from manyranks.errors import Awaited, DeadlockError, Failure, Wait
from manyranks.launching import local

TASKS = [task for exercise in EXERCISES for task in of_exercise(exercise)]


def draw(number, seed):
    """Return the inputs of a task."""
    return find(number).inputs(seed)


def test_inputs_differ_by_seed_and_by_rank():
    values = draw("4.2", 1)["values"]
    again = draw("4.2", 1)["values"]
    other = draw("4.2", 2)["values"]
    assert all(
        a.equal(b)
        for one, two in zip(values, again, strict=True)
        for a, b in zip(one, two, strict=True)
    )
    assert not values[0][0].equal(other[0][0])
    assert not values[0][0].equal(values[1][0])
    assert not values[0][0].eq(values[0][0][0]).all()


def test_every_forbidden_function_is_there():
    assert all(callable(resolve_name(name)) for task in TASKS for name in task.forbidden)


TENSOR = torch.ones(2, dtype=torch.int64)
REFUSED = [
    "answer = dist.all_reduce",
    "def answer(t):\n    if t is not None:\n        dist.all_reduce(t)",
    "def answer(t):\n    import torch.distributed as d\n    d.all_reduce(t)",
    "def answer(t):\n    import torch.distributed\n    torch.distributed.all_reduce(t)",
    "def answer(t):\n    from torch.distributed import all_reduce as a\n    a(t)",
    (
        "from torch.distributed import all_reduce\ndef answer(t):\n    return [all_reduce(one) for"
        " one in t]"
    ),
    "def helper(t):\n    dist.all_reduce(t)\nanswer = lambda t: helper(t)",
    "class answer:\n    def step(self, t):\n        dist.all_reduce(t)",
]
FREE = [
    "def answer(t):\n    return t.gather(0, t), dist.get_rank()",
    (
        "def all_reduce(t):\n    return t\ndef answer(t):\n    'Like dist.all_reduce.'\n    return"
        " all_reduce(t)"
    ),
    "def answer(t):\n    reduce = t.sum\n    return reduce(), wire.send(t, 1)",
    "def answer(t):\n    return t\ndef compare(t):\n    dist.all_reduce(t)",
]


@pytest.mark.parametrize("text", REFUSED + FREE)
def test_what_is_forbidden_is_refused_however_it_is_named_and_nothing_else(text):
    names = {"dist": torch.distributed, "wire": wire}
    exec(text, names)
    answer = names["answer"]
    call = partial(answer.step, None) if isinstance(answer, type) else answer
    ends = suppress(ValueError)
    if text in REFUSED:
        ends = pytest.raises(Wrong, match="all_reduce: write it")
    with ends, refusing(COLLECTIVES):
        call(TENSOR)


@pytest.mark.parametrize("ours", [wire, evidence, local], ids=lambda ours: ours.__name__)
def test_a_line_of_our_own_packages_is_none_of_the_learners(ours):
    traceback = (
        'File "cell", line 3, in ring\n    wire.recv(chunk, left)\n'
        f'File "{ours.__file__}", line 67, in wait\n    work.wait()'
    )
    frame = evidence.own_frame(traceback, find("4.2"))
    assert (frame.line, frame.text) == ("3", "wire.recv(chunk, left)")


SENDS = Wait(0, Awaited("send", (1,)), 0.0, "cell", 8, "wire.send(t, 1)")
BARRIER = Awaited("collective", (0, 1, 2), "barrier")
IN_BARRIER = Wait(1, BARRIER, 0.0, "stalls.py", 33, "line = …", in_program=False)
BOTH_SEND = "wire.exchange sends and receives at once"


def test_a_deadlock_is_told_with_each_ranks_line():
    failures = [Failure(1, "DeadlockError")]
    said = explain(DeadlockError("", [SENDS, IN_BARRIER], [2], failures), find("4.2"))
    assert said.startswith(
        "the ranks wait for each other for ever: rank 0 waits to send to rank 1 (line 8); "
        "rank 1 has ended; rank 2 has returned; does every rank, in every step, send to its right"
    )
    assert not said.endswith(BOTH_SEND)


def test_a_rank_that_waits_in_a_check_below_its_answer_has_not_ended():
    in_check = Wait(0, BARRIER, 0.0, "06.py", 899, "return forward(*arguments)")
    traceback = 'File "cell", line 10, in first_difference\n    ddp(inputs)'
    error = DeadlockError("", [in_check], [1, 2], [Failure(0, "DeadlockError", "", traceback)])
    assert "for ranks [0, 1, 2] in barrier (line 10);" in explain(error, find("6.9"))


def test_only_ranks_that_all_send_and_could_exchange_are_told_to():
    failures = [Failure(1, "DeadlockError")]
    error = DeadlockError("", [SENDS, replace(SENDS, rank=1)], [2], failures)
    assert explain(error, find("4.2")).endswith(BOTH_SEND)
    assert not explain(error, find("3.1")).endswith(BOTH_SEND)


THREE_SECONDS = "import signal\n\nsignal.sigtimedwait([], 3)\n"


def test_on_a_slow_machine_an_answer_may_wait_as_the_solution_does(monkeypatch):
    monkeypatch.setattr(evidence, "PATIENCE", 1e-6)  # No machine is as fast as was planned for.
    monkeypatch.setattr(evidence, "SLOWER", 1000.0)
    task = find("4.1")
    inputs = task.inputs(1)
    slow = Attempt(task, inputs, cells_with("4.1", f"{THREE_SECONDS}{solution('4.1')}"))
    right, slowly = gather([solution_attempt(task, inputs), slow])
    assert not verdict(task, slowly, right, list).message


def test_every_task_has_parts_and_points():
    for exercise, pristine in load_exercises().items():
        for task in of_exercise(exercise):
            assert len(task.parts) >= 2, task.number
            assert pristine.points[task.number] > 0, task.number


def test_every_task_says_how_long_and_how_hard_it_is():
    for path in sorted((ROOT / "authoring" / "lessons").glob("*_exercise.py")):
        text = path.read_text()
        timed = re.findall(
            r"^# ## (\d+\.\d+) .+\n#\n# \*\d+ minutes · (?:easy|medium|hard)\*\n#\n",
            text,
            re.MULTILINE,
        )
        assert timed == [task.number for task in of_exercise(int(path.name[:2]))], path.name


def test_what_is_no_number_equals_nothing():
    for spoilt in (math.nan, math.inf):
        assert not same(spoilt, 1.0)
        assert not same(torch.tensor([spoilt]), torch.tensor([1.0]))
    assert not same(math.nan, math.nan)
    assert not same(True, 1)
    assert same((1, 2), [1, 2])
    assert same(1, 1.0)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_an_answer_that_does_nothing_holds_no_property(exercise):
    for task in of_exercise(exercise):
        idle = "\n".join(f"def {name}(*a, **k): pass" for name in task.names)
        said = verdict_on(task.number, idle)
        assert all(said.parts.values()), (task.number, said)


def test_an_exception_without_a_message_is_no_right_answer():
    for number in ("1.1", "3.1", "4.1"):
        name = find(number).names[0]
        said = verdict_on(
            number, f"class Wrong(Exception): pass\ndef {name}(*args, **kwargs): raise Wrong"
        )
        assert "raised Wrong" in said.message


@pytest.mark.parametrize("number", ["15.1", "15.2"])
def test_a_record_that_the_script_did_not_sign_earns_nothing(number):
    signature = re.compile(r'"signature": "[0-9a-f]+"')
    text, count = signature.subn('"signature": "0123456789abcdef"', solution(number))
    assert count == 3
    assert all(
        "not what the script wrote" in fault for fault in verdict_on(number, text).parts.values()
    )


def test_what_a_check_computes_is_out_of_an_answers_reach():
    said = verdict_on(
        "7.1",
        "import sys\n\ndef assign_owners(sizes, world_size):\n"
        "    sys.modules['exercise_checks.07'].balance = lambda *anything: ''\n"
        "    return [0] * len(sizes)",
    )
    assert all(said.parts.values()), said


COPIES = [
    ("4.2", "from inspect import getsource\nexec(getsource(stage4_ring.reduce_scatter))"),
    (
        "4.2",
        "from types import FunctionType\ncode = stage4_ring.reduce_scatter.__code__.replace("
        "co_name='mine')\nreduce_scatter = FunctionType(code, globals(), None, (None,))",
    ),
    (
        "4.4",
        "from inspect import getsource\ntext = getsource(stage4_ring.ring_all_reduce)\n"
        "exec(text.replace('@wire.collective', ''))",
    ),
]


@pytest.mark.parametrize(("number", "text"), COPIES)
def test_a_copy_of_a_forbidden_function_is_refused_however_it_was_made(number, text):
    said = verdict_on(number, f"from ddp_course import stage4_ring\n{text}")
    assert "your code has a copy of" in said.message
    assert all(said.parts.values())


def test_another_algorithm_of_the_course_is_no_ring():
    said = verdict_on(
        "4.4",
        "from ddp_course.collectives.tree import tree_all_reduce\n\n"
        "def ring_all_reduce(tensor, group=None):\n    tree_all_reduce(tensor, group)",
    )
    assert "your code calls collectives.tree" in said.message
    assert all(said.parts.values())


CALLS_FOR_NOTHING = "all_reduce(torch.ones(1))\n    return sums"
CHEATS = {
    "10.5": "def largest_rate():\n    return 9e5, 'it is the largest that I know'",
    "10.6": (
        f"def losses_for_backward(sums, counts, all_reduce, world_size):\n    {CALLS_FOR_NOTHING}"
    ),
}


@pytest.mark.parametrize("number", CHEATS)
def test_what_is_no_answer_holds_no_property(number):
    said = verdict_on(number, CHEATS[number])
    assert all(said.parts.values()), said


# {task: {known wrong answer: the parts that it keeps}}
PARTIAL = {
    "1.3": {
        "lazy, four bytes": ["trained only"],
        "frozen too": ["dtypes"],
        "buffers too": ["dtypes"],
        "numbers": [],
    },
    "2.3": {
        "no batch": ["the model"],
        "no model": ["the batch"],
        "model once": ["the batch"],
        "lazy, to itself too": [],
    },
    "7.1": {"highest of equals": ["fewest so far"], "largest first": [], "lazy, in turn": []},
    "7.3": {
        "never says 0": ["enough"],
        "nothing but the total": ["never enough"],
        "levels from 0": [],
    },
    "8.1": {"in turn": ["complete"], "backward in reverse": ["forward first"], "no backward": []},
    "8.4": {"lazy, before the first backward": ["GPipe and 1F1B"], "peak minus one": []},
    "9.2": {
        "Enter sends nothing": ["Leave"],
        "Enter adds up twice": ["Leave"],
        "Leave sends nothing": ["Enter"],
    },
    "11.3": {
        "first in the file": ["no consequence"],
        "consequences count": ["by the time"],
        "lowest rank": [],
    },
}


@pytest.mark.parametrize("number", PARTIAL)
def test_partial_answers_earn_partial_points(number):
    known = {one.name: one.source for one in of_kind(find(number), "wrong", "told")}
    found = tried(find(number), [known[name] for name in PARTIAL[number]], 4)[1:]
    for (name, holds), (_, said) in zip(PARTIAL[number].items(), found, strict=True):
        assert [part for part, message in said.parts.items() if not message] == holds, name


GENERAL = {  # what nobody foresaw: {edits of a solution: the relation that is told}
    ("3.1", ("tensor += incoming", "tensor -= incoming")): "-1 of rank 0's + rank 1's",
    (
        "3.2",
        (
            "wire.recv(tensor, server, group)",
            "wire.recv(tensor, server, group)\n        tensor *= 3",
        ),
    ): 'is "3 of rank ',
    ("3.3", ("tensor /= dist.get_world_size(group)", "tensor.zero_()")): "'zeros'",
    ("4.2", ("target += incoming", "target += incoming\n        target.neg_()")): "was expected",
    ("4.5", ("return min(", "return 1 + min(")): "all are +1 off",
    ("1.1", ("return loss.item()", "return -loss.item()")): "all are -1 times what was expected",
}


@pytest.mark.parametrize("case", GENERAL, ids=lambda case: case[0])
def test_what_nobody_foresaw_is_told_by_a_relation(case):
    number, edit = case
    assert GENERAL[case] in verdict_on(number, edited(number, edit)).message


def test_a_task_that_hands_out_a_ring_takes_what_it_returns_for_nothing():
    """Its check sums twice as much by a ring, which sums in place."""
    assert not verdict_on("10.6", solution("10.6")).message


def test_a_law_is_said_of_numbers_alone():
    zeros = torch.zeros(3)
    assert relation([Value("case", 0, zeros, zeros + 7)]) == "all of it is 0: "
    assert relation([Value("case", 0, False, True), Value("other", 0, zeros, zeros + 7)]) == ""
    assert relation([Value("case", rank, 0, 7, 0) for rank in (0, 1)]) == "all of it is 0: "
    assert relation([Value("case", 0, "too few", ""), Value("other", 0, zeros, zeros + 7)]) == ""


def test_parts_with_other_borders_are_no_other_order():
    turned = [
        Value("case", rank, torch.arange(3.0) + rank, torch.arange(3.0).flip(0) + rank)
        for rank in (0, 1)
    ]
    assert relation(turned) == "these are the right numbers, in another order: "
    parts = [
        Value("case", 0, torch.arange(3.0, 8.0), torch.arange(4.0)),
        Value("case", 1, torch.arange(3.0), torch.arange(4.0, 8.0)),
    ]
    assert relation(parts) == ""


@pytest.mark.parametrize(
    ("more", "told"), [({}, True), ({"c": 8}, True), ({"c": 8, "d": 8}, False)]
)
def test_a_fault_is_named_that_makes_one_more_case_wrong_at_most(more, told):
    part, _ = find("4.1").parts
    right = {"a": 1, "b": 2, "c": 3, "d": 4}
    mine = right | {"a": 9, "b": 9}
    evidence = []
    for cases in (mine, right, mine | more):
        values = {(part, case): {None: value} for case, value in cases.items()}
        evidence.append(Evidence(values))
    first = known_wrong("4.1")[0].message
    # Beside the task's parts the answer differs from the known one, so it is not the same.
    evidence[0].values["beside", "e"] = {None: 0}
    said = verdict(find("4.1"), evidence[0], evidence[1], lambda: [Evidence({}), evidence[2]])
    assert (first in said.message) is told, said.message


def test_numbers_are_told_where_a_probe_has_no_words():
    in_words = ("sums", "as a sum")
    in_numbers = ("sums", "the numbers")
    values = {in_words: {0: None}, in_numbers: {0: torch.ones(2)}}
    right = {in_words: {0: "rank 0's"}, in_numbers: {0: torch.zeros(2)}}
    said = verdict(find("4.2"), Evidence(values), Evidence(right), lambda: [Evidence({})])
    assert said.message.startswith("the numbers: "), said.message


def test_check_prints_one_line_or_says_what_is_wrong(capsys):
    def chunk_to_send(rank, step, world_size):
        return (rank - step) % world_size

    check("4.1", chunk_to_send)
    assert capsys.readouterr().out == f"Exercise 4.1: {CORRECT}\n"
    so_far = (
        r"\(right so far: down to chunk 0; again with the same inputs: check\(\"4.1\","
        r" chunk_to_send, seed=7\)\)"
    )
    wrong = rf"Exercise 4\.1: rank .* modulo the world size \(yours: -1\) {so_far}"
    with pytest.raises(Exception, match=wrong):
        check("4.1", lambda rank, step, world_size: rank - step, seed=7)
    with pytest.raises(ValueError, match="is how this check is called"):
        check("4.1")
    with pytest.raises(ValueError, match=r"no task 4\.9"):
        find("4.9")


@pytest.mark.parametrize("folder", ["exercises", "solutions"])
@pytest.mark.parametrize("number", EXERCISES)
def test_committed_notebooks(number, folder):
    (path,) = (ROOT / folder).glob(f"{number:02d}_*.ipynb")
    notebook = nbformat.read(path, as_version=4)
    assert (ROOT / "notebooks" / path.name).exists() or not list(
        (ROOT / "notebooks").glob(f"{number:02d}_*")
    ), path.name
    for cell in notebook.cells:
        role = cell.metadata.get("ddp_course", {}).get("role")
        text = cell.source
        assert "BEGIN SOLUTION" not in text
        assert "HIDDEN TESTS" not in text
        if role == "answer":
            assert ("NotImplementedError" in text) == (folder == "exercises")
            assert '"""' in text, "signature and docstring stay"
        if cell.cell_type == "code" and folder == "exercises":
            assert not cell.outputs
            assert cell.execution_count is None
        if role == "check" and folder == "solutions":
            number = cell.metadata.ddp_course.task
            said = CORRECT if find(number).inputs(0) else "correct."  # Some draw none.
            assert [output.text for output in cell.outputs] == [f"Exercise {number}: {said}\n"]
    if folder == "exercises":
        assert "raise NotImplementedError" in json.dumps(notebook)
