"""`ddp-course lab` in a real browser: the first hour of a newcomer, and every slider dragged."""

import os
import re
import time
from contextlib import nullcontext, suppress

import nbformat
import pytest
from chromium import PALE, fresh_page, running_browser
from learners_lab import RESTART, choose_theme, running_lab

NotInTime = pytest.importorskip("playwright.sync_api").TimeoutError

pytestmark = pytest.mark.lessons
CELLS = {
    "predict": (
        "%load_ext ddp_course\nfrom ddp_course.lab import compare, show, simulate, theory\n"
        "from ddp_course import stage3_paramserver, stage4_ring\nguess = "
        "show.predict('how many?', [1, 2, 4])\nguess"
    ),
    "ring": "show.widgets.ring_stepper(4)",
    "figure": "show.bars({'a': 1.0, 'b': 2.0}, 'ms', 'Twice as long', kind='measured')",
    "alpha beta": "show.widgets.alpha_beta_explorer()",
    "buckets": (
        "layers = tuple(simulate.Layer(str(i), .002, .004, 1e5) for i in range(8))\nnetwork ="
        " simulate.Network(theory.Costs.of_link(2e8,"
        " 3e-4))\nshow.widgets.bucket_explorer(simulate.Profile(layers), 4, network, {0.1: 50.0},"
        " (0.06, 0.25, 0.5))"
    ),
    "diff": "show.diff(stage3_paramserver.train, stage4_ring.train)",
    "source": "show.source(stage4_ring.ring_all_reduce)",
    "table": (
        "from types import SimpleNamespace as some\nfrom ddp_course.lab.measuring.results import"
        " StageResult\nstage = StageResult('3', 'parameter server', 239.04, 154.9, 1057104,"
        " 1057104, 6, [.0968], 9.9e-7, None, [], ideal_ms=250.8, speed_up=1.36)"
        "\ncompare.table(some(stages=[stage]))"
    ),
    "ranks": "%%ranks 2\nprint(rank + 42)",
}
EXPLORERS = ("ring", "alpha beta", "buckets")
# How far the tallest box of sliders can be scrolled, in pixels.
SCROLLS = """cell => Math.max(...[...cell.querySelectorAll(".widget-vbox")].map(
  box => box.scrollHeight - box.clientHeight))"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """`ddp-course lab` in the dark, with a notebook of widgets beside the lessons, and a bare PATH.

    Yields its address and its folder, and ends it with everything that it started.
    """
    folder = tmp_path_factory.mktemp("lab")
    write_notebook(folder / "widgets.ipynb", *CELLS.values(), "guess.reveal('2.1', 2)")
    with running_lab(folder) as (server, token):
        start = "/lab/tree/notebooks/00_start_here.ipynb"
        yield f"{server}{start}?reset&token={token}", folder


def write_notebook(path, *sources, folded=False):
    """A notebook of cells of code, the first of which may be folded."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[0].metadata["jupyter"] = {"source_hidden": folded}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)


@pytest.mark.browser
def test_a_newcomer_meets_lesson_00_without_answers_or_news_and_a_terminal_that_knows_the_commands(
    lab,
):
    url, folder = lab
    with running_browser() as browser, fresh_page(browser) as page:
        page.goto(url)
        page.get_by_role("heading", name="Start here").wait_for()
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
        assert page.locator(".jp-Notebook .jp-OutputArea-output").count() == 0
        assert page.locator(".jp-Dialog, .Toastify__toast").count() == 0
        page.get_by_role("menuitem", name="File", exact=True).first.click()
        page.get_by_text("New", exact=True).last.hover()
        page.get_by_text("Terminal", exact=True).last.click()
        page.locator(".jp-Terminal .xterm-screen").click()
        page.keyboard.type(
            "(pwd; command -v ddp-course; command -v torchrun) > terminal.tmp; mv terminal.tmp"
            " seen\n"
        )
        deadline = time.monotonic() + 180
        while not (folder / "seen").exists():
            assert time.monotonic() < deadline, (
                "the terminal does not start in the learner's folder"
            )
            page.wait_for_timeout(100)
        tabs = folder / ".jupyter" / "workspaces"
        while not any("terminal" in path.read_text() for path in tabs.glob("*")):
            assert time.monotonic() < deadline, "the tabs of this copy are not kept in it"
            page.wait_for_timeout(100)
    where, *commands = (folder / "seen").read_text().split()
    assert where == str(folder)
    assert [os.path.basename(path) for path in commands] == [
        "ddp-course",
        "torchrun",
    ]


@pytest.mark.browser
def test_all_widgets_and_cells_on_all_ranks_work_in_the_dark(lab):
    with running_browser() as browser, fresh_page(browser) as page:
        page.goto(lab[0].replace("notebooks/00_start_here", "widgets"))
        page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        run_all(page)
        assert (
            page.locator(
                ".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']"
            ).count()
            == 0
        )
        cells = dict(zip(CELLS, page.locator(".jp-Notebook .jp-CodeCell").all(), strict=False))
        is_legible(cells["diff"], cells["table"])
        cells["ranks"].scroll_into_view_if_needed()
        cells["ranks"].get_by_text("[rank 1] 43").wait_for()
        has_names(cells)
        for name in EXPLORERS:
            assert cells[name].evaluate(SCROLLS) == 0, f"{name} has a scroll bar for nothing"
        save(page, cells["ranks"])
        for name in EXPLORERS:
            drag_every_slider(page, cells[name], name)
        explorers_answer_their_questions(page, cells["alpha beta"], cells["buckets"])
        choose_and_reveal(page, page.locator(".jp-Notebook .jp-CodeCell"))


def save(page, cell):
    """Save the notebook, and wait until it is."""
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+s")
    page.locator(".jp-mod-dirty").wait_for(state="detached")


def has_outputs(browser, lab):
    """Run and save the notebook of widgets, unless a test before has."""
    url, folder = lab
    notebook = nbformat.read(folder / "widgets.ipynb", as_version=4)
    if not any(cell.execution_count for cell in notebook.cells):
        with fresh_page(browser) as page:
            page.goto(url.replace("notebooks/00_start_here", "widgets"))
            page.wait_for_selector(".jp-Notebook .jp-CodeCell")
            run_all(page)
            save(page, page.locator(".jp-Notebook .jp-CodeCell").last)


def has_names(cells):
    """Assert that a screen reader has a name for every figure, slider, player and choice."""
    for cell, role, name in (
        ("figure", "img", "Twice as long (measured)"),
        ("ring", "img", re.compile("Step .* chunks complete")),
        ("ring", "slider", "ranks K"),
        ("ring", "slider", "step"),
        ("ring", "button", "play"),
        ("ring", "button", "stop"),
        ("alpha beta", "slider", "bandwidth"),
        ("buckets", "slider", "bucket cap (MiB)"),
        ("predict", "radiogroup", "how many?"),
    ):
        cells[cell].get_by_role(role, name=name, exact=True).first.wait_for()


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_on_a_phone_titles_stand_above_sliders_and_all_text_can_be_read(lab, theme):
    url, folder = lab
    choose_theme(folder, theme)
    with running_browser() as browser, fresh_page(browser, width=390) as page:
        has_outputs(browser, lab)
        page.goto(url.replace("notebooks/00_start_here", "widgets"))
        cells = page.locator(".jp-Notebook .jp-CodeCell")
        explorer = cells.nth([*CELLS].index("alpha beta"))
        explorer.scroll_into_view_if_needed()
        image = explorer.locator("img")
        image.wait_for()
        fits_until_touched(page, image)
        figure = cells.nth([*CELLS].index("figure")).locator("img")
        fits_until_touched(page, figure)
        inverted = "invert" in image.evaluate("image => getComputedStyle(image).filter")
        assert inverted == (theme == "Dark")
        block = cells.nth([*CELLS].index("source")).locator(".jp-RenderedHTMLCommon > div")
        inverted = "invert" in block.evaluate("block => getComputedStyle(block).filter")
        assert inverted == (theme == "Dark")
        for row in explorer.locator(".widget-inline-hbox:has(.noUi-target)").all():
            label = row.locator(".widget-label")
            assert label.evaluate("label => getComputedStyle(label).textAlign") == "left"
            title = label.bounding_box()
            track = row.locator(".noUi-target").bounding_box()
            assert title["y"] + title["height"] <= track["y"] + 4
            assert track["width"] > 150
        assert page.locator(".jp-FileBrowser").is_hidden(), "the list of files leaves no room"
        assert page.locator(".jp-SideBar.jp-mod-right").is_hidden()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        table = cells.nth([*CELLS].index("table")).locator(".jp-RenderedHTMLCommon").last
        assert table.evaluate("table => getComputedStyle(table).overflowX") == "auto"
        for cell in cells.all():
            cell.scroll_into_view_if_needed()
            for output in cell.locator(".jp-OutputArea-output").all():
                # Only outputs are ours: JupyterLab chooses the colours of code.
                assert output.evaluate(PALE) == []


def fits_until_touched(page, image):
    """Assert that a figure is as wide as its cell, and in its own size after a touch.

    A touch elsewhere shrinks it again.
    """
    cell = image.locator("xpath=ancestor::*[contains(@class, 'jp-OutputArea-output')]").last
    image.scroll_into_view_if_needed()
    box = settled(image)
    left = settled(cell)["x"]
    assert box["x"] + box["width"] <= left + settled(cell)["width"]
    assert box["width"] > 290, "a figure is smaller than its cell"
    page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert settled(image)["width"] == image.evaluate("image => image.naturalWidth")
    # Left of an output JupyterLab has a button that folds it, so the code above it is touched.
    cell.locator("xpath=ancestor::*[contains(@class, 'jp-CodeCell')]").locator(
        ".cm-line"
    ).first.tap()
    assert settled(image)["width"] == box["width"]


@pytest.mark.browser
def test_with_a_new_kernel_an_explorer_is_a_picture_that_says_how_to_wake_it(lab):
    url, _ = lab
    with running_browser() as browser, fresh_page(browser) as page:
        has_outputs(browser, lab)
        page.goto(url.replace("notebooks/00_start_here", "widgets"))
        explorer = page.locator(".jp-Notebook .jp-CodeCell").nth([*CELLS].index("alpha beta"))
        explorer.scroll_into_view_if_needed()
        # The kernel of the page before still runs.
        explorer.locator(".noUi-handle").first.wait_for()
        page.evaluate(RESTART)
        page.reload()
        explorer.scroll_into_view_if_needed()
        explorer.locator("img").wait_for()
        explorer.locator(".noUi-handle").first.wait_for(state="hidden")
        assert explorer.locator("img").evaluate("image => image.naturalWidth") > 200
        box = explorer.locator(".jp-OutputArea-output > .widget-vbox")
        said = box.evaluate("box => getComputedStyle(box, '::after').content")
        assert "Run the cells down to this one again" in said


SLOW = """\
import pathlib, time
from ddp_course.lab import show
drawn = []
def draw(position):
    drawn.append(position)
    while position and not pathlib.Path("go on").exists():
        time.sleep(0.05)
    return show.bars({"a": position}, "ms", f"Drawn at {position}", kind="derived")
show.widgets.Explorer(draw, "nowhere:draw", position=show.widgets.choice("place", 0, range(9)))"""


@pytest.mark.browser
def test_a_slider_draws_its_last_position_alone_also_after_a_restart_from_outside(lab):
    """A figure that is being drawn waits for a file, so that the slider is always ahead of it."""
    url, folder = lab
    write_notebook(folder / "slow.ipynb", SLOW, "print(drawn)")
    with running_browser() as browser, fresh_page(browser) as page:
        page.goto(url.replace("notebooks/00_start_here", "slow"))
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
        slow, drawn = page.locator(".jp-Notebook .jp-CodeCell").all()
        for _ in range(2):
            (folder / "go on").unlink(missing_ok=True)
            run_cell(page, slow)
            run_cell(page, drawn)
            drawn.get_by_text("[0]", exact=True).wait_for()
            slow.locator(".noUi-handle").focus()
            for _ in range(5):
                page.keyboard.press("ArrowRight")
            slow.get_by_text("drawing …").wait_for()
            assert slow.locator(".widget-readout").inner_text() == "5"
            (folder / "go on").touch()
            last = slow.locator(".widget-html-content").filter(has_text="Drawn at 5")
            last.wait_for(state="attached")
            slow.get_by_text("drawing …").wait_for(state="detached")
            run_cell(page, drawn)
            drawn.get_by_text("[0, 1, 5]", exact=True).wait_for()
            page.evaluate(RESTART)


@pytest.mark.browser
@pytest.mark.parametrize("folded", [False, True])
def test_the_cell_that_runs_counts_its_seconds_and_those_that_wait_do_not(lab, folded):
    url, folder = lab
    (folder / "enough").unlink(missing_ok=True)
    waiting = "import pathlib, time\nwhile not pathlib.Path('enough').exists(): time.sleep(0.05)"
    write_notebook(folder / "long.ipynb", waiting, "print('after it')", folded=folded)
    with running_browser() as browser, fresh_page(browser) as page:
        page.goto(url.replace("notebooks/00_start_here", "long"))
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
        page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt:visible").first.click()
        page.keyboard.press("Shift+Enter")
        page.keyboard.press("Shift+Enter")
        # A busy page may leave a second out.
        page.wait_for_function("document.querySelector('[data-seconds]')?.dataset.seconds >= 3")
        prompt = page.locator("[data-seconds]:visible")
        assert prompt.count() == 1
        assert prompt.text_content() in ("[*]:", "")  # A folded cell has no star of its own.
        said = prompt.evaluate("prompt => getComputedStyle(prompt, '::after').content")
        assert re.fullmatch(r'"\[\d+ s\]:"', said)
        (folder / "enough").touch()
        page.get_by_text("after it", exact=True).last.wait_for()
        page.locator("[data-seconds]").wait_for(state="detached")


def run_cell(page, cell):
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")


def is_legible(diff, table):
    """Assert that a diff is light on dark, that rows are one line, and that no code is cut off.

    The words of the diff are light, and the rows are those of the table.
    """
    colour = "element => getComputedStyle(element).color.match(/\\d+/g).slice(0, 3).map(Number)"
    assert min(diff.locator(".jp-RenderedHTMLCommon div div").first.evaluate(colour)) > 150
    assert max(row.bounding_box()["height"] for row in table.locator("tbody tr").all()) < 35
    assert table.locator(".cm-scroller").evaluate(
        "code => code.scrollWidth <= code.clientWidth + 1"
    )


def explorers_answer_their_questions(page, alpha_beta, buckets):
    """Assert that explorers answer the questions that stand above them.

    Which all-reduce is fastest depends on K, and the best bucket is neither the smallest nor the
    largest.
    """
    fastest = [text.split("large:")[1].split("(")[0].strip() for text in texts(page, alpha_beta, 2)]
    assert {"ring", "ring, halving-doubling"} <= set(fastest)
    steps = [float(re.search(r"step ([\d.]+) ms", text)[1]) for text in texts(page, buckets, 0)]
    assert min(steps) < min(steps[0], steps[-1])


def texts(page, cell, index):
    """Return what an explorer says for each setting of a slider, from the lowest to the highest."""
    handle = cell.locator(".noUi-handle").nth(index)
    said = []
    readout = cell.locator(".widget-readout").nth(index)
    message = cell.locator(".widget-html-content").last
    handle.focus()
    for key in ["Home"] + ["ArrowRight"] * 9:
        value = readout.inner_text()
        text = message.inner_text()
        page.keyboard.press(key)
        page.wait_for_timeout(1500)
        moved = readout.inner_text() != value
        if moved:  # The kernel draws the figure and then sends what it says.
            changed = "([message, text]) => message.innerText !== text"
            page.wait_for_function(changed, arg=[message.element_handle(), text])
        if moved or key == "Home":
            said.append(message.inner_text().replace("\n", " "))
    return said


def run_all(page):
    # Before the kernel is idle, nothing is run.
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).first.click()
    page.get_by_text("Run All Cells", exact=True).click()
    page.wait_for_function(
        "n => document.querySelectorAll('.jp-Notebook .jp-OutputArea-output img').length >= n",
        arg=len(EXPLORERS),
    )
    page.wait_for_function(
        "() => [...document.querySelectorAll('.jp-Notebook .jp-CodeCell')].every("
        "cell => /\\[\\d+\\]/.test(cell.querySelector('.jp-InputPrompt').textContent))",
    )


def drag_every_slider(page, cell, name):
    """Drag each handle with the mouse, and wait for another picture."""
    cell.scroll_into_view_if_needed()
    handles = cell.locator(".noUi-handle")
    assert handles.count() >= 1, name
    for index in reversed(range(handles.count())):
        before = cell.locator("img").get_attribute("src")
        # The page may still move after the mouse has been placed and before its button is pressed.
        for last in (False, False, False, True):
            track = settled(cell.locator(".noUi-target").nth(index))
            assert track["width"] >= 300, "too short to drag"
            drag(page, settled(handles.nth(index)), track)
            late = nullcontext() if last else suppress(NotInTime)
            with late:
                changed = "([cell, before]) => cell.querySelector('img').src !== before"
                page.wait_for_function(changed, arg=[cell.element_handle(), before], timeout=30_000)
                break
        assert cell.locator("img").bounding_box()["width"] > 200


def drag(page, handle, track):
    """Drag a handle to the other half of its track."""
    middle = handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2
    to_the_left = middle[0] > track["x"] + track["width"] / 2
    share = 0.1 if to_the_left else 0.9
    page.mouse.move(*middle)
    page.mouse.down()
    page.mouse.move(track["x"] + share * track["width"], middle[1], steps=4)
    page.mouse.up()


def settled(element):
    """Return where an element is once it has stood still for 0.3 s.

    JupyterLab moves the cells as outputs above get drawn.
    """
    box = element.bounding_box()
    since = time.monotonic()
    deadline = time.monotonic() + 180
    while time.monotonic() < since + 0.3:
        assert time.monotonic() < deadline, "the page does not come to rest"
        time.sleep(0.03)
        now = element.bounding_box()
        if now != box:
            box = now
            since = time.monotonic()
    return box


def choose_and_reveal(page, cells):
    """Choose an answer in the prediction recorder, and see that the last cell knows it."""
    choices = cells.nth(0).locator("input[type=radio]")
    choices.nth(1).click()
    page.wait_for_function("() => document.querySelector('.widget-radio-box input').name")
    page.keyboard.press("ArrowDown")
    last = cells.nth(len(CELLS))
    last.scroll_into_view_if_needed()
    last.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    last.get_by_text("You guessed 2, which is right. The answer: 2.1 (measured).").wait_for()
