"""The course as a web site: complete, whole without a network, no dead links, and it moves."""

import json
import math
import re
from functools import cache
from html import unescape
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import build
import elsewhere
import modules
import nbformat
import pytest
from chromium import PALE, fresh_page, running_browser
from web import explorers, pages

from ddp_course.lab.showing import widgets

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.lessons
RING = "notebooks/04_ring_all_reduce.html"
MB = 1_000_000


def builder():
    spec = spec_from_file_location("course_site", ROOT / "authoring" / "site.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The whole site, with few pictures for explorers that tests move, and fewest for others."""
    folder = tmp_path_factory.mktemp("site")
    place = tmp_path_factory.mktemp("published") / "published.txt"
    place.write_text("https://github.com/somebody/their-course\n")
    module = builder()
    module.draw = lambda recipes, most: {
        place: explorers.drawn(recipe, most if place.startswith(Path(RING).stem) else 2)
        for place, recipe in recipes.items()
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(elsewhere, "PUBLISHED", place)
        assert module.main(["--out", str(folder), "--pictures", "24"]) == 0
    return folder


@cache
def links_of(page):
    """Return what the tags of a page lead to or load.

    In text and code, quotes are written as entities.
    """
    found = re.findall(
        r"""<[^<>]*?\s(?:href|src)=("[^"]+"|[^\s>]+)""", page.read_text(encoding="utf-8")
    )
    return [unescape(link.strip('"')) for link in found]


def test_all_lessons_exercises_and_the_reference_are_there(site):
    for folder in ("notebooks", "exercises"):
        wanted = {path.stem for path in (ROOT / folder).glob("[0-9]*.ipynb")}
        assert wanted == {path.stem for path in (site / folder).glob("*.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} == {
        path.stem for path in (site / "docs").glob("*.html")
    }
    assert "ring_all_reduce" in (site / "reference" / "stages.html").read_text()
    assert "every_order" in (site / "reference" / "names_of_manyranks.html").read_text()
    assert not (site / "solutions").exists()


def test_the_reference_has_every_module_and_the_names_of_the_library(tmp_path):
    builder().reference(tmp_path / "reference")
    pages_of = [page.read_text() for page in (tmp_path / "reference").glob("*.md")]
    listed = re.findall(r"^::: (\S+)$", "\n".join(pages_of), re.MULTILINE)
    wanted = set()
    for package in modules.PACKAGES:
        for row in modules.rows_of(package):
            path = Path(row.split()[0]).with_suffix("")
            wanted.add(".".join(path.parts).removesuffix(".__init__"))
    assert len(wanted) > 150
    assert wanted - set(listed) == set()
    assert {"manyranks.launching.launch.launch", "manyranks.links.link.Link"} <= set(listed)


def test_local_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    for page in (page for page in site.rglob("*.html") if page.name != "404.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r'<(script|link|img|iframe)[^>]+(src|href)="?(https?:)?//', text), (
            page.name
        )
        for link in links_of(page):
            if not link.startswith(("http", "#", "data:", "mailto:")):
                assert (page.parent / link.split("#")[0].split("?")[0]).exists(), (
                    f"{page.name}: {link}"
                )


def test_lessons_and_exercises_lead_to_each_other_and_on(site):
    for name in (path.name for path in (site / "exercises").glob("*.html")):
        assert f"../exercises/{name}" in links_of(site / "notebooks" / name)
        assert f"../notebooks/{name}" in links_of(site / "exercises" / name)
    neighbours = {"03_parameter_server.html", "05_bucketed_ddp.html"}
    assert neighbours <= set(links_of(site / RING))
    assert all(
        'class="md-footer__link' in page.read_text() for page in site.glob("notebooks/*.html")
    )


def test_a_page_with_all_that_it_loads_is_small(site):
    for page in site.rglob("*.html"):
        loaded = {(page.parent / link.split("?")[0]).resolve() for link in links_of(page)}
        parts = [
            path
            for path in loaded
            if path.suffix in (".js", ".css", ".png", ".svg") and path.exists()
        ]
        assert page.stat().st_size + sum(path.stat().st_size for path in parts) < 6 * MB, page.name


def test_the_search_knows_words_and_reference_but_no_import_lines(site):
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    text = {entry["location"]: entry["title"] + entry["text"] for entry in entries}
    assert any(
        location.startswith("reference/stages") and "ring_all_reduce" in text[location]
        for location in text
    )
    lessons = " ".join(text[location] for location in text if location.startswith("notebooks/"))
    assert "bottleneck" in lessons
    assert not re.search(r"from ddp_course import .*\bshow\b", lessons)


def test_every_figure_has_a_text_that_says_what_it_shows(site):
    every = [*site.glob("notebooks/*.html"), *site.glob("exercises/*.html"), *site.glob("*.html")]
    for page in every:
        for picture in re.findall(r"<img[^>]*>", page.read_text()):
            text = re.search(r'alt="?([^">]*)', picture)
            assert text, f"{page.name}: {picture[:120]}"
            assert len(text[1]) > 15, f"{page.name}: {picture[:120]}"


def test_formulas_become_mathml_and_code_does_not():
    made = pages.prose(
        r"a $\frac{1}{2}$ and `cost $5 or $6` and $$x^2$$" + "\n```sh\n-v $PWD -w $HOME\n```\n",
        "docs/A.md",
    )
    assert made.count("<math") == 2
    assert "`cost $5 or $6`" in made
    assert 'display="block"' in made
    assert "-v $PWD -w $HOME" in made


def test_a_folded_cell_is_folded_on_its_page_too():
    folded = nbformat.v4.new_code_cell("x = 1", metadata=elsewhere.FOLDED)
    page = pages.Page("notebooks/07.md", "")
    assert "<details" in pages.code_cell(folded, page, [])
    assert "x = 1" in pages.code_cell(folded, page, [])
    assert "<details" not in pages.code_cell(nbformat.v4.new_code_cell("x = 1"), page, [])


def test_an_explorer_has_a_picture_for_every_position(monkeypatch):
    small = widgets.ring_stepper(3)
    ranks = small.controls["world_size"]
    ranks.options = [2, 3]  # Two of the options are enough here.
    ranks.value = 3
    monkeypatch.setattr(explorers.widgets, "rebuild", lambda recipe: small)
    drawn = json.loads(explorers.drawn({}, 1000))
    first, second = drawn["sliders"]
    assert (first["name"], first["labels"]) == ("ranks K", ["2", "3"])
    assert (second["name"], second["labels"]) == ("step", ["0", "1", "2", "3", "4"])
    assert [len(steps) for steps in drawn["tree"]] == [3, 5]
    pictures = []
    for steps in drawn["tree"]:
        for _, _, rows in steps:
            pictures.append("".join(drawn["lines"][row] for row in rows))
    assert len(set(pictures)) == len(pictures), "two positions show the same"
    assert all(picture.startswith("<?xml") and picture.endswith("</svg>") for picture in pictures)
    assert first["at"] == 1
    assert "Step 4 of 4" in drawn["tree"][1][4][0]


def test_too_many_positions_are_thinned_but_not_the_first_nor_the_ends():
    every = {"a": [(str(n), n) for n in range(10)], "b": [(str(n), n) for n in range(4)]}
    kept = explorers.thinned(every, {"a": 7, "b": 2}, 12)
    assert len(kept["a"]) * len(kept["b"]) <= 12
    assert len(every["a"]) == 10
    assert {0, 7, 9} <= {value for _, value in kept["a"]}
    assert {0, 2, 3} <= {value for _, value in kept["b"]}
    # Here not even the ends of all sliders find room.
    five = [(str(n), n) for n in range(5)]
    many = dict.fromkeys("abcdef", five)
    kept = explorers.thinned(many, dict.fromkeys(many, 2), 12)
    assert 1 < math.prod(map(len, kept.values())) <= 12
    assert all(("2", 2) in pairs for pairs in kept.values())


def test_a_folder_that_is_no_site_is_left_alone(tmp_path, capsys):
    (tmp_path / "precious.txt").write_text("mine")
    assert builder().main(["--out", str(tmp_path)]) == 2
    assert (tmp_path / "precious.txt").read_text() == "mine"
    assert "not empty" in capsys.readouterr().err


@pytest.fixture(scope="module")
def browser():
    with running_browser() as browser:
        yield browser


@pytest.fixture
def offline(site, browser):
    """A page without a network.

    What it could not load, and its errors, fail the test in the end.
    """
    with fresh_page(browser, offline=True) as page:
        wrong = []

        def note_what_is_not_there(request):
            # A test that leaves a page also ends what is on its way to it.
            if request.failure != "net::ERR_ABORTED":
                wrong.append(f"{request.url}: {request.failure}")

        page.on("requestfailed", note_what_is_not_there)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console",
            lambda message: wrong.append(message.text) if message.type == "error" else None,
        )
        yield page
        assert wrong == []


def show(page, path):
    """Open a page with all its pictures, also those that a browser loads when they come in sight.

    Nothing moves any more when one of them arrives, and none that is missing is overlooked.
    """
    page.goto(path.as_uri())
    page.wait_for_function(
        "[...document.images].every(image => { image.loading = 'eager'; return image.complete; })"
    )


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "scheme"), [(390, "light"), (390, "dark"), (1400, "light"), (1400, "dark")]
)
def test_explorers_move_without_kernel_and_network(site, offline, width, scheme):
    page = offline
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    show(page, site / RING)
    shown = page.locator(".explorer")
    assert shown.count() >= 2
    for explorer in shown.all():
        for slider in explorer.locator("input").all():
            slider.scroll_into_view_if_needed()
            before = picture(explorer)
            box = slider.bounding_box()
            assert box["width"] >= 300, "too short to drag"
            ends = (0.05, 0.98)
            if int(slider.input_value()) > int(slider.get_attribute("max")) / 2:
                ends = (0.95, 0.02)
            middle = box["y"] + box["height"] / 2
            page.mouse.move(box["x"] + ends[0] * box["width"], middle)
            page.mouse.down()
            page.mouse.move(box["x"] + ends[1] * box["width"], middle)
            page.mouse.up()
            assert picture(explorer) != before, slider.evaluate(
                "slider => slider.parentElement.textContent"
            )
    light = page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    )
    assert (light > 200) == (scheme == "light")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def picture(explorer):
    """Return what an explorer shows: its message, and its picture once that is there.

    The picture must not be empty.
    """
    image = explorer.locator("img")
    drawn = "image => image.complete && image.naturalWidth > 200"
    image.page.wait_for_function(drawn, arg=image.element_handle())
    return explorer.locator("output").text_content(), image.get_attribute("src")


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read_and_figures_are_dark_in_the_dark(site, offline, scheme):
    offline.emulate_media(color_scheme=scheme)
    for page in ("index.html", "notebooks/05_bucketed_ddp.html"):
        show(offline, site / page)
        assert offline.locator("body").evaluate(PALE) == []
        filters = "images => images.map(image => getComputedStyle(image).filter)"
        drawn = offline.locator("main img").evaluate_all(filters)
        assert drawn, page
        assert all(("invert" in each) == (scheme == "dark") for each in drawn), page


@pytest.mark.browser
@pytest.mark.slow
def test_a_prediction_is_answered(site, offline):
    show(offline, site / RING)
    question = offline.locator(".prediction").first
    question.get_by_label("1.5 p").check()
    shown = offline.locator(".reveal").first.text_content()
    assert shown == "You guessed 1.5 p, which is right. The answer: 1.5 p (counted).", shown
    question.get_by_label("3 p").check()
    shown = offline.locator(".reveal").first.text_content()
    assert shown.startswith("You guessed 3 p. The answer: 1.5 p (counted).")
    offline.locator("summary").first.click()
    assert offline.locator("details[open]").count() == 1


@pytest.mark.browser
@pytest.mark.slow
def test_the_search_finds_the_lesson_first_and_the_reference_too(site, offline):
    show(offline, site / "index.html")
    offline.locator("input.md-search__input").click()
    offline.keyboard.type("bucketed", delay=30)
    results = offline.locator(".md-search-result__item h1")
    # Results of "b" and "bu" may come first.
    results.first.filter(has_text=re.compile("Bucketed")).wait_for()
    results.filter(has_text=re.compile("reference")).first.wait_for(state="attached")


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1400])
def test_pages_are_no_wider_than_the_screen(site, offline, width):
    offline.set_viewport_size({"width": width, "height": 900})
    for name in (
        "index",
        "docs/GRADING",
        "docs/GLOSSARY",
        "notebooks/12_many_machines",
        "reference/stages",
    ):
        show(offline, site / f"{name}.html")
        assert offline.evaluate("document.documentElement.scrollWidth") <= width, name
        cut = "all => all.filter(image => image.width > innerWidth).map(image => image.src)"
        assert offline.eval_on_selector_all("main img", cut) == []
        broken = "all => all.filter(image => !image.naturalWidth).map(image => image.src)"
        assert offline.eval_on_selector_all("img", broken) == []
    show(offline, site / RING)
    assert offline.locator("math").count() >= 3
    assert offline.locator("math").first.bounding_box()["height"] > 5


BROKEN = """() => [...document.querySelectorAll(".output td, .output th")].flatMap(cell => {
    const text = cell.firstChild?.data ?? "", part = document.createRange();
    return [...text.matchAll(/\\S+/g)].filter(word => {
        part.setStart(cell.firstChild, word.index);
        part.setEnd(cell.firstChild, word.index + word[0].length);
        return part.getClientRects().length > 1;
    }).map(String);
})"""


@pytest.mark.browser
@pytest.mark.slow
def test_the_table_of_the_comparison_is_not_broken_inside_words(site, offline):
    for width in (1400, 390):
        offline.set_viewport_size({"width": width, "height": 900})
        show(offline, site / "notebooks/00_start_here.html")
        assert offline.locator(".output td").count() > 10
        assert offline.evaluate(BROKEN) == []


@pytest.mark.browser
@pytest.mark.slow
def test_the_first_page_sells_the_course_in_one_screen(site, offline):
    """One screen shows the figure, ways to start and all rungs.

    On a phone nothing of the ladder is cut off or tiny.
    """
    offline.set_viewport_size({"width": 1400, "height": 900})
    show(offline, site / "index.html")
    seen = [
        *offline.locator(".hero img, .hero .md-button").all(),
        *offline.locator(".ladder li").all(),
    ]
    assert len(seen) == 1 + 2 + len(build.rungs())
    for part in seen:
        box = part.bounding_box()
        assert box["y"] + box["height"] <= 900, part.text_content()
    offline.set_viewport_size({"width": 390, "height": 844})
    for rung in offline.locator(".ladder li, .ladder li span").all():
        box = rung.bounding_box()
        assert box["x"] >= 0, rung.text_content()
        assert box["x"] + box["width"] <= 390, rung.text_content()
        pixels = rung.evaluate("rung => getComputedStyle(rung).fontSize.replace('px', '')")
        assert float(pixels) >= 12
    # There its figure is small, and leads to the picture alone, where one can zoom.
    assert offline.locator('.hero a[href$="compare.png"] img').bounding_box()["width"] <= 390
