"""The course as a web page: complete, without links that lead nowhere, and whole without a network."""

import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from chromium import browser_page

ROOT = Path(__file__).resolve().parents[1]


def builder():
    spec = importlib.util.spec_from_file_location("course_site", ROOT / "authoring" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    assert builder().main(["--out", str(folder)]) == 0
    return folder


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found += [value for name, value in attributes if name in ("href", "src") and value]


def links_of(page):
    parser = Links()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser.found


def test_all_lessons_exercises_and_the_reference_are_there(site):
    for folder in ("notebooks", "exercises"):
        wanted = {path.stem for path in (ROOT / folder).glob("[0-9]*.ipynb")}
        assert wanted == {path.stem for path in (site / folder).glob("*.html")}
    assert (site / "reference" / "ddp_course" / "stage4_ring.html").exists()
    assert (site / "docs" / "GLOSSARY.html").exists() and (site / "docs" / "WORKSHOP.html").exists()


def test_exercises_are_unsolved(site):
    for page in (site / "exercises").glob("*.html"):
        assert "BEGIN SOLUTION" not in page.read_text() and "NotImplementedError" in page.read_text()


def test_local_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    pages = [
        site / "index.html",
        *site.glob("notebooks/*.html"),
        *site.glob("exercises/*.html"),
        *site.glob("docs/*.html"),
    ]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r'<(script|link|img)[^>]+(src|href)="https?:', text), f"{page.name} loads from elsewhere"
        for link in links_of(page):
            if not link.startswith(("http", "#", "data:", "mailto:")):
                assert (page.parent / link.split("#")[0]).exists(), f"{page.name}: {link}"


def test_formulas_become_mathml_and_code_does_not():
    made = builder().with_mathml(r"a $\frac{1}{2}$ and `cost $5 or $6` and $$x^2$$")
    assert made.count("<math") == 2 and "`cost $5 or $6`" in made and 'display="block"' in made


def test_a_folder_that_is_no_site_is_left_alone(tmp_path, capsys):
    (tmp_path / "precious.txt").write_text("mine")
    assert builder().main(["--out", str(tmp_path)]) == 2
    assert (tmp_path / "precious.txt").read_text() == "mine" and "not empty" in capsys.readouterr().err


@pytest.mark.browser
def test_pages_are_whole_without_a_network(site):
    with browser_page(offline=True) as page:
        failed, errors = [], []
        page.on("requestfailed", lambda request: failed.append(request.url))
        page.on(
            "request",
            lambda request: None if request.url.startswith(("file:", "data:")) else failed.append(request.url),
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((site / "index.html").as_uri())
        page.fill("#search", "all-reduce ring")
        assert page.locator("#found a").count() >= 2
        page.locator("#found a").first.click()
        page.goto((site / "notebooks" / "04_ring_all_reduce.html").as_uri())
        images = page.eval_on_selector_all("img", "all => all.map(image => image.naturalWidth)")
        alts = page.eval_on_selector_all("img", "all => all.map(image => image.alt)")
        assert not any("No description" in alt or len(alt) < 10 for alt in alts), alts
        assert len(images) >= 6 and all(width > 100 for width in images)
        assert page.locator("math").count() >= 3 and page.locator("math").first.bounding_box()["height"] > 5
        page.locator("summary").first.click()
        assert page.locator("details[open]").count() == 1
        page.goto((site / "reference" / "ddp_course" / "stage4_ring.html").as_uri())
        assert page.get_by_text("ring_all_reduce").count()
    assert failed == [] and errors == []


def test_containers_and_binder_use_the_lock():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert "make setup" in container["postCreateCommand"]
    named = (ROOT / "binder" / "requirements.txt").read_text().split()
    assert named[0] == "-r" and (ROOT / "binder" / named[1]).resolve() == ROOT / "requirements.lock"
    assert (ROOT / "binder" / "postBuild").stat().st_mode & 0o100, "postBuild must be executable"
