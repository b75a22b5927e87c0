"""A Chromium for tests: `with browser_page() as page: …`, or a skip where there is none."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync"]  # fmt: skip


def executable():
    """Path of a Chromium or Chrome of this machine, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for found in map(shutil.which, names) if found and Path(found).exists()), None)


@contextmanager
def browser_page(offline=False):
    """A fresh page of a headless Chromium, closed afterwards."""
    playwright = pytest.importorskip("playwright.sync_api")
    if not executable():
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=executable(), args=ARGUMENTS)
        try:
            context = browser.new_context(offline=offline, viewport={"width": 1400, "height": 1000})
            yield context.new_page()
        finally:
            browser.close()
