"""A Chromium for tests, or a skip where there is none: one browser for a whole module, a fresh page
for each test.
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
    """Path of a Chromium or Chrome of this machine, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(
        (found for found in map(shutil.which, names) if found and Path(found).exists()), None
    )


@contextmanager
def running_browser():
    """A headless Chromium, ended afterwards."""
    playwright = pytest.importorskip("playwright.sync_api")
    if not executable():
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=executable(), args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def fresh_page(browser, offline=False):
    """A page of its own: nothing is kept of the pages before it."""
    context = browser.new_context(offline=offline, viewport={"width": 1400, "height": 1000})
    try:
        yield context.new_page()
    finally:
        context.close()
