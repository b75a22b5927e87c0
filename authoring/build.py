"""Build what is made from sources: `python authoring/build.py [--check] [--execute] [--only 04]`.

`--publish https://github.com/owner/name` first says where the course is published (elsewhere.py).

    authoring/lessons/NN_topic.py            ->  notebooks/NN_topic.ipynb
    authoring/lessons/NN_topic_exercise.py   ->  exercises/NN_topic.ipynb and
                                                 solutions/NN_topic.ipynb
    ddp_course/ladder.py                     ->  the table of stages in README.md
    docs/figures/compare.json                ->  the caption of the figure in README.md
    authoring/published.txt                  ->  where README.md begins, badges of notebooks
    authoring/drawings.py                    ->  docs/figures/iteration_NN.svg
    authoring/clinic/*.py                    ->  exercises/clinic/patient_NN.py

Sources are jupytext's py:percent. A cell is named in its first line (`# %% ring-animation`), or
else after its first words, and its id is made of the name, so that a rebuild is the same to the
byte. Outputs of cells whose source did not change are kept. In exercises nbgrader's markers count:
what stands between `### BEGIN SOLUTION` and `### END SOLUTION` becomes a NotImplementedError, what
stands between the HIDDEN TESTS markers goes. Lessons and exercises, never solutions, get links to
each other, and once the course is published badges and a cell that installs it on Colab. With
`folded=true` a cell's code is behind a click. A cell `answer-4-2` is the learner's answer to task
4.2; `check-4-2` with `points=2` is its check.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import drawings
import elsewhere
import jupytext
import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from ddp_course import ladder
from ddp_course.lab.measuring.results import Comparison
from ddp_exercises.tasks import edit_solution

ROOT = Path(__file__).resolve().parents[1]
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "pygments_lexer": "ipython3",
}
MARKER = re.compile(r"^(\s*)###\s*(BEGIN|END)\s+(SOLUTION|HIDDEN TESTS)\s*$")
NEAR_MARKER = re.compile(r"^\s*#+\s*(BEGIN|END)\s+(SOLUTIONS?|HIDDEN\s+TESTS?)\b", re.IGNORECASE)
TASK_CELL = re.compile(r"(answer|check)-(\d+)-(\d+)$")
TASK_TITLE = re.compile(r"^#+\s+(?:Exercise\s+)?(\d+\.\d+)[:.]?\s+(.+?)\s*$", re.MULTILINE)
PATIENT = re.compile(r"^# %% (\d+) (.+)$", re.MULTILINE)
HEALTHY = "Healthy: it trains for three epochs."
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
WIDGET_ID = re.compile(r"[0-9a-f]{32}")
LOCAL_NAMES = re.compile(r"/tmp/ipykernel_\d+/\d+\.py")


class SourceError(ValueError):
    """A lesson's source cannot be built; the message names the file, the cell and the line."""


def main(arguments=None):
    """Build, check or execute what was asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--check",
        action="store_true",
        help="change nothing; fail if a notebook is not as its source",
    )
    parser.add_argument(
        "--execute", action="store_true", help="run what was built, and keep the outputs"
    )
    parser.add_argument(
        "--only",
        metavar="NN",
        action="append",
        help="only lessons whose name starts so; repeatable",
    )
    parser.add_argument("--publish", metavar="URL", help="where the course is published")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    try:
        if args.publish is not None:
            elsewhere.publish(args.publish, args.root)
        built = build_all(args.root, args.only)
        if args.check:
            return report_differences(args.root, built, complete=not args.only)
        write_documents(args.root)
        for path, notebook in built.items():
            keep_outputs(notebook, path)
            write(notebook, path)
        return execute_all(args.root, built) if args.execute else 0
    except ValueError as error:  # Among them are SourceErrors.
        print(f"build.py: {error}", file=sys.stderr)
        return 2


def write_documents(root):
    """Write what README.md and docs/figures have from sources, where they are."""
    front = root / "README.md"
    if front.exists():
        front.write_text(readme(root))
    if (root / "docs" / "figures").exists():
        for path, drawing in pictures(root).items():
            path.write_text(drawing, encoding="utf-8")
    for path, script in patients(root).items():
        path.write_text(script, encoding="utf-8")


def build_all(root, only=None):
    """Return {path: notebook without outputs} for all sources, or those that start as `only`."""
    built = {}
    for source in sorted((root / "authoring" / "lessons").glob("[0-9][0-9]_*.py")):
        if only and not source.name.startswith(tuple(only)):
            continue
        topic = source.stem.removesuffix("_exercise")
        name = f"{topic}.ipynb"
        if topic == source.stem:
            notebook = lesson(source)
            add_ways_in(notebook, "notebooks", topic, source.with_name(f"{topic}_exercise.py"))
            built[root / "notebooks" / name] = notebook
        else:
            unsolved = exercise(source, solved=False)
            add_ways_in(unsolved, "exercises", topic, source.with_name(f"{topic}.py"))
            built[root / "exercises" / name] = unsolved
            built[root / "solutions" / name] = exercise(source, solved=True)
    return built


def add_ways_in(notebook, folder, topic, counterpart):
    """Put the cells that open a notebook elsewhere below its title.

    A lesson also gets a link to its exercise, and an exercise to its lesson, if the source of that
    one, `counterpart`, is there.
    """
    other_folder = None
    if counterpart.exists():
        other_folder = "exercises" if folder == "notebooks" else "notebooks"
    below_title = 0
    if notebook.cells[0].cell_type == "markdown":
        below_title = 1
    notebook.cells[below_title:below_title] = elsewhere.cells(folder, topic, other_folder)


def lesson(source):
    """Return the notebook of one lesson, without outputs."""
    cells = read_cells(source)
    for cell in cells:
        if any(MARKER.match(line) for line in cell.source.splitlines()):
            raise SourceError(f"{source.name}: a solution marker in a lesson (cell {cell.id})")
    return notebook_of(cells)


def exercise(source, solved):
    """Return the notebook of one exercise: with solutions, or with NotImplementedError instead."""
    cells = read_cells(source)
    titles = {}
    for cell in cells:
        if cell.cell_type == "markdown":
            titles |= dict(TASK_TITLE.findall(cell.source))
            continue
        where = f"{source.name}, cell {cell.id}"
        task = None
        role_and_task = TASK_CELL.match(cell.id)
        if role_and_task:
            role, exercise_number, task_number = role_and_task.groups()
            task = f"{exercise_number}.{task_number}"
            mark_for_grading(cell, role, task, where)
        message = f"Exercise {task}: {titles.get(task, 'your turn')}"
        marked = cell.source
        cell.source = without_regions(marked, where, solved, message)
        given = without_regions(marked, where, False, message)
        if given != cell.source:  # The grader starts from what was given out.
            cell.metadata.setdefault("ddp_course", {})["given"] = given
    check_tasks(cells, source)
    notebook = notebook_of(cells)
    notebook.metadata["ddp_course"] = {"exercise": int(source.name[:2])}
    return notebook


def without_regions(text, where, solved, message):
    """Return the text of a cell without its marked regions.

    If `solved`, their solutions stay, and else a NotImplementedError of this `message` takes their
    places. Refuses markers that are nested, unclosed, misspelt or unopened.
    """
    lines = []
    inside = None  # This is the kind of the region that a line is in.
    last_marker = 0
    for number, line in enumerate(text.splitlines(), 1):
        marker = MARKER.match(line)
        if not marker:
            if NEAR_MARKER.match(line):
                raise SourceError(f"{where}, line {number}: not quite a marker: {line.strip()}")
            if inside is None or (inside == "SOLUTION" and solved):
                lines.append(line)
            continue
        indent, edge, kind = marker.groups()
        if edge == "BEGIN" and inside is not None:
            raise SourceError(
                f"{where}, line {number}: BEGIN {kind} inside the {inside} region begun in line"
                f" {last_marker}"
            )
        if edge == "END" and inside != kind:
            raise SourceError(f"{where}, line {number}: END {kind} without its BEGIN")
        if edge == "BEGIN" and kind == "SOLUTION" and not solved:
            literal = json.dumps(message, ensure_ascii=False)
            lines.append(f"{indent}raise NotImplementedError({literal})")
        inside = kind if edge == "BEGIN" else None
        last_marker = number
    if inside is not None:
        raise SourceError(f"{where}, line {last_marker}: BEGIN {inside} is never closed")
    return "\n".join(lines).rstrip()


def mark_for_grading(cell, role, task, where):
    """Put task, role and points into the metadata, in the words of nbgrader too."""
    is_check = role == "check"
    points = cell.metadata.pop("points", None)
    if is_check != (points is not None):
        raise SourceError(f"{where}: a check cell states its points, an answer cell does not")
    cell.metadata["ddp_course"] = {"role": role, "task": task}
    cell.metadata["nbgrader"] = {
        "grade": is_check,
        "grade_id": cell.id,
        "locked": is_check,
        "schema_version": 3,
        "solution": role == "answer",
        "task": False,
    }
    if is_check:
        cell.metadata["ddp_course"]["points"] = points
        cell.metadata["nbgrader"]["points"] = points


def check_tasks(cells, source):
    """Raise SourceError unless every task has one answer cell and one check cell."""
    tasks = {"answer": [], "check": []}
    for cell in cells:
        if TASK_CELL.match(cell.id):
            role, task = cell.id.split("-", 1)
            tasks[role].append(task)
    if tasks["answer"] != tasks["check"]:
        odd = sorted(set(tasks["answer"]) ^ set(tasks["check"])) or "their order"
        raise SourceError(f"{source.name}: answer and check cells do not match: {odd}")


def read_cells(source):
    """Return the cells of a py:percent file, with ids and without jupytext's own metadata."""
    try:
        text = source.read_text(encoding="utf-8")
        parsed = jupytext.reads(text, fmt="py:percent")
    except Exception as error:
        raise SourceError(f"{source.name}: {error}") from error
    control = CONTROL.search(text)
    if control:
        # A formula lost its fraction: a tool had read the first two characters of \frac as one.
        line = text.count("\n", 0, control.start()) + 1
        raise SourceError(f"{source.name}, line {line}: a control character, {control[0]!r}")
    cells = []
    taken = set()
    for cell in parsed.cells:
        name = cell.metadata.pop("title", None) or first_words(cell)
        for key in ("lines_to_next_cell", "cell_marker"):
            cell.metadata.pop(key, None)
        if cell.metadata.pop("folded", False):
            cell.metadata.update(elsewhere.FOLDED)
        identifier = unused(slug(name) or cell.cell_type, taken)
        make = new_markdown_cell if cell.cell_type == "markdown" else new_code_cell
        cells.append(make(cell.source, id=identifier, metadata=cell.metadata))
    return cells


def first_words(cell):
    """Return the first five words of a cell, to name it by."""
    return " ".join(re.findall(r"\w+", cell.source)[:5])


def slug(name):
    """Return a name as an id: letters, digits and hyphens, at most 48."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:48].strip("-")


def unused(identifier, taken):
    """Return `identifier`, with a number behind it if it is taken."""
    candidate = identifier
    number = 2
    while candidate in taken:
        candidate = f"{identifier}-{number}"
        number += 1
    taken.add(candidate)
    return candidate


def notebook_of(cells):
    """Return a notebook with our fixed metadata."""
    return new_notebook(
        cells=cells, metadata={"kernelspec": dict(KERNEL), "language_info": dict(LANGUAGE)}
    )


def keep_outputs(notebook, path):
    """Take over the outputs that an earlier build at `path` has for cells that did not change."""
    if not path.exists():
        return
    old = nbformat.read(path, as_version=4)
    old_cells = {(cell.id, cell.source): cell for cell in old.cells if cell.cell_type == "code"}
    for cell in notebook.cells:
        same = old_cells.get((cell.id, cell.source))
        if cell.cell_type == "code" and same:
            cell.outputs = same.outputs
            cell.execution_count = same.execution_count
    if "widgets" in old.metadata and any(cell.get("outputs") for cell in notebook.cells):
        notebook.metadata["widgets"] = old.metadata["widgets"]


def write(notebook, path):
    """Write a notebook, whole or not at all, and only if it changed."""
    nbformat.validate(notebook)
    text = nbformat.writes(notebook, version=4).rstrip("\n") + "\n"
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
    print(f"wrote {path.parent.name}/{path.name}")


def without_outputs(path):
    """Return the text of the notebook at `path` as it would be without any outputs."""
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
            cell.execution_count = None
    return nbformat.writes(notebook, version=4)


def readme(root):
    """Return the text of README.md, with what is made for it in place of what was there.

    That is where its commands are typed, the caption of its figure, and the table of `ladder.py`,
    each between its two marks.
    """
    text = (root / "README.md").read_text()
    parts = {
        "caption": caption(root),
        "where": elsewhere.first_words(),
        "ladder": ladder_table(),
    }
    for mark, part in parts.items():
        before, _, after = text.split(f"<!-- {mark} -->")
        text = f"{before}<!-- {mark} -->\n\n{part}\n\n<!-- {mark} -->{after}"
    return text


def rungs():
    """Return (number, module, ideas, times to average) of each module, in the order of climbing."""
    rows = []
    for module in ladder.MODULES:
        steps = [stage for stage in ladder.STAGES.values() if stage.module == module]
        ideas = dict.fromkeys(step.idea for step in steps)
        times = dict.fromkeys(step.time for step in steps)
        number = module.split("_")[0].removeprefix("stage")
        rows.append((number, module, ", then ".join(ideas), ", then ".join(times)))
    return rows


def ladder_table():
    """Return the ladder as the README's table, one row per module."""
    rows = [
        "| N | module | the one new idea | time to average p bytes over K ranks, link of b"
        " bytes/s |",
        "|---|---|---|---|",
    ]
    for number, module, ideas, times in rungs():
        rows.append(f"| {number} | `{module}` | {ideas} | {times} |")
    return "\n".join(rows)


def pictures(root):
    """Return {path: text} of the drawings of an iteration."""
    folder = root / "docs" / "figures"
    return {folder / name: drawing for name, drawing in drawings.iterations().items()}


def caption(root):
    """Return what the figure of the README shows, from the results that it was drawn from."""
    results = Comparison.from_json((root / "docs" / "figures" / "compare.json").read_text())
    speeds = {stage.stage: f"{stage.speed_up:.1f}" for stage in results.stages}
    devices = results.world_size
    return textwrap.fill(
        "*`make compare` on two CPU cores, in the virtual time of emulated devices and links:"
        " all end with the same weights."
        f" A server makes {devices} devices {speeds['3']} times as fast as one,"
        f" a ring {speeds['4']} times, buckets {speeds['5']} times.*",
        width=120,
    )


def report_differences(root, built, complete):
    """Print every notebook that differs from its source, or has none; return the exit code."""
    differences = []
    for path, notebook in built.items():
        if not path.exists():
            differences.append(f"{path.parent.name}/{path.name} is missing")
        elif without_outputs(path) != nbformat.writes(notebook, version=4):
            differences.append(f"{path.parent.name}/{path.name} differs from its source")
    if complete:
        differences += differing_documents(root)
        for folder in ("notebooks", "exercises", "solutions"):
            strays = set((root / folder).glob("*.ipynb")) - built.keys()
            for path in sorted(strays):
                differences.append(f"{folder}/{path.name} has no source in authoring/lessons")
    if differences:
        differences.append("run `python authoring/build.py` and commit what it writes")
    for line in differences:
        print(f"build.py: {line}", file=sys.stderr)
    return 1 if differences else 0


def differing_documents(root):
    """Return a line for each of README.md and the drawings that is not as its source."""
    lines = []
    front = root / "README.md"
    if front.exists() and readme(root) != front.read_text():
        lines.append("README.md differs from ddp_course/ladder.py or docs/figures/compare.json")
    for path, drawing in pictures(root).items():
        if path.exists() and path.read_text(encoding="utf-8") != drawing:
            lines.append(f"docs/figures/{path.name} differs from authoring/drawings.py")
    for path, script in patients(root).items():
        if not path.exists() or path.read_text(encoding="utf-8") != script:
            lines.append(f"exercises/clinic/{path.name} differs from authoring/clinic")
    return lines


def patients(root):
    """Return {path: script} of the clinic's patients: the healthy script with the edits of each."""
    folder = root / "authoring" / "clinic"
    if not folder.exists():
        return {}
    healthy = (folder / "healthy.py").read_text(encoding="utf-8")
    _, *pieces = PATIENT.split((folder / "patients.py").read_text(encoding="utf-8"))
    scripts = {}
    for start in range(0, len(pieces), 3):
        number, symptom, edits = pieces[start : start + 3]
        name = f"patient_{int(number):02}"
        script = healthy.replace(HEALTHY, f"Patient {number}: {symptom}").replace("healthy", name)
        path = root / "exercises" / "clinic" / f"{name}.py"
        scripts[path] = edit_solution(script, edits, name)
    return scripts


def execute_all(root, built):
    """Run all lessons and solutions, print the time of each; return 1 if one failed."""
    failed = False
    for path, notebook in built.items():
        if path.parent.name == "exercises":
            continue  # Unsolved exercises raise errors.
        start = time.perf_counter()
        problem = execute(notebook, path, root)
        seconds = time.perf_counter() - start
        print(f"{path.parent.name}/{path.name}: {problem or 'ran'} in {seconds:.1f} s", flush=True)
        if problem:
            failed = True
        else:
            write(notebook, path)
    return 1 if failed else 0


def execute(notebook, path, root):
    """Run a notebook in place, in the folder of `path`; return what went wrong, or None."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook.metadata.pop("widgets", None)
    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources=resources,
        record_timing=False,
        coalesce_streams=True,  # A printed line may come in two pieces.
    )
    try:
        client.execute(env={**os.environ, "PYTHONHASHSEED": "0"})
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        return f"FAILED: {error}"
    tidy(notebook, path, root)
    paths = local_paths(notebook, root)
    return f"FAILED: paths of this machine in the outputs: {paths}" if paths else None


def tidy(notebook, path, root):
    """Make outputs the same on every machine: no paths, no random widget ids, our own metadata."""
    notebook.metadata["language_info"] = dict(LANGUAGE)
    notebook.metadata["kernelspec"] = dict(KERNEL)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = nbformat.from_dict(
                map_text(cell.outputs, lambda text: without_paths(text, root))
            )
    text = nbformat.writes(notebook, version=4)
    for position, random_id in enumerate(widget_ids(notebook)):
        fixed_id = hashlib.md5(f"{path.name} {position}".encode()).hexdigest()
        text = text.replace(random_id, fixed_id)
    renamed = nbformat.reads(text, as_version=4)
    notebook.metadata = renamed.metadata
    notebook.cells = renamed.cells


def widget_ids(notebook):
    """Return the ids of all widgets, which are drawn at random, in an order that is not.

    First come those in the outputs, then those that they refer to, and last the others, by their
    states.
    """
    widgets = notebook.metadata.get("widgets", {})
    of_kernel = widgets.get("application/vnd.jupyter.widget-state+json", {})
    states = {key: json.dumps(state) for key, state in of_kernel.get("state", {}).items()}
    ordered = []
    waiting = [json.dumps([cell.get("outputs") for cell in notebook.cells])]
    while waiting:
        text = waiting.pop(0)
        for key in WIDGET_ID.findall(text):
            if key in states and key not in ordered:
                ordered.append(key)
                waiting.append(states[key])
    others = [key for key in states if key not in ordered]
    return ordered + sorted(others, key=lambda key: WIDGET_ID.sub("", states[key]))


def map_text(thing, change):
    """Apply `change` to every string in nested dicts and lists, except pictures (image/png)."""
    if isinstance(thing, dict):
        changed = {}
        for key, value in thing.items():
            changed[key] = value if key.startswith("image/p") else map_text(value, change)
        return changed
    if isinstance(thing, list):
        return [map_text(value, change) for value in thing]
    return change(thing) if isinstance(thing, str) else thing


def without_paths(text, root):
    """Shorten paths of this checkout, its environment and its temporary cell files."""
    text = LOCAL_NAMES.sub("cell", text)
    libraries = r"/((?:\.venv/)?lib/python[\d.]+/(?:site-packages/)?)?"
    for prefix in {str(root), str(Path(sys.prefix)), str(Path(sys.base_prefix))}:
        text = re.sub(re.escape(prefix) + libraries, "", text)
    return text.replace(str(Path.home()) + "/", "~/")


def local_paths(notebook, root):
    """Return the paths of this machine that are left in the outputs."""
    paths = set()
    texts = []
    for cell in notebook.cells:
        map_text(cell.get("outputs", []), texts.append)
    all_text = "\n".join(texts)
    for prefix in (str(root), sys.prefix, str(Path.home()) + "/", tempfile.gettempdir() + "/"):
        paths.update(re.findall(re.escape(prefix) + r"[\w./-]*", all_text))
    return sorted(paths)


if __name__ == "__main__":
    sys.exit(main())
