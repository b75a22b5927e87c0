"""docs/TWENTY_MINUTES.md in a real browser, as somebody does it who errs: pictures of each step.

DDP_COURSE_PICTURES=FOLDER keeps the pictures, which want to be looked at.
"""

import os
import re
from pathlib import Path

import pytest
from chromium import fresh_page, running_browser
from learners_lab import RESTART, running_lab

pytestmark = [pytest.mark.browser, pytest.mark.slow]

WRONG = {  # What stands in place of the three dots, and what is said.
    "new tensor": (["tensor = tensor + incoming", "outgoing = incoming"], "Nothing was added to"),
    "same again": (["tensor += incoming"], "each round sent the same"),
    "whole sum": (["tensor += incoming", "outgoing = tensor.clone()"], "whole sum was sent on"),
    "misspelt": (["tensor += incomming", "outgoing = incoming"], "name 'incomming' is not"),
}
RIGHT = ["tensor += incoming", "outgoing = incoming"]
PROMPT = ".jp-InputPrompt"
RAN = """([cell, before]) => {
  const prompt = cell.querySelector(".jp-InputPrompt").textContent;
  return prompt !== before && /\\[\\d+\\]/.test(prompt);
}"""


class Walk:
    """A page with lesson 00, and what a person does on it."""

    def __init__(self, page, pictures):
        self.page = page
        self.pictures = pictures
        self.steps = 0
        self.prompt = ""  # That of the cell which was started last, before it was.

    def look(self, step):
        """Keep a picture."""
        self.steps += 1
        self.page.screenshot(path=self.pictures / f"{self.steps:02}_{step.replace(' ', '_')}.png")

    def cell(self, text):
        """The first cell of code with this text."""
        return self.page.locator(".jp-Notebook .jp-CodeCell").filter(has_text=text).first

    def start(self, text):
        """Click into a cell and run it."""
        cell = self.cell(text)
        cell.scroll_into_view_if_needed()
        cell.locator(".cm-content").click(position={"x": 5, "y": 5})
        self.prompt = cell.locator(PROMPT).text_content()
        self.page.keyboard.press("Control+Enter")
        return cell

    def run(self, text):
        """Run a cell to its end; return what it says."""
        return self.said(self.start(text))

    def said(self, cell):
        """What a cell says once it has run, with single spaces."""
        ran = [cell.element_handle(), self.prompt]
        self.page.wait_for_function(RAN, arg=ran, timeout=300_000)
        self.page.wait_for_timeout(500)
        return " ".join(cell.locator(".jp-OutputArea").inner_text().split())

    def write(self, cell, source):
        """Put another source into a cell, run it, and return what it says."""
        cell.locator(".cm-content").click(position={"x": 5, "y": 5})
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(source)
        self.prompt = cell.locator(PROMPT).text_content()
        self.page.keyboard.press("Control+Enter")
        return self.said(cell)


@pytest.mark.parametrize("theme, width", [("Light", 1366), ("Dark", 390)])
def test_twenty_minutes_with_wrong_answers_a_restart_and_a_closed_tab(tmp_path, theme, width):
    pictures = Path(os.environ.get("DDP_COURSE_PICTURES", tmp_path)) / f"{theme}_{width}"
    pictures.mkdir(parents=True, exist_ok=True)
    with running_lab(tmp_path, theme) as (server, token), running_browser() as browser:
        with fresh_page(browser, width=width) as page:
            # Not the printed address: the bare one leads to lesson 00, too.
            page.goto(f"{server}/lab?token={token}")
            walk = Walk(page, pictures)
            opens_at_lesson_00(walk)
            errs_and_mends(walk)
            stops_and_starts_anew(walk)
            page.keyboard.press("Control+s")
            page.locator(".jp-mod-dirty").wait_for(state="detached")
            again = page.context.new_page()
            page.close()
            again.goto(f"{server}/lab")
            walk.page = again
            opens_at_lesson_00(walk)
            ring = walk.cell("def my_ring")
            ring.scroll_into_view_if_needed()
            ring.locator("img").wait_for()
            again.wait_for_timeout(3000)
            walk.look("its ring is there again")
            assert "outgoing = incoming" in ring.inner_text()
            assert ring.locator("img").count() == 1, "the figure is gone"
            assert again.get_by_text("Error displaying widget").count() == 0


def opens_at_lesson_00(walk):
    """The lesson is there, and its kernel."""
    walk.page.get_by_role("heading", name="Start here").wait_for()
    # The status bar, which a narrow window hides, says when the kernel has started.
    ready = walk.page.get_by_text("Python 3 (ipykernel) | Idle")
    ready.wait_for(state="attached")
    walk.look("opened")


def errs_and_mends(walk):
    """From the first launch to a ring that is right."""
    walk.run("K = 4")
    assert "hello, I am rank 3 of 4" in walk.run("def hello")
    walk.look("launched")
    ring = walk.cell("def my_ring")
    assert "The two lines are not written yet" in walk.run("def my_ring")
    walk.look("not written")
    rows = [row.rstrip("\n") for row in ring.locator(".cm-line").all_inner_texts()]
    source = "\n".join(rows)
    [gap] = re.findall(r"\.\.\.  # your turn.*", source)
    for name, (lines, words) in WRONG.items():
        assert words in walk.write(ring, source.replace(gap, "\n        ".join(lines))), name
        walk.look(name)
    right = source.replace(gap, "\n        ".join(RIGHT))
    assert "1111 1111 1111 1111" in walk.write(ring, right)
    assert ring.locator("img").count() == 1
    walk.look("right")


def stops_and_starts_anew(walk):
    """An interrupt, a restart, and a cell out of order; then the comparison and its sliders."""
    walk.run("show.predict(")
    cell = walk.start("results = compare.run")
    # The second bar belongs to the second stage, so the first has ended.
    cell.locator(".progress-bar").nth(1).wait_for()
    walk.page.keyboard.press("Escape")
    walk.page.keyboard.press("i")
    walk.page.keyboard.press("i")
    said = walk.said(cell)
    # The bars of stages that had ended stay, full; the one of the stage that ran is gone.
    assert cell.locator(".progress-bar-danger:visible").count() == 0
    bars = cell.locator(".widget-hbox:has(.progress-bar):visible").all_inner_texts()
    assert all("100%" in bar for bar in bars), bars
    assert "Stopped at line 1 of the cell: results = compare.run(" in said
    assert said.endswith("The kernel goes on: run any cell.")
    assert "Traceback" not in said
    walk.look("interrupted")
    walk.page.evaluate(RESTART)
    walk.page.wait_for_timeout(4000)
    # No cell of the course has run in this kernel, and yet the missing name is explained.
    said = walk.run("show.compare_figure(results)")
    assert "name 'show' is not defined" in said
    assert "Run All Above" in said
    walk.look("out of order")
    walk.run("K = 4")
    assert "complete DDP" in walk.run("results = compare.run")
    walk.look("compared")
    walk.run("show.compare_figure(results)")
    walk.look("figure")
    walk.run("show.predict(")
    walk.cell("show.predict(").locator("input[type=radio]").nth(2).click()
    assert "You guessed 2. The answer: 3.8" in walk.run("guess.reveal(")
    walk.look("revealed")
    moves_a_slider_after_a_restart(walk)


def moves_a_slider_after_a_restart(walk):
    """Move a slider twice: the last position is drawn."""
    walk.run("strategies_explorer")
    explorer = walk.cell("strategies_explorer")
    explorer.locator(".noUi-handle").first.focus()
    walk.page.keyboard.press("ArrowLeft")
    walk.page.keyboard.press("ArrowLeft")
    walk.look("drawing")
    last = explorer.locator(".widget-html-content").filter(has_text="cross a link in 0.5 %")
    last.wait_for(state="attached")
    drawing = explorer.get_by_text("drawing …")
    drawing.wait_for(state="detached")
    walk.look("drawn")
