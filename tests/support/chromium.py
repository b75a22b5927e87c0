"""A Chromium for tests, or a skip where there is none.

A module has one browser, and each test a fresh page.
"""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def executable():
    """Return the path of a Chromium or Chrome of this machine, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(
        (found for found in map(shutil.which, names) if found and Path(found).exists()), None
    )


@contextmanager
def running_browser():
    """Yield a headless Chromium, and end it after the block."""
    playwright = pytest.importorskip("playwright.sync_api")
    if not executable():
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=executable(), args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


# Texts that are hard to read: [contrast, text] by WCAG 2 where it is below 4.5, or 3 if large.
PALE = """root => {
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const curve = part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const linear = part => curve(part / 255);
  const brightness = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const colour = numbers(getComputedStyle(element).backgroundColor);
      if (colour.length < 4 || colour[3] > 0.5) return colour;
    }
    return [255, 255, 255];
  };
  const pale = [];
  const texts = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement, text = texts.currentNode.textContent.trim();
    if (!text || !element.checkVisibility({visibilityProperty: true})) continue;
    const style = getComputedStyle(element), size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.5 && style.fontWeight >= 700);
    const one = brightness(numbers(style.color)), other = brightness(behind(element));
    const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (contrast < (large ? 3 : 4.5)) pale.push([contrast.toFixed(2), text.slice(0, 40)]);
  }
  return pale;
}"""


@contextmanager
def fresh_page(browser, offline=False, width=1400):
    """Yield a page of its own: nothing is kept of the pages before it. 390 is a phone's width."""
    viewport = {"width": width, "height": 1000}
    is_phone = width == 390
    context = browser.new_context(
        offline=offline, viewport=viewport, is_mobile=is_phone, has_touch=is_phone
    )
    # On a busy machine a page may take a minute for what takes it a second.
    context.set_default_timeout(180_000)
    try:
        yield context.new_page()
    finally:
        context.close()
