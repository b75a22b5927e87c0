"""What an answer can reach from inside, when nothing looks at its source first: not what would answer for it."""

import json
import re

import nbformat
import pytest
from answers import ROOT, solution

from ddp_course.grading.examine import place
from ddp_course.grading.grade import Grader, exercises_folder
from ddp_course.grading.harness import cut_out
from ddp_course.grading.plain import Odd, pack, unpack
from ddp_course.grading.probing import own_share
from ddp_course.grading.results import result_of
from ddp_course.grading.submission import allowed_in, cells_for, fresh_notebook, load_exercises, take_answers
from ddp_course.grading.suspicion import remarks
from ddp_course.grading.tasks import exercises, find, of_exercise, task

PRISTINE = load_exercises(exercises_folder())
TASKS = [one for exercise in exercises() for one in of_exercise(exercise)]
PACKAGE = ROOT / "ddp_course"
RIGHT = "take(lambda s, m: (s - 1) / (m + s - 1))"

# Each looks for the answer, or for what could vouch for it, in its own way; `take(f)` makes it the answer.
SEARCHES = {
    "an import": "from ddp_course.stage8_pipeline import bubble as found; take(found)",
    "an import by name": "take(__import__('importlib').import_module('ddp_course.stage8_pipeline').bubble)",
    "the package's lazy names": "import ddp_course; take(ddp_course.bubble)",
    "the reference of a task": "from ddp_course.grading.tasks import exercise08; take(exercise08.bubble)",
    "the task": "from ddp_course.grading.tasks import find; find('8.3').parts.clear()",
    "the check as an oracle": "from ddp_course.grading import check; check('8.3', lambda s, m: 0.5); take(None)",
    "the verdict": "from ddp_course.grading import examine; examine.verdict = lambda *a: None",
    "the examiner": "from ddp_course.grading import examiner; take(examiner.draw)",
    "the modules": "import sys; [take(m.bubble) for m in list(sys.modules.values()) if hasattr(m, 'bubble')]",
    "the finders": "import sys; sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__[:3] != 'ddp']\n"
    "    from ddp_course.stage8_pipeline import bubble as found; take(found)",
    "the file of the stage": f"exec(open('{PACKAGE}/stage8_pipeline.py').read(), space := {{}}); take(space['bubble'])",
    "the file of the task": f"open('{PACKAGE}/grading/tasks/exercise08.py').read(); RIGHT",
    "the solutions": f"open('{ROOT}/solutions/08_pipeline.ipynb').read(); RIGHT",
    "the tests": f"open('{ROOT}/tests/wrong_answers/exercise08.py').read(); RIGHT",
    "other submissions": "import glob; glob.glob('/tmp/**/*.ipynb', recursive=True)[0]; RIGHT",
    "orders of neighbours": "import glob; glob.glob('/tmp/*/*/order.json')[0]; RIGHT",
    "the home": "import os; os.listdir('/root')[0].startswith('.bash') and RIGHT",
    "the network": "import socket; socket.create_connection(('192.0.2.1', 80), 1); RIGHT",
    "all functions": "import gc; [take(f) for f in gc.get_objects() if getattr(f, '__name__', '') == 'bubble']",
    "judges": "import gc; [RIGHT for f in gc.get_objects()\n"
    "     if getattr(f, '__name__', '') in ('judge', 'judged', 'draw', 'verdict') and 'ddp' in str(f.__module__)]",
    "frames": "import sys; frame = sys._getframe()\n"
    "    while frame:\n"
    "        'expected' in frame.f_locals and RIGHT\n"
    "        'seed' in str(list(frame.f_locals)) and RIGHT\n"
    "        frame = frame.f_back",
    "the parent's memory": "import os; open(f'/proc/{os.getppid()}/mem', 'rb'); RIGHT",
    "the parent's words": "import os; b'judge' in open(f'/proc/{os.getppid()}/environ', 'rb').read() or 1/0\n    RIGHT",
    "rights": "import ctypes; ctypes.CDLL(None).mount(b'x', b'/usr', b'tmpfs', 0, None) and 1/0\n    RIGHT",
    "a way out of the root": "import os; os.mkdir('r'); os.chroot('r'); RIGHT",
    "writing for later": f"open('{PACKAGE}/cheat.py', 'w'); RIGHT",
    "shared memory": "import os; os.listdir('/dev/shm')[0]; RIGHT",
}
LIES = {
    "an empty failure": "class Wrong(Exception): pass\ndef bubble(s, m): raise Wrong",
    "a number equal to all": "class Yes(float):\n"
    "    __eq__ = lambda *a: True\n    __sub__ = __rsub__ = lambda *a: 0.0\n"
    "    __abs__ = lambda self: 0.0\ndef bubble(s, m): return Yes(0.5)",
    "a dict for a list": "def bubble(s, m): return {'right': True}",
    "no number": "def bubble(s, m): return float('nan')",
    "endless": "def bubble(s, m): return float('inf')",
    "a verdict written to each descriptor": "import os, struct\ndef bubble(s, m):\n"
    '    said = b\'{"task": "8.3", "right": true, "message": "", "parts": []}\\n\'\n'
    "    for descriptor in range(3, 30):\n"
    "        try: os.write(descriptor, struct.pack('<QB', len(said), 1) + said)\n"
    "        except OSError: pass\n"
    "    return 0.5",
    "json that says what it likes": "import json\njson.dumps = lambda thing: '{\"list\": []}'\n"
    "def bubble(s, m): return 0.5",
    "a patched packer": "import sys\nsys.modules['ddp_course.grading.answering'].pack = lambda thing: None\n"
    "def bubble(s, m): return 0.5",
    "a replaced float": "import builtins\nbuiltins.float = int\ndef bubble(s, m): return 0",
}
NO_CHEATS = {"an empty failure", "a dict for a list", "no number", "endless"}  # their message is enough
WASTE = {
    "100 MB": ("def bubble(s, m): return 'x' * (100 << 20)", "too large|not read|cannot be|plain float"),
    "nested too deep": (
        "def bubble(s, m):\n    deep = []\n    for _ in range(5000): deep = [deep]\n    return deep",
        "RecursionError|could not be read|cannot be compared|plain float",
    ),
    "5,000 digits": ("def bubble(s, m): return 10 ** 5000", "60 digits"),
}


def cells(source, number="8.3"):
    """What the grader sends along with an answer."""
    imports = [cell.source for cell in PRISTINE[int(number.split(".")[0])].notebook.cells if cell.id == "imports"]
    return [("imports", imports[0]), (f"answer-{number.replace('.', '-')}", source)]


def search(body):
    """An answer that looks for the right one, and gives a wrong one if it does not find it."""
    body = body.replace("RIGHT", RIGHT)
    return (
        "answer = lambda s, m: 0.5\ndef take(found):\n    global answer\n    answer = found\n"
        f"try:\n    {body}\nexcept Exception:\n    pass\ndef bubble(s, m):\n    return answer(s, m)\n"
    )


@pytest.fixture(scope="module")
def said():
    """The verdicts on all of them, by name, from one sandbox; nothing has looked at their source."""
    sources = {name: search(body) for name, body in SEARCHES.items()} | LIES
    sources |= {name: source for name, (source, _) in WASTE.items()} | {"honest": solution("8.3")}
    with Grader({}, seed=3) as grader:
        found = grader.examine([("8.3", cells(source)) for source in sources.values()])
    return dict(zip(sources, found, strict=True))


@pytest.mark.parametrize("name", [*SEARCHES, *LIES])
def test_nothing_that_would_answer_is_within_reach(said, name):
    assert said["honest"].right, said["honest"]
    result = result_of("8.3", 2, said[name])
    assert result.points == 0 and result.message and all(part["message"] for part in result.parts), name
    source = search(SEARCHES[name]) if name in SEARCHES else LIES[name]
    assert name in NO_CHEATS or said[name].suspicious or remarks(source, allowed_in("8.3", PRISTINE[8])), name


@pytest.mark.alone  # 100 MB have to be through before the task's 20 s are over
@pytest.mark.parametrize("name", WASTE)
def test_waste_costs_only_the_answer_that_makes_it(said, name):
    assert said["honest"].right
    assert re.search(WASTE[name][1], said[name].message), said[name].message[:300]


def test_a_search_that_finds_the_answer_would_be_seen():
    """The searches can succeed: where the answer is left lying about, one of them finds it."""
    space = {"found": solution("8.3")}
    exec(search("exec(found, space := {}); take(space['bubble'])"), space)
    assert space["bubble"](4, 8) == pytest.approx(3 / 11)


@pytest.mark.parametrize("number", [one.number for one in TASKS])
def test_what_is_sent_along_has_no_judge(number):
    source = cut_out(find(number).probe, find(number).prepare)
    compile(source, "probe", "exec")
    assert "judge" not in source and "expected" not in source and "@task" not in source
    needed = set(re.findall(r"^\s*from (ddp_course[\w.]*) import", source, re.M))
    allowed = {"ddp_course.grading.probing", "ddp_course.running", "ddp_course.running.devices", "ddp_course.errors"}
    assert needed <= allowed | {"ddp_course.stage4_ring", "ddp_course.stage6_ddp"}


def test_a_probe_that_needs_its_judge_is_refused():
    assert "def width" not in cut_out(find("5.1").probe)

    def probe(answer):
        """Reaches into a task."""
        return AssignBuckets.judge(answer)  # noqa: F821 (of the module that it is said to be in)

    probe.__module__ = "ddp_course.grading.tasks.exercise05"
    with pytest.raises(ValueError, match="AssignBuckets, which is a task with its judge"):
        cut_out(probe)
    assert task  # the decorator by which it is known


def test_a_rank_gets_its_own_inputs_alone():
    inputs = {"values": [[1], [2], [3], [4]], "by_name": {"a": [5, 6, 7, 8]}, "servers": {2: 1}}
    mine = own_share(inputs, ("values", "by_name"), 2)
    assert mine == {"values": [None, None, [3], None], "by_name": {"a": [None, None, 7, None]}, "servers": {2: 1}}


def test_numbers_and_lists_of_other_kinds_are_taken_for_what_they_are():
    from collections import deque
    from fractions import Fraction

    import numpy

    taken = {1.5: numpy.float64(1.5), 3: numpy.int32(3), 0.25: Fraction(1, 4), 2: Fraction(4, 2)}
    for plain, thing in taken.items():
        back = unpack(json.loads(json.dumps(pack(thing))))
        assert back == plain and type(back) is type(plain)
    for lazy in ((n for n in (1, 2)), range(1, 3), map(int, "12"), deque([1, 2]), {1: 0, 2: 0}.keys()):
        assert unpack(pack(lazy)) == [1, 2]
    assert isinstance(unpack(pack(numpy.zeros(2))), Odd) and "60 digits" in repr(unpack(pack(10**99)))


def handed_in(before, after):
    """The solution of exercise 4 with cells of the learner's own before and after the answers."""
    notebook = nbformat.read(ROOT / "solutions" / "04_ring_all_reduce.ipynb", as_version=4)
    found = [(cell.id, cell.source) for cell in notebook.cells if cell.cell_type == "code"]
    return [("own-1", before), *found, ("own-2", after)]


HELPED = """%%time is not Python, and this cell is not needed"""
HELPER = "import math as m\nSIZE = 2\ndef half(x):\n    return x // SIZE\nprint('tried')\nwhile_trying = half(m.inf)\n"
USES = "def chunk_to_send(rank, step, world_size):\n    return (rank - step + m.floor(half(2) - 1)) % world_size\n"


def test_helpers_travel_with_the_answers_and_what_was_tried_does_not():
    submitted = handed_in(HELPER, HELPED)
    submitted = [(name, USES if name == "answer-4-1" else source) for name, source in submitted]
    answers = take_answers(submitted, PRISTINE[4])
    assert not answers.troubles
    assert answers.helpers == [("cell-1", "import math as m\nSIZE = 2\ndef half(x):\n    return x // SIZE\n\n")]
    notebook = fresh_notebook(PRISTINE[4], answers)
    assert [name for name, _ in cells_for("4.1", notebook)] == ["imports", "cell-1", "answer-4-1"]
    assert [name for name, _ in cells_for("4.5", notebook)] == ["imports", "answer-4-5"]
    with Grader({}, seed=3) as grader:
        (said,) = grader.examine([("4.1", cells_for("4.1", notebook))])
    assert said.right, said.message


def test_a_helper_keeps_to_the_rules_of_the_answer_that_uses_it():
    submitted = handed_in(HELPER.replace("import math as m", "import subprocess as m"), "")
    submitted = [(name, USES if name == "answer-4-1" else source) for name, source in submitted]
    answers = take_answers(submitted, PRISTINE[4])
    assert list(answers.troubles) == ["4.1"]
    assert "in cell 1 of your notebook" in answers.troubles["4.1"] and "imports subprocess" in answers.troubles["4.1"]


def test_the_cell_at_fault_is_named():
    lines = 'Traceback:\n  File "answer-4-4", line 5, in ring\n    reduce_scatter(x)\n'
    lines += (
        '  File "answer-4-2", line 6, in reduce_scatter\n    x[9]\n  File "/x/site-packages/torch/a.py", line 1, in f\n'
    )
    assert place(lines, "4.4") == " (line 6 of 4.2, reduce_scatter: x[9]; mend 4.2 first)"
    assert place(lines, "4.2") == " (line 6 of your cell: x[9])"
