"""What beginners write, handed in: each is told the cell at fault and the mistake in it.

`exercises/answers` has some hundreds more. Here what matters is how a message reaches the learner:
by way of a whole notebook, whose other answers use the one that is wrong.
"""

import json

import pytest
import torch
from answers import edited, hand_in

from ddp_course import wire
from ddp_course.lab import cli
from ddp_exercises import check
from ddp_exercises.tasks import of_exercise

LEFT = "you send to the left, to rank - 1; this ring goes to the right, to rank + 1"
NOISE = ("terminate called", "gloo", "Odd", "Traceback", "object at 0x", "pair.cc")


TURNED = ("outgoing, right, incoming, left", "outgoing, left, incoming, right")
TURNED_RING = {
    "4.2": edited(
        "4.2",
        TURNED,
        ("(rank - step) %", "(rank + step) %"),
        ("(rank - step - 1)", "(rank + step + 1)"),
    ),
    "4.3": edited(
        "4.3",
        TURNED,
        ("(rank + 1 - step)", "(rank - 1 + step)"),
        ("(rank - step)", "(rank + step)"),
    ),
}
SPOILS_4_3 = """
    import sys
    def exchange(*arguments, original=wire.exchange):
        if sys._getframe(1).f_code.co_name == "allgather":
            raise RuntimeError("spoilt by 4.2")
        return original(*arguments)
    wire.exchange = exchange
"""
OWN = (
    "import math as m\nimport numpy as np\n\ndef modulo(number, size):\n    return"
    " int(np.mod(number, m.floor(size)))"
)
# {mistake: ({task: its answer; "own": a cell of the learner's}, {task: words in its message})}; all
# else is right
MISTAKES = {
    "a colon forgotten": (
        {"4.2": edited("4.2", ("world_size - 1):", "world_size - 1)"))},
        {"4.2": "SyntaxError: expected ':' (line 4 of the cell)", "4.4": "mend 4.2 first"},
    ),
    "a bracket left open": (
        {"4.3": edited("4.3", ("left, group)", "left, group"))},
        {"4.3": "SyntaxError: incomplete input", "4.4": "mend 4.3 first"},
    ),
    "an index out of range": (
        {"4.2": edited("4.2", ("(rank - step - 1) % world_size", "rank - step + 3"))},
        {"4.2": "(line 6 of your cell: target", "4.4": "(line 6 of 4.2, reduce_scatter: target"},
    ),
    "a buffer of another dtype": (
        {
            "4.2": edited(
                "4.2", ("torch.empty_like(target)", "torch.empty(len(target), dtype=torch.float64)")
            )
        },
        {"4.2": "when bytes are read as another dtype", "4.4": "mend 4.2 first"},
    ),
    "left for right": ({"4.3": edited("4.3", TURNED)}, {"4.3": LEFT, "4.4": "mend 4.3 first"}),
    "a ring that turns the other way": (
        TURNED_RING,
        {"4.2": LEFT, "4.3": LEFT, "4.4": "mend 4.2 first"},
    ),
    "half a ring that turns the other way": (
        {"4.2": TURNED_RING["4.2"]},
        {"4.2": LEFT, "4.4": "(it uses 4.2, which is not right yet: mend 4.2 first)"},
    ),
    "another chunk on either side": (
        {"4.2": edited("4.2", ("(rank - step - 1)", "(rank - step)"))},
        {"4.2": "one less than this rank's", "4.4": "mend 4.2 first"},
    ),
    "a buffer that is too short": (
        {"4.2": edited("4.2", ("torch.empty_like(target)", "torch.empty(len(target) - 1)"))},
        {"4.2": "do both sides mean the same chunk and dtype?", "4.4": "mend 4.2 first"},
    ),
    "a name misspelt": (
        {"4.4": edited("4.4", ("reduce_scatter(chunks", "reduce_scatter(chunk"))},
        {
            "4.4": (
                "name 'chunk' is not defined (line 5 of your cell: reduce_scatter(chunk, group));"
                " is it spelt right"
            )
        },
    ),
    "a function renamed": (
        {"4.2": edited("4.2", ("def reduce_scatter", "def scatter_and_reduce"))},
        {"4.2": "name 'reduce_scatter' is not defined", "4.4": "'reduce_scatter' is not defined"},
    ),
    "an answer that spoils the course for another": (
        {"4.2": edited("4.2", ("    rank, world_size", f"{SPOILS_4_3}    rank, world_size"))},
        {"4.2": "spoilt by 4.2", "4.4": "spoilt by 4.2"},
    ),
    "no mistake: imports and a function in a cell of one's own": (
        {
            "own": OWN,
            "4.1": edited("4.1", ("(rank - step) % world_size", "modulo(rank - step, world_size)")),
        },
        {},
    ),
}


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    """{mistake: {task: message}} of a class in which each learner makes one."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name, (edits, _) in MISTAKES.items():
        answers = {task: text for task, text in edits.items() if task != "own"}
        hand_in(folder / name.replace(":", ""), answers, [edits["own"]] if "own" in edits else ())
    report = tmp_path_factory.mktemp("report") / "r.json"
    cli.main(["grade", str(folder), "--json", str(report), "--seed", "7"])
    found = {result["learner"]: result["tasks"] for result in json.loads(report.read_text())}
    by_mistake = {}
    for name in MISTAKES:
        tasks = found[name.replace(":", "")]
        by_mistake[name] = {task["id"]: task["message"] for task in tasks}
    return by_mistake


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_where_it_is(messages, name):
    words = MISTAKES[name][1]
    said = {task: message for task, message in messages[name].items() if message}
    assert said.keys() == words.keys(), said
    assert all(words[task] in message for task, message in said.items()), said
    assert not [word for word in NOISE if word in str(said)], said


@pytest.mark.parametrize("name", ["a colon forgotten", "a ring that turns the other way"])
def test_the_command_says_it_in_a_line_a_task(name, tmp_path, capsys):
    edits, words = MISTAKES[name]
    assert cli.main(["check", "4", "--notebook", str(hand_in(tmp_path / "anna", edits))]) == 1
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines()[1:-1])
    assert all(words.get(task, "correct") in line for task, line in lines.items()), lines
    assert len(lines) == len(of_exercise(4)), lines


def test_a_check_prints_no_last_words_of_gloo(capfd):
    space = {"torch": torch, "wire": wire}
    exec(MISTAKES["a buffer that is too short"][0]["4.2"], space)
    with pytest.raises(Exception, match="do both sides mean the same chunk"):
        check("4.2", space["reduce_scatter"], seed=7)
    assert "terminate" not in str(capfd.readouterr())
