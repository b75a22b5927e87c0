"""The lessons: they run, their checks print what is stored, and they keep to their form.

The form makes them readable.
"""

import ast
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import denied
import nbformat
import pytest

from ddp_course.lab import claims
from ddp_course.lab.measuring.claims import KINDS

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = str(ROOT / "tests" / "support")
LESSONS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
NAMES = [path.stem for path in LESSONS]
CHECK = "# NBVAL_CHECK_OUTPUT"
# Lines of a cell: half of all cells of a lesson have so many at most, 7.5 in the other lessons.
MEDIAN = {
    "03_parameter_server": 8,
    "05_bucketed_ddp": 10,
    "06_complete_ddp": 11,
    "07_sharding": 16,
    "11_when_things_fail": 12,
}
# Lines of the longest cell, 20 in the other lessons: the core of DDP, a class, stands in one cell.
LONGEST = {"06_complete_ddp": 24, "07_sharding": 21, "13_predict_before_you_buy": 21}


def read(path):
    return nbformat.read(path, as_version=4)


def code(notebook):
    """Return the lesson's own code cells: without the one that installs the course on Colab."""
    return [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code" and cell.id != "install-elsewhere"
    ]


def prose(notebook):
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def lines(cell):
    return [line for line in cell.source.splitlines() if line.strip()]


def run_nbval(paths, folder, without_namespaces=False, listen=False, **environ):
    """Run notebooks by nbval in `folder`, with a configuration of its own.

    Return the finished process. With `listen`, a cell that shows nothing for five seconds fails.
    """
    ini = folder / "nbval.ini"
    ini.write_text("[pytest]\n")
    command = [sys.executable]
    if without_namespaces:
        command.append(denied.__file__)
    command += [
        "-m",
        "pytest",
        "-c",
        str(ini),
        "--rootdir",
        str(folder),
        "--noconftest",
        "-q",
        "--nbval-lax",
        "--nbval-cell-timeout=900",
        "-p",
        "no:cacheprovider",
    ]
    if listen:
        command += ["-p", "silence"]
    command += map(str, paths)
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=3600,
        env={**os.environ, "PYTHONPATH": SUPPORT, **environ},
    )


def altered(notebook, world_size):
    """Return the notebook as a learner on a smaller machine would run it."""
    imports = code(notebook)[0]
    imports.source = imports.source.replace("K = 4", f"K = {world_size}")
    return notebook


def lessons_by_cost():
    """Return lessons as parameters.

    The two that take longest run with the rest of the slow tests.
    """
    lessons = []
    for path in LESSONS:
        longest = path.name.startswith(("10_", "15_"))
        marks = () if longest else pytest.mark.lessons
        lessons.append(pytest.param(path, marks=marks, id=path.stem))
    return lessons


@pytest.mark.slow
@pytest.mark.parametrize("path", lessons_by_cost())
def test_lesson_runs_from_a_copy_in_another_folder(path, tmp_path):
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    done = run_nbval([copy], tmp_path, listen=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


SMALLER = dict.fromkeys(LESSONS, pytest.mark.weekly)
SMALLER |= {path: pytest.mark.slow for path in LESSONS if path.stem == "04_ring_all_reduce"}


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=mark) for path, mark in SMALLER.items()]
)
def test_lesson_runs_at_world_size_2_without_namespaces(path, tmp_path):
    nbformat.write(altered(read(path), 2), tmp_path / path.name)
    done = run_nbval([path.name], tmp_path, without_namespaces=True)
    assert done.returncode == 0, done.stdout[-6000:]


PLAN = re.compile(r"^\| [^|]*\| (\d\d) \| (\*.*) \|$", re.MULTILINE)
PLANNED = sorted(set(PLAN.findall((ROOT / "docs" / "WORKSHOP.md").read_text("utf-8"))))


def planned(notebook, sections):
    """Return the cells of a lesson that a plan of the workshop runs.

    They are its imports and the cells of `sections`, such as "*Predict* to *Plot*, then *Count*".
    """
    headings = {}
    for position, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            for heading in re.findall(r"^## (.+)$", cell.source, re.MULTILINE):
                headings[heading] = position
    begins = [*headings.values(), len(notebook.cells)]
    kept = [code(notebook)[0]]
    for first, last in re.findall(r"\*([^*]+)\*(?: to \*([^*]+)\*)?", sections):
        end = begins[begins.index(headings[last or first]) + 1]
        kept += notebook.cells[headings[first] : end]
    notebook.cells = kept
    return notebook


def test_the_plans_of_the_workshop_name_lessons_and_sections():
    assert {number for number, _ in PLANNED} >= {"00", "02", "03", "04", "05", "06"}
    for number, sections in PLANNED:
        [path] = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
        assert len(code(planned(read(path), sections))) > 3, (number, sections)


@pytest.mark.slow
@pytest.mark.lessons
@pytest.mark.parametrize(("number", "sections"), PLANNED)
def test_a_plan_of_the_workshop_needs_no_section_that_it_skips(number, sections, tmp_path):
    [path] = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    nbformat.write(planned(read(path), sections), tmp_path / path.name)
    done = run_nbval([path.name], tmp_path)
    assert done.returncode == 0, done.stdout[-6000:]


def test_nbval_hears_silence_and_sees_another_output(tmp_path):
    """A cell that says nothing for long fails, and so does a check that prints something else."""
    computing = "import time\nend = time.process_time() + 2\nwhile time.process_time() < end: "
    cells = {
        "silent": nbformat.v4.new_code_cell(computing + "pass"),
        "says_something": nbformat.v4.new_code_cell(computing + "print('.')"),
        "wrong": nbformat.v4.new_code_cell(f"{CHECK}\nprint('twice the bytes')"),
    }
    stored = nbformat.v4.new_output("stream", name="stdout", text="half the bytes\n")
    cells["wrong"].outputs = [stored]
    cells["wrong"].execution_count = 1
    for name, cell in cells.items():
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / f"{name}.ipynb")
    names = [f"{name}.ipynb" for name in cells]
    done = run_nbval(names, tmp_path, listen=True, DDP_COURSE_SILENCE="1")
    failed = set(re.findall(r"FAILED (\w+)\.ipynb", done.stdout))
    assert failed == {"silent", "wrong"}, done.stdout
    assert done.stdout.count("showed nothing for") >= 1, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["03_parameter_server", "04_ring_all_reduce"])
def test_lesson_runs_again_with_another_number_of_ranks(name, tmp_path):
    """All cells run with K = 2, and then in the same kernel with K = 3."""
    path = ROOT / "notebooks" / f"{name}.ipynb"
    notebook, again = (altered(read(path), world_size) for world_size in (2, 3))
    for cell in again.cells:
        cell.id = f"again-{cell.id}"
    notebook.cells += again.cells
    nbformat.write(notebook, tmp_path / path.name)
    done = run_nbval([path.name], tmp_path)
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.weekly
@pytest.mark.parametrize("path", LESSONS[:7], ids=NAMES[:7])
def test_lesson_runs_where_ranks_are_not_forked(path, tmp_path):
    """Lessons 00 to 06 run with ranks that are started anew, as on macOS."""
    (tmp_path / path.name).write_bytes(path.read_bytes())
    done = run_nbval([path.name], tmp_path, MANYRANKS_START="spawn")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("path", LESSONS, ids=NAMES)
def test_lesson_is_stored_with_its_outputs(path):
    notebook = read(path)
    for cell in code(notebook):
        assert cell.execution_count, f"cell {cell.id} was never run: nbval would skip it silently"
        assert not any(output.output_type == "error" for output in cell.outputs), (
            f"an error is stored in {cell.id}"
        )
        assert not any(output.get("name") == "stderr" for output in cell.outputs), (
            f"a warning is stored in {cell.id}"
        )
        for output in (output for output in cell.outputs if "image/png" in output.get("data", {})):
            said = output.metadata.get("image/png", {}).get("alt", "")
            assert output.data["text/plain"] in said, (
                f"the alternative text in {cell.id} does not say the message"
            )
    checks = [cell for cell in code(notebook) if CHECK in cell.source]
    assert checks, "no check cell"
    for cell in checks:
        assert cell.source.startswith(CHECK), (
            f"{cell.id}: nbval sees the comment in the first line only"
        )
        text = "".join(output.get("text", "") for output in cell.outputs)
        assert text.strip(), f"{cell.id} prints nothing, so it checks nothing"
        assert not re.search(r"0x[0-9a-f]{6,}|\d(\.\d+)? (ms|s)\b", text), (
            f"{cell.id} prints what changes: {text}"
        )


@pytest.mark.parametrize("path", LESSONS, ids=NAMES)
def test_lesson_keeps_its_form(path):
    notebook = read(path)
    cells = code(notebook)
    lengths = [len(lines(cell)) for cell in cells]
    for_learners = ("task-", "faded-", "on-your-gpus", "opening-", "predict", "reveal")
    own = [cell for cell in cells if not cell.id.startswith(for_learners)]
    assert len(own) <= 31, f"{len(own)} code cells"
    assert max(lengths) <= LONGEST.get(path.stem, 20), (
        f"cell {cells[lengths.index(max(lengths))].id} has {max(lengths)} lines"
    )
    most = MEDIAN.get(path.stem, 7.5)
    assert statistics.median(lengths) <= most, f"median {statistics.median(lengths)} lines"
    texts = re.compile(r"""["'][^"']{40,}""")  # A sentence for people stays in one piece.
    wide = [line for cell in cells for line in lines(cell) if len(line) > 100]
    assert all(map(texts.search, wide)), wide
    visible = [len(lines(cell)) for cell in own if "jupyter" not in cell.metadata]
    assert sum(visible) <= 210, f"{sum(visible)} lines to read: fold what only measures or draws"
    importing = [
        cell for cell in cells if re.search(r"^\s*(import|from) ", cell.source, re.MULTILINE)
    ]
    assert importing == cells[:1], "there is one import cell, the first"
    modules = set(re.findall(r"^(?:from|import) (\w+)", cells[0].source, re.MULTILINE))
    ours = {module for module in modules if module in OURS}
    assert "ddp_course" in ours or path.stem.startswith("00")
    assert modules - sys.stdlib_module_names - {"torch"} == ours
    for magic in ("!", "%"):
        assert not any(line.startswith(magic) for cell in cells for line in lines(cell))


OURS = ("manyranks", "ddp_course", "ddp_exercises", "ddp_predictions")
PARTS = ["you can**", "## Predict", "## Check yourself", "<summary>Answer</summary>"]


@pytest.mark.parametrize("path", LESSONS, ids=NAMES)
def test_lesson_has_its_parts(path):
    text = prose(read(path))
    number = int(path.name[:2])
    wanted = list(PARTS)
    if number:
        wanted.append("## What torch does")
    missing = [part for part in wanted if part not in text]
    assert not missing
    assert text.count("<summary>Answer</summary>") == 3
    assert text.count("<details>") == text.count("</details>")
    source = "\n".join(cell.source for cell in code(read(path)))
    assert "show.predict(" in source
    assert ".reveal(" in source
    if number:
        assert f"exercises/{path.name}" in text
    if 2 <= number <= 8:
        assert "show.diff(" in source, "the difference to the stage before is shown from the source"


def test_every_claim_is_decided_in_one_lesson():
    decided = claims.decided()
    assert [claim.number for claim in decided] == list(range(1, 27))
    verdicts = {claim.verdict.split(" if ")[0].split(" up to ")[0] for claim in decided}
    assert verdicts == {"holds", "holds only", "false"}


DRAWN = {
    "01/digits",
    "02/sketch",
    "04/stepper",
    "04/half-way",
    "09/mesh",
    "09/all-ways",
}


@pytest.mark.parametrize("path", LESSONS, ids=NAMES)
def test_what_is_shown_says_where_it_comes_from(path):
    """Every figure of numbers, in its text, and every verdict says where it comes from.

    It is measured, counted, simulated or derived. A widget has a figure beside it for where widgets
    do not live; questions can be read without one, and a bar leaves nothing.
    """
    for cell in code(read(path)):
        for output in cell.outputs:
            data = output.get("data", {})
            if "application/vnd.jupyter.widget-view+json" in data and "image/png" not in data:
                text = data["text/plain"]
                assert text == "" or "( )" in text, f"{cell.id}: {text}"
            elif "image/png" in data and f"{path.name[:2]}/{cell.id}" not in DRAWN:
                alt = output.metadata.get("image/png", {}).get("alt", "")
                assert any(kind in alt for kind in KINDS), f"{cell.id}: {alt}"
            printed = output.get("text", "") if output.get("name") == "stdout" else ""
            for line in printed.splitlines():
                if line.startswith("Claim"):
                    assert any(f"({kind})" in line for kind in KINDS), line


@pytest.mark.parametrize("path", LESSONS, ids=NAMES)
def test_lesson_ends_with_three_lines_and_the_next_one(path):
    end = prose(read(path)).split("## In three lines")[-1]
    assert [f"\n{number}. " in end for number in (1, 2, 3, 4)] == [True, True, True, False]
    number = int(path.name[:2])
    following = [name for name in NAMES if name.startswith(f"{number + 1:02}")]
    assert all(f"({name}.ipynb)" in end for name in following)


@pytest.mark.parametrize("path", LESSONS, ids=NAMES)
def test_a_figure_is_the_last_expression_of_its_cell(path):
    """Jupyter shows no other figure."""
    for cell in code(read(path)):
        if cell.source.startswith("%%"):
            continue
        for statement in ast.parse(cell.source).body[:-1]:
            called = ast.unparse(statement).partition("(")[0]
            shows_itself = called in ("show.command", "show.verdict")
            assert shows_itself or not called.startswith("show."), cell.id
