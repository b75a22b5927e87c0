"""What is no number is never right, whatever it is compared with; and a seed repeats inputs and messages."""

import math

import pytest
import torch
from answers import cells_with, collection, solution, tasks_of

from ddp_course.grading.examine import Item, draw, examine, verdict
from ddp_course.grading.grade import Grader
from ddp_course.grading.plain import pack, unpack
from ddp_course.grading.tasks import exercises, find

TASKS = [task for exercise in exercises() for task in tasks_of(exercise)]
SEED = 9
REPEATED = (("1.1", 1), ("3.1", 2), ("4.4", 2), ("8.3", 1))  # of these tasks so many wrong answers


def spoilt(thing, by):
    """Evidence with every float in it, and in its tensors, replaced; all else as it is."""
    if type(thing) is float:
        return by
    if isinstance(thing, torch.Tensor) and thing.is_floating_point():
        return torch.full_like(thing, by)
    if isinstance(thing, dict):
        return {key: spoilt(value, by) for key, value in thing.items()}
    return type(thing)(spoilt(item, by) for item in thing) if isinstance(thing, list | tuple) else thing


@pytest.fixture(scope="module")
def honest():
    """{task: (inputs, the evidence of its solution)}."""
    items = [Item(task, draw(task, SEED), cells=cells_with(task, solution(task))) for task in TASKS]
    found = examine(items, patience=60.0)  # while rank 0 has a task of its own, the others wait
    assert all("evidence" in result for result in found), [result for result in found if "failure" in result]
    return {item.number: (item.inputs, result["evidence"]) for item, result in zip(items, found, strict=True)}


def judged(task, inputs, evidence):
    """The verdict on plain data."""
    return verdict(find(task), {"evidence": [pack(one) for one in evidence]}, inputs)


@pytest.mark.parametrize("by", [math.nan, math.inf])
def test_what_is_no_number_passes_no_task(honest, by):
    compared = 0
    for task, (inputs, packed) in honest.items():
        evidence = [unpack(one) for one in packed]
        assert judged(task, inputs, evidence).right, task
        other = [spoilt(one, by) for one in evidence]
        if str(other) != str(evidence):
            said = judged(task, inputs, other)
            assert not said.right and said.message, task
            compared += 1
    assert compared >= 25


def test_a_seed_repeats_inputs_and_messages():
    chosen = []
    for task, count in REPEATED:
        wrong = [one for one in collection(int(task.split(".")[0])) if one.task == task and one.kind == "wrong"]
        chosen += [(task, list(cells_with(task, one.source))) for one in wrong[:count]]
    messages = []
    for seed in (SEED, SEED, SEED + 1):
        with Grader({}, seed=seed) as grader:
            messages.append([said.message for said in grader.examine(chosen)])
    assert all(messages[0]) and messages[0] == messages[1] != messages[2]
    for task in TASKS:
        once, again, *others = (str(draw(task, seed)) for seed in (SEED, SEED, *range(5)))
        assert once == again and {once} < {once, *others}, task
