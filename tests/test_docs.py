"""What the README and docs/ say is so: errors, numbers, links, and one screen of README."""

import inspect
import json
import re
from pathlib import Path
from statistics import geometric_mean

import build
import elsewhere
import pytest
from chromium import running_browser
from PIL import Image

from ddp_course.base import errors
from ddp_course.lab.measuring.results import Comparison
from ddp_course.lab.showing.plots import comparison_message
from ddp_exercises import errors as exercise_errors
from manyranks import errors as launch_errors

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
README = PAGES[0].read_text()


def test_the_readme_is_one_screen_with_one_figure_and_three_commands():
    spoken = re.sub(r"(?ms)^```.*?^```|^\|.*?$|^<!--.*?$|!\[.*?\]\(.*?\)|\]\(.*?\)", "", README)
    assert len(README.splitlines()) <= 90
    # People read 183 words aloud in a minute (Brysbaert, 2019, a mean over 77 studies).
    assert len(re.findall(r"\S*\w\S*", spoken)) <= 2 * 183, "it takes more than two minutes"
    assert len(re.findall(r"!\[", README)) == 1
    assert len(re.findall(r"^make \w+ ", README, re.M)) == 3
    assert len(re.findall(r"\]\(docs/", README)) <= 6


def test_the_map_leads_to_every_page():
    assert "(docs/MAP.md)" in README
    named = re.findall(r"\]\(([A-Z0-9_]+\.md)\)", (ROOT / "docs" / "MAP.md").read_text())
    assert sorted({*named, "MAP.md"}) == [path.name for path in PAGES[1:]]


def test_the_lines_that_the_readme_says_the_idea_takes():
    [said] = re.findall(r"in the (\d+) lines of", README)
    files = [path for number in range(1, 6) for path in ROOT.glob(f"ddp_course/stage{number}_*.py")]
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert len(files) == 5
    assert abs(lines - int(said)) < 50


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
    said = f"A server makes 4 devices {server:.1f} times as fast as one"
    assert said in " ".join(README.split())
    assert f"{server:.1f} (server)" in drawn


def test_the_table_of_stages_is_the_ladder():
    assert build.readme(ROOT) == README
    assert "| 4 | `stage4_ring` |" in README


def measured(benchmark, part):
    return json.loads((ROOT / "results" / f"bench_{benchmark}.json").read_text())["parts"][part][
        "rows"
    ]


def test_the_ratio_in_the_readme_is_that_of_the_report():
    steps = measured("ddp", "steps")
    ratio = geometric_mean(row["ours"] / row["torch"] for row in steps)
    assert f"A step of stage 6 takes {ratio:.2f} times as long as with PyTorch's class" in README


def test_what_the_readme_says_of_a_gpu_is_in_its_report():
    report = json.loads((ROOT / "results" / "gpu.json").read_text())
    steps = report["parts"]["steps"]
    ratios = {8: [], 64: []}
    for row in steps["rows"]:
        ratios[row["samples"]].append(row["ours"] / row["torch"])
    said = (
        f"On one {steps['device']}** ([results](results/gpu.json)) all checks pass, and stage 6"
        f" takes {geometric_mean(ratios[64]):.2f} times PyTorch's time"
        f" ({max(ratios[8]):.2f} at most"
    )
    assert said in " ".join(README.split())
    right = [row["answer"] for row in report["answers"] if row["is it"] in ("right", "safe")]
    assert "yes" in right
    assert "no" not in right


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


def test_no_page_names_an_address_of_a_course_that_is_published_nowhere():
    if not elsewhere.repository():
        assert [page.name for page in PAGES if "git clone" in page.read_text()] == []


def test_twenty_minutes_end_with_a_ring_that_beats_the_server(capsys):
    """The page's own cell runs, with its two lines filled in."""
    page = (ROOT / "docs" / "TWENTY_MINUTES.md").read_text()
    cell, answer = re.findall(r"```python\n(.*?)```", page, re.S)
    gap = "        ...  # your turn: two lines\n"
    assert gap in cell
    [figure] = re.findall(r"^show\.first_ring\(my_ring\)$", cell, re.M)
    names = {}
    exec(cell.replace(gap, answer).replace(figure, f"figure = {figure}"), names)
    assert "1, 10, 100 and 1000: 1111 1111 1111 1111\n" in capsys.readouterr().out
    mine, server = map(int, re.findall(r"(\d+) ms", names["figure"].alt))
    assert mine < 0.6 * server
    assert "virtual time" in names["figure"].kind


def test_lesson_00_and_twenty_minutes_have_one_ring_to_write():
    page = (ROOT / "docs" / "TWENTY_MINUTES.md").read_text()
    lesson = (ROOT / "authoring" / "lessons" / "00_start_here.py").read_text("utf-8")
    [ring] = re.findall(r"^def my_ring.*?two lines\n", page, re.S | re.M)
    assert ring in lesson


def test_what_is_printed_for_a_workshop_fits_its_pages(tmp_path):
    with running_browser() as browser:
        page = browser.new_page()
        for name, count in {"handout": 1, "slides": 5}.items():
            page.goto((ROOT / "docs" / "workshop" / f"{name}.html").as_uri())
            pictures = "images => images.every(image => image.naturalWidth)"
            assert page.eval_on_selector_all("img", pictures), f"{name}: a figure is missing"
            printed = page.pdf(prefer_css_page_size=True)
            assert len(re.findall(rb"/Type */Page\b", printed)) == count, name
