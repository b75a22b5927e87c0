"""The widgets in JupyterLab, in a real browser: run all cells, drag each slider, see the figure change."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress

import nbformat
import pytest
from chromium import fresh_page, running_browser

NotInTime = pytest.importorskip("playwright.sync_api").TimeoutError

CELLS = {
    "predict": "from ddp_course import plans, show, simulate, theory\nguess = "
    "show.predict('how many?', [1, 2, 4])\nguess",
    "ring": "show.widgets.ring_stepper(4)",
    "explorer": "show.widgets.alpha_beta_explorer()",
    "buckets": "layers = tuple(simulate.Layer(str(i), .002, .004, 1e5) for i in range(8))\n"
    "network = simulate.Network(theory.Costs.of_link(2e8, 3e-4))\n"
    "show.widgets.bucket_explorer(simulate.Profile(layers), 4, network, {0.1: 50.0})",
    "decision": "show.widgets.decision_chart(plans.decide)",
}
REVEAL = "guess.reveal('2.1', 2)"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A JupyterLab on a notebook with all widgets; yields its address, and ends it with everything it started."""
    folder = tmp_path_factory.mktemp("lab")
    cells = [nbformat.v4.new_code_cell(source) for source in [*CELLS.values(), REVEAL]]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": {
        "name": "python3", "display_name": "Python 3", "language": "python"}}), folder / "widgets.ipynb")  # fmt: skip
    log = (folder / "log").open("w+")
    environ = {**os.environ, "JUPYTER_CONFIG_DIR": str(folder), "JUPYTERLAB_SETTINGS_DIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--port=0", "--ServerApp.port_retries=0",
         "--IdentityProvider.token=secret", f"--ServerApp.root_dir={folder}"],
        stdout=log, stderr=log, env=environ, start_new_session=True,
    )  # fmt: skip
    try:
        yield address(process, folder / "log")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.close()


def address(process, log):
    """Wait for the server to print where it listens."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"http://(?:localhost|127\.0\.0\.1):(\d+)/lab", log.read_text())
        if found:
            return f"http://127.0.0.1:{found[1]}/lab/tree/widgets.ipynb?token=secret"
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


@pytest.mark.browser
def test_all_widgets_work_in_jupyterlab(lab):
    with running_browser() as browser, fresh_page(browser) as page:
        page.goto(lab)
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=90_000)
        run_all(page)
        assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
        cells = page.locator(".jp-Notebook .jp-CodeCell")
        for position, name in enumerate(CELLS):
            if name != "predict":
                drag_every_slider(page, cells.nth(position), name)
        choose_and_reveal(page, cells)


def run_all(page):
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=90_000)  # before that nothing is run
    page.get_by_role("menuitem", name="Run", exact=True).first.click()
    page.get_by_text("Run All Cells", exact=True).click()
    page.wait_for_function(
        "n => document.querySelectorAll('.jp-Notebook .jp-OutputArea-output img').length >= n", arg=4, timeout=90_000
    )
    page.wait_for_function(
        "() => [...document.querySelectorAll('.jp-Notebook .jp-CodeCell')].every("
        "cell => /\\[\\d+\\]/.test(cell.querySelector('.jp-InputPrompt').textContent))",
        timeout=90_000,
    )


def drag_every_slider(page, cell, name):
    """Drag each handle with the mouse, and wait for another picture."""
    cell.scroll_into_view_if_needed()
    handles = cell.locator(".noUi-handle")
    assert handles.count() >= 1, name
    for index in reversed(range(handles.count())):
        before = cell.locator("img").get_attribute("src")
        for last in (False, False, False, True):  # the page may still move between the look and the grasp
            track = settled(cell.locator(".noUi-target").nth(index))
            assert track["width"] >= 300, "too short to drag"
            drag(page, settled(handles.nth(index)), track)
            with nullcontext() if last else suppress(NotInTime):
                changed = "([cell, before]) => cell.querySelector('img').src !== before"
                page.wait_for_function(changed, arg=[cell.element_handle(), before], timeout=30_000)
                break
        assert cell.locator("img").bounding_box()["width"] > 200


def drag(page, handle, track):
    """Drag a handle to the other half of its track."""
    middle = handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2
    to_the_left = middle[0] > track["x"] + track["width"] / 2
    page.mouse.move(*middle)
    page.mouse.down()
    page.mouse.move(track["x"] + track["width"] * (0.1 if to_the_left else 0.9), middle[1], steps=4)
    page.mouse.up()


def settled(element):
    """Where an element is once it has stood still for 0.3 s: JupyterLab moves the cells as outputs above get drawn."""
    box, since, deadline = element.bounding_box(), time.monotonic(), time.monotonic() + 20
    while time.monotonic() < since + 0.3:
        assert time.monotonic() < deadline, "the page does not come to rest"
        time.sleep(0.03)
        now = element.bounding_box()
        if now != box:
            box, since = now, time.monotonic()
    return box


def choose_and_reveal(page, cells):
    """Choose an answer in the prediction recorder, and see that the last cell knows it."""
    choices = cells.nth(0).locator("input[type=radio]")
    choices.nth(2).click()
    last = cells.nth(len(CELLS))
    last.scroll_into_view_if_needed()
    last.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    last.get_by_text("your guess: 2; measured: 2.1").wait_for(timeout=20_000)
