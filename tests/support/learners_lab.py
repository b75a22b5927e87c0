"""`ddp-course lab` as a learner starts it, for tests that look at it in a browser."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager


@contextmanager
def running_lab(folder, theme="Dark"):
    """The lab for the copies in `folder`, with a bare PATH; its address and token.

    It is ended with everything that it started.
    """
    choose_theme(folder, theme)
    log = (folder / "log").open("w+")
    environ = {
        **os.environ,
        "PATH": "/usr/bin:/bin",
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
    }
    command = [sys.executable, "-m", "ddp_course.lab.cli", "lab", folder, "--"]
    process = subprocess.Popen(
        [*command, "--no-browser", "--port=0", "--ServerApp.port_retries=0"],
        stdout=log,
        stderr=log,
        env=environ,
        start_new_session=True,
    )
    try:
        yield address(process, folder / "log")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.close()


def choose_theme(folder, theme):
    """The theme of JupyterLab's next page."""
    where = folder / "settings" / "@jupyterlab" / "apputils-extension"
    where.mkdir(parents=True, exist_ok=True)
    (where / "themes.jupyterlab-settings").write_text(f'{{"theme": "JupyterLab {theme}"}}')


def address(process, log):
    """Wait for the server to print where it opens; return its address and its token."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        match = re.search(r"(http://127\.0\.0\.1:\d+)/lab\S*\?token=(\w+)", log.read_text())
        if match:
            return match.groups()
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


RESTART = """async () => {
  const kernels = await (await fetch("/api/kernels")).json();
  const token = document.cookie.match(/_xsrf=([^;]+)/)[1];
  for (const {id} of kernels) {
    await fetch(`/api/kernels/${id}/restart`, {method: "POST", headers: {"X-XSRFToken": token}});
  }
}"""
