"""What the README and docs/ say is so: errors, numbers, links, and one screen of README."""

import inspect
import json
import re
from pathlib import Path
from statistics import geometric_mean

import build
import elsewhere
import pytest
from PIL import Image

from ddp_course import errors
from ddp_course.lab.measuring.results import Comparison
from ddp_course.lab.showing.plots import comparison_message
from ddp_exercises import errors as exercise_errors
from manyranks import errors as launch_errors

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
README = PAGES[0].read_text()


def test_the_readme_is_short_and_leads_to_every_page():
    assert len(README.splitlines()) <= 150
    pages = {path.name for path in PAGES[1:]}
    assert pages - {"RELEASING.md"} == set(re.findall(r"\]\(docs/([A-Z0-9_]+\.md)\)", README))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_table_of_errors_is_errors_py():
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "ERRORS.md").read_text(), re.M)
    bases = (errors.CourseError, launch_errors.ManyranksError)
    own = {
        error
        for module in (errors, launch_errors, exercise_errors)
        for _, error in inspect.getmembers(module, inspect.isclass)
        if issubclass(error, Exception)
    }
    assert sorted(table) == sorted(error.__name__ for error in own.difference(bases))
    assert all(issubclass(error, bases) for error in own)


def test_the_tree_of_errors_is_drawn_as_it_is():
    drawn = re.findall(r"^[ │├└─]*(\w+Error|\w+Timeout)\b", launch_errors.__doc__, re.M)
    assert drawn == [
        error.__name__
        for error in vars(launch_errors).values()
        if inspect.isclass(error) and issubclass(error, Exception)
    ]


def test_every_exception_of_the_course_is_in_errors_py():
    elsewhere = [
        (path.name, line)
        for path in ROOT.glob("ddp_course/**/*.py")
        for line in re.findall(
            r"^class \w+\([^)]*(?:Error|Exception|Wrong)\b[^)]*\):", path.read_text(), re.M
        )
        if path.name != "errors.py"
    ]
    assert elsewhere == []


def test_the_readmes_figure_and_its_caption_are_of_one_run():
    results = Comparison.from_json((ROOT / "docs" / "figures" / "compare.json").read_text())
    drawn = Image.open(ROOT / "docs" / "figures" / "compare.png").text["Description"]
    assert drawn == comparison_message(results)
    [server] = [stage.speed_up for stage in results.stages if stage.stage == "3"]
    assert (
        f"A server makes 4 devices {server:.1f} times as fast as one" in README
        and f"{server:.1f} (server)" in drawn
    )


def test_the_readmes_figures_are_those_stored_in_lessons():
    figures = build.stored_figures(ROOT)
    assert len(figures) == 3
    for path, png in figures.items():
        assert f"(docs/figures/{path.name})" in README
        assert path.read_bytes() == png, f"{path.name}: run `python authoring/build.py`"


def test_the_table_of_stages_is_the_ladder():
    assert build.readme(ROOT) == README and "| 4 | `stage4_ring` |" in README


def measured(benchmark, part):
    return json.loads((ROOT / "results" / f"bench_{benchmark}.json").read_text())["parts"][part][
        "rows"
    ]


def test_the_ratios_in_the_readme_are_those_of_the_reports():
    rings = measured("ring", "rings")
    memory = measured("ddp", "memory")
    tensors = [row["ours"] / row["torch"] for row in memory if row["bytes"] == "tensors"]
    ratios = [
        f"{geometric_mean(row['ours'] / row['torch'] for row in measured('ddp', 'steps')):.2f}",
        f"{tensors[0]:.2f}, with gradients as bucket views {tensors[1]:.2f}",
        f"{geometric_mean(row['stage 4'] / row['gloo'] for row in rings):.2f}",
        f"{geometric_mean(row['pipelined'] / row['gloo'] for row in rings):.2f}",
    ]
    table = README.split("| ours over torch's | |\n|---|---|\n")[1].split("\n\n")[0]
    assert [line.split(" | ")[1].removesuffix(" |") for line in table.splitlines()] == ratios


def test_what_the_readme_says_of_a_gpu_is_in_its_report():
    report = json.loads((ROOT / "results" / "gpu.json").read_text())
    steps = report["parts"]["steps"]
    ratios = {8: [], 64: []}
    for row in steps["rows"]:
        ratios[row["samples"]].append(row["ours"] / row["torch"])
    said = (
        f"On one {steps['device']} ([results](results/gpu.json)) all is right, and a step of ours"
        f" takes {geometric_mean(ratios[64]):.2f} of torch's time ({max(ratios[8]):.2f} at most"
    )
    assert said in README
    right = [row["answer"] for row in report["answers"] if row["is it"] in ("right", "safe")]
    assert "yes" in right and "no" not in right


def test_what_lesson_00_says_of_a_gpu_is_in_its_report():
    lesson = (ROOT / "authoring" / "lessons" / "00_start_here.py").read_text("utf-8")
    rows = json.loads((ROOT / "results" / "gpu.json").read_text())["parts"]["lessons"]["rows"]
    alone, server, ring, buckets = (
        row["step_ms"] for row in rows if row["stage"] in ("1", "3", "4", "5")
    )
    said = (
        f"took {alone:.0f} ms on the GPU alone,\n{server:.0f} ms with the server, {ring:.0f} ms"
        f" with the ring and {buckets:.0f} ms with buckets"
    )
    assert said in lesson
    more = f"the ring adds {ring - alone:.0f} ms to the single device's time, buckets add"
    assert f"{more} {buckets - alone:.0f}." in lesson


def test_the_tests_that_find_what_others_get_wrong_exist():
    named = re.findall(r"`(tests/[\w/.]+)::(\w+)`", (ROOT / "docs" / "MISTAKES.md").read_text())
    assert len(named) >= 9
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_the_readme_clones_from_the_address_of_the_project():
    [address] = re.findall(r"^git clone (\S+)", README, re.M)
    assert address == elsewhere.repository()


def test_twenty_minutes_end_with_a_ring_that_beats_the_server(capsys):
    """The page's own cell, with its two lines filled in."""
    page = (ROOT / "docs" / "TWENTY_MINUTES.md").read_text()
    cell, answer = re.findall(r"```python\n(.*?)```", page, re.S)
    gap = "        ...  # your turn: two lines\n"
    assert gap in cell
    names = {}
    exec(cell.replace(gap, answer), names)
    assert capsys.readouterr().out == f"{[[1111.0] * 3] * 4}\n"
    assert names["ms"]["my ring"] < 0.6 * names["ms"]["server"]
    with pytest.raises(AssertionError, match="write the two lines"):
        exec(cell, {})
