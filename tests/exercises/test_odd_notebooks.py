"""What people really hand in: an odd cell costs nothing but itself.

An odd notebook harms nobody else, and an answer counts wherever a person would find it.
"""

import copy
import json
import random
import re
import subprocess
import sys
from textwrap import indent

import pytest
from answers import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_course.lab import cli
from ddp_exercises.errors import GradingError
from ddp_exercises.grading.answers import assemble, find_answers, load_exercises, trouble
from ddp_exercises.grading.cells import Cell, read_cells
from ddp_exercises.grading.grader import Judge, grade_one
from ddp_exercises.grading.submissions import (
    exercise_of,
    find_submissions,
    without_exercises_not_begun,
)

EXERCISES = load_exercises()
GIVEN = json.loads((ROOT / "exercises/02_data_parallel.ipynb").read_text())
ANSWERS = {
    cell["id"]: "".join(cell["source"])
    for cell in json.loads((ROOT / "solutions/02_data_parallel.ipynb").read_text())["cells"]
    if cell["id"].startswith("answer-")
}
TASKS = list(EXERCISES[2].points)


def solved():
    """Exercise 2, solved in its answer cells."""
    notebook = copy.deepcopy(GIVEN)
    for cell in notebook["cells"]:
        cell["source"] = ANSWERS.get(cell["id"], cell["source"])
    return notebook


def cell_in(notebook, name):
    """Return the cell with this id."""
    return next(cell for cell in notebook["cells"] if cell["id"] == name)


def own(source, **more):
    """Return a cell that a learner has made."""
    return {
        "cell_type": "code",
        "id": "mine",
        "metadata": {},
        "outputs": [],
        "source": source,
    } | more


def cells_of(notebook):
    """Return the cells of a notebook, as the grader reads them."""
    return read_cells(json.dumps(notebook).replace('"DIGITS"', "9" * 5000).encode())


def assembled(notebook):
    """Return what runs of a notebook, as a list of ids; and the answers in it."""
    cells = cells_of(notebook)
    answers = find_answers(EXERCISES[2], cells)
    return list(assemble(EXERCISES[2], cells, answers)), answers


# Mutants of a real notebook: one change of the JSON, or of the bytes.
ODD = st.sampled_from([None, 7, -0.5, True, "", "x\ud83d\x00", [], {}, [None, 3], {"role": 1}])
PLACES = ["drop", "retype", "duplicate", "reorder"]


def places_in(value):
    """Yield all (container, key) in a piece of JSON."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places_in(value[key])


@st.composite
def mutants(draw):
    """Draw the bytes of a solved notebook with some faults."""
    notebook = solved()
    for _ in range(draw(st.integers(0, 3))):
        places = list(places_in(notebook))
        if not places:
            break
        container, key = places[draw(st.integers(0, len(places) - 1))]
        change = draw(st.sampled_from(PLACES))
        if change == "drop":
            del container[key]
        elif change == "retype" or isinstance(container, dict):
            container[key] = copy.deepcopy(draw(ODD))
        elif change == "duplicate":
            container.insert(draw(st.integers(0, len(container))), copy.deepcopy(container[key]))
        else:
            random.Random(draw(st.integers(0, 99))).shuffle(container)
    encoding = draw(st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1"]))
    plain = draw(st.booleans()) and encoding != "latin-1"
    content = json.dumps(notebook, ensure_ascii=not plain).encode(encoding, "surrogatepass")
    return content[: draw(st.sampled_from([len(content), len(content), len(content) // 2]))]


def judge_the_shape(content, folder):
    """Do all that the grader does with a notebook beside a right one, but for running its cells."""
    (folder / "odd" / "02_x.ipynb").write_bytes(content)
    works, _ = find_submissions([folder])
    works = without_exercises_not_begun(works, EXERCISES)
    learners = {work.learner: work for work in works}
    for work in works:
        try:
            pristine = EXERCISES[exercise_of(work, EXERCISES)]
        except GradingError:
            continue
        answers = find_answers(pristine, work.cells)
        for task in pristine.points:
            assert task in answers or trouble(task, pristine, work.cells)
        for source in assemble(pristine, work.cells, answers).values():
            source.encode()
    assert list(find_answers(EXERCISES[2], learners["right"].cells)) == TASKS
    return learners["odd"]


@pytest.fixture(scope="module")
def right_and_odd(tmp_path_factory):
    """A class of two; one learner's notebook is right."""
    folder = tmp_path_factory.mktemp("class")
    for learner in ("right", "odd"):
        (folder / learner).mkdir()
    (folder / "right" / "02_x.ipynb").write_text(json.dumps(solved()))
    return folder


COUNTS = [
    pytest.param(60, id="a few"),
    pytest.param(2000, id="many", marks=[pytest.mark.weekly, pytest.mark.slow]),
]


@pytest.mark.parametrize("count", COUNTS)
def test_no_mutant_ends_the_class(count, right_and_odd, recwarn):
    read = []

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=count < 100,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(mutants())
    def judge(content):
        read.append(not judge_the_shape(content, right_and_odd).fault)

    judge()
    assert sum(read) > len(read) / 3, "hardly any mutant can be read: this tests nothing"
    assert not recwarn.list


def odd_cell(**changes):
    """Return a change that gives a cell of one's own these values."""
    return lambda notebook: notebook["cells"].insert(2, own("x = 1") | changes)


def odd_answer(**changes):
    """Return a change that gives an answer cell these values."""
    return lambda notebook: cell_in(notebook, "answer-2-1").update(changes)


ODD_CELLS = {
    "source is null": odd_cell(source=None),
    "source is a number": odd_cell(source=7),
    "lines are numbers": odd_cell(source=["x = 1\n", 3, None]),
    "id is an integer": odd_cell(id=7),
    "id is null": odd_cell(id=None),
    "metadata is null": odd_cell(metadata=None),
    "ddp_course is null": odd_cell(metadata={"ddp_course": None}),
    "ddp_course is a list": odd_cell(metadata={"ddp_course": ["role"]}),
    "tags is a number": odd_cell(metadata={"tags": 3}),
    "a cell of many digits": odd_cell(execution_count="DIGITS"),
    "a cell is null": lambda notebook: notebook["cells"].insert(2, None),
    "lines end as on Windows": lambda notebook: [
        cell.update(source="".join(cell["source"]).replace("\n", "\r\n"))
        for cell in notebook["cells"]
    ],
    "half an emoji": odd_answer(source=ANSWERS["answer-2-1"] + "# \ud83d"),
    "answer's metadata is null": odd_answer(metadata=None),
    "answer's id is null": odd_answer(id=None),
    "answer has no type": odd_answer(cell_type=None),
    "older than version 4": lambda notebook: notebook.update(
        worksheets=[{"cells": notebook.pop("cells")}]
    ),
}


@pytest.mark.parametrize("kind", ODD_CELLS)
def test_an_odd_cell_costs_nothing(kind):
    notebook = solved()
    ODD_CELLS[kind](notebook)
    runs, answers = assembled(notebook)
    assert list(answers) == TASKS
    assert {"check-2-1", "check-2-2", "check-2-3"} <= set(runs)
    assert "\ud83d" not in answers["2.1"].source


def test_an_empty_answer_is_not_solved_yet():
    notebook = solved()
    cell_in(notebook, "answer-2-1")["source"] = None
    cells = cells_of(notebook)
    places = {task: answer.places for task, answer in find_answers(EXERCISES[2], cells).items()}
    assert places.pop("2.1") == []
    assert all(places.values())
    assert trouble("2.1", EXERCISES[2], cells) == "not solved yet"
    missing = [cell for cell in cells if cell.id != "answer-2-1"]
    assert "no other cell defines scatter" in trouble("2.1", EXERCISES[2], missing)
    missing.append(Cell("raw", ANSWERS["answer-2-1"], text_type="raw"))
    assert "in a raw cell, which does not run" in trouble("2.1", EXERCISES[2], missing)


def placed(notebook, place, *cells):
    """Insert cells beside the answer cell of 2.1; place 0 is above it."""
    ids = [cell["id"] for cell in notebook["cells"]]
    at = ids.index("answer-2-1") + place
    notebook["cells"][at:at] = cells


def blank(notebook, name="answer-2-1"):
    """Give an answer cell its placeholder again; what was in it."""
    cell = cell_in(notebook, name)
    answer = "".join(cell["source"])
    cell["source"] = "".join(cell_in(GIVEN, name)["source"])
    return answer


def below(notebook):
    placed(notebook, 1, own(blank(notebook)))


def above(notebook):
    placed(notebook, 0, own(blank(notebook)))


def untouched_copy(notebook):
    notebook["cells"].append(cell_in(GIVEN, "answer-2-1") | {"id": "copy"})


def merged(notebook):
    cell_in(notebook, "answer-2-2")["source"] = (
        ANSWERS["answer-2-1"] + "\n\n" + ANSWERS["answer-2-2"]
    )
    notebook["cells"].remove(cell_in(notebook, "answer-2-1"))


def in_the_check(notebook):
    cell_in(notebook, "check-2-1")["source"] = blank(notebook) + '\n\ncheck("2.1", scatter)'


def in_the_first_cell(notebook):
    notebook["cells"].insert(0, own("\n\n".join(blank(notebook, name) for name in ANSWERS)))


def markdown(notebook):
    cell_in(notebook, "answer-2-1")["cell_type"] = "markdown"


def fenced(notebook):
    markdown(notebook)
    cell_in(notebook, "answer-2-1")["source"] = f"Mine:\n\n```python\n{ANSWERS['answer-2-1']}\n```"


def again_below_the_check(notebook):
    answer = ANSWERS["answer-2-1"]
    cell_in(notebook, "answer-2-1")["source"] = answer.replace("len(devices)", "2")
    placed(notebook, 2, own(answer), own('check("2.1", scatter)'))


def imported(notebook):
    """From a module of the learner's; no cell defines it."""
    cell_in(notebook, "answer-2-1")["source"] = ""
    notebook["cells"].insert(0, own("from mine import *"))


def by_another_name(notebook):
    placed(notebook, 1, own(blank(notebook).replace("scatter", "mine")))
    cell_in(notebook, "check-2-1")["source"] = 'check("2.1", mine)'


def by_grade_id(notebook):
    for cell in notebook["cells"]:
        cell["metadata"].pop("ddp_course", None)
        cell["id"] = "x"


def by_colab(notebook):
    by_grade_id(notebook)
    for cell, first in zip(notebook["cells"], GIVEN["cells"], strict=True):
        cell["metadata"] = {"id": first["id"]}


def by_comment(notebook):
    for cell in notebook["cells"]:
        cell |= {
            "metadata": {},
            "source": f"# %% {cell['id']}\n" + "".join(cell["source"]),
            "id": "",
        }


def anew(notebook):
    notebook["cells"] = [own(cell["source"]) for cell in notebook["cells"] if "outputs" in cell]
    del notebook["metadata"]


def twice(notebook):
    placed(notebook, 1, cell_in(notebook, "answer-2-1") | {"id": "again"})


MOVED = {
    below: "found by what it defines, in another cell",
    above: "found by what it defines, in another cell",
    untouched_copy: "",
    merged: "found by what it defines, in another cell",
    in_the_check: "found by what it defines, in another cell",
    in_the_first_cell: "found by what it defines, in another cell",
    markdown: "its cell is markdown, read as code",
    fenced: "its cell is markdown, read as code",
    again_below_the_check: (
        "found by what it defines, in another cell; there are several versions, the last counts"
    ),
    imported: "no cell defines it; its check had it",
    by_another_name: "no cell defines it; its check had it",
    by_grade_id: "found by its nbgrader's grade_id",
    by_colab: "found by its Colab's id",
    by_comment: "found by its comment",
    anew: "found by what it defines, in another cell",
    twice: "found by its tag; there are several versions, the last counts",
}


@pytest.mark.parametrize("change", MOVED, ids=lambda change: change.__name__)
def test_an_answer_is_found_where_a_person_would_find_it(change, right_and_odd):
    notebook = solved()
    change(notebook)
    runs, answers = assembled(notebook)
    assert list(answers) == TASKS
    assert "; ".join(answers["2.1"].notes) == MOVED[change]
    check = runs.index("check-2-1")
    if answers["2.1"].places:
        assert f"own-{answers['2.1'].places[-1]}" in runs[:check]
    assert "```" not in answers["2.1"].source
    assert runs.count("check-2-1") == 1
    work = judge_the_shape(json.dumps(notebook).encode(), right_and_odd)
    assert exercise_of(work, EXERCISES) == 2


def as_marimo(sources):
    """Return a notebook of marimo's."""
    cells = [indent(f"{source}\nreturn (\n    x,\n)", "    ") for source in sources]
    return "import marimo\napp = marimo.App()\n" + "".join(
        f"\n@app.cell(hide_code=True)\ndef _(\n    torch,\n):\n{cell}\n" for cell in cells
    )


SCRIPTS = {
    "jupytext": lambda sources: "# ---\n" + "".join(f"# %%\n{source}\n" for source in sources),
    "nbconvert": lambda sources: "".join(f"# In[ ]:\n\n{source}\n\n" for source in sources),
    "marimo": as_marimo,
    "Colab": lambda sources: '"""# Exercise 2\n\nOne process"""\n\n' + "\n\n".join(sources) + "\n",
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script_that_was_a_notebook_is_one_where_there_is_no_other(kind, tmp_path):
    sources = ["".join(cell["source"]) for cell in solved()["cells"] if "outputs" in cell]
    for learner in ("ada", "ben"):
        (tmp_path / learner).mkdir()
        (tmp_path / learner / "x.py").write_text(SCRIPTS[kind](sources))
    (tmp_path / "ben" / "02_x.ipynb").write_text(json.dumps(solved()))
    (tmp_path / "carl.py").write_text("def scatter(): pass")
    works = find_submissions([tmp_path])[0]
    ada, ben = sorted(works, key=lambda work: work.learner)
    assert (ada.file, ben.file) == ("x.py", "02_x.ipynb")
    assert exercise_of(ada, EXERCISES) == 2
    answers = find_answers(EXERCISES[2], ada.cells)
    assert list(answers) == TASKS
    for answer in answers.values():
        compile(answer.source, "", "exec")
        assert "(\n    x," not in answer.source


def test_a_check_runs_where_the_learner_has_it():
    """In the lab a check finds what stands between it and the answer."""
    notebook = solved()
    placed(notebook, 1, own("helper = len"))
    place = [cell["id"] for cell in notebook["cells"]].index("mine")
    runs, _ = assembled(notebook)
    assert runs.index("check-2-1") > runs.index(f"own-{place}")


def test_a_notebook_of_all_kinds_at_once_has_all_points(tmp_path):
    notebook = solved()
    notebook["cells"].insert(0, own("%reset -f"))
    by_another_name(notebook)
    in_answer = cell_in(notebook, "answer-2-2")
    in_answer["source"] = "!pip install einops\n" + in_answer["source"] + "\n# \ud83d"
    placed(notebook, 0, own("name = input()"))
    (tmp_path / "02_x.ipynb").write_text(json.dumps(notebook))
    (work,) = find_submissions([tmp_path / "02_x.ipynb"])[0]
    result = grade_one(work, EXERCISES, Judge(3), 120.0)
    assert [task.message for task in result.tasks] == ["", "", ""]
    assert result.points == 7
    assert result.tasks[0].notes == ["no cell defines it; its check had it"]


def test_what_the_grader_cannot_do_is_said_in_our_words(tmp_path):
    notebook = solved()
    cell_in(notebook, "answer-2-1")["source"] = "n = int(input())\n" + ANSWERS["answer-2-1"]
    cell_in(notebook, "answer-2-2")["source"] = "!pip install xyz\nimport xyz\n"
    cell_in(notebook, "answer-2-3")["source"] = "raise ValueError('\\ud83d')"
    (tmp_path / "02_x.ipynb").write_text(json.dumps(notebook))
    (work,) = find_submissions([tmp_path / "02_x.ipynb"])[0]
    asks, shell, emoji = [
        task.message for task in grade_one(work, EXERCISES, Judge(3), 120.0).tasks
    ]
    assert "nobody types here: write the value itself" in asks
    assert "!pip install xyz did nothing" in shell
    assert "No module named 'xyz'" in shell
    assert "ValueError: ?" in emoji


def test_a_fault_of_the_grader_in_one_notebook_is_a_line_in_its_report(
    right_and_odd, tmp_path, monkeypatch, capsys
):
    odd = solved()
    odd["cells"].append(own("spoils = 1"))
    (right_and_odd / "odd" / "02_x.ipynb").write_text(json.dumps(odd))

    def fail(pristine, cells):
        if any("spoils" in cell.source for cell in cells):
            raise KeyError("first line\nTraceback")
        return find_answers(pristine, cells)

    monkeypatch.setattr("ddp_exercises.grading.grader.find_answers", fail)
    report = tmp_path / "r.json"
    assert cli.main(["grade", str(right_and_odd), "--json", str(report)]) == 2
    assert {each["learner"]: each["points"] for each in json.loads(report.read_text())} == {
        "right": 7,
        "odd": None,
    }
    assert "Traceback\n" not in capsys.readouterr().out


KERNELS = {  # What these write into a notebook names an environment of the learner's machine.
    "conda": {"kernelspec": {"name": "conda-env-ddp-py", "display_name": "Python [conda env:ddp]"}},
    "vscode": {
        "kernelspec": {"name": ".venv", "display_name": ".venv (3.12.7)", "language": "python"},
        "language_info": {"name": "python", "version": "3.12.7"},
        "vscode": {"interpreter": {"hash": "31f2aee4e71d21fb"}},
    },
}


@pytest.mark.slow
def test_nbval_runs_a_notebook_of_another_environment_as_the_guide_says(tmp_path):
    """The kernel that the notebook asks for is not here; without the option each cell fails."""
    guide = (ROOT / "docs/GRADING.md").read_text()
    (options, path) = re.search(r"`pytest (.*--nbval-current-env) (\S+\.ipynb)`", guide).groups()
    notebook = solved()
    keep = ("imports", "answer-2-3", "check-2-3")
    notebook["cells"] = [cell for cell in notebook["cells"] if cell["id"] in keep]
    paths = [path.replace("ada", learner) for learner in KERNELS]
    for place, kernel in zip(paths, KERNELS.values(), strict=True):
        notebook["metadata"] = kernel
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text(json.dumps(notebook))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options.split(), *paths]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout
