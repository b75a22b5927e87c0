"""Every test file ends as it began: no process and no temporary file is left behind."""

import csv
import os
import re
import shutil
import signal
import sys
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

import psutil
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Many containers set this variable; then every rank would compile the course anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_configure(config):
    """Let interrupts be heard, and give this run a temporary folder of its own until it ends.

    What is left behind in it is ours.
    """
    # A script's background process ignores interrupts, and so would all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    is_worker = hasattr(config, "workerinput")  # Workers of pytest-xdist inherit the environment.
    if is_worker or "DDP_COURSE_TESTS" not in os.environ:
        tempfile.tempdir = folder = tempfile.mkdtemp(prefix="tests_")
        os.environ["DDP_COURSE_TESTS"] = os.environ["TMPDIR"] = folder
        keywords = {"ignore_errors": True}
        # multiprocessing's own finalizers come before this one.
        Finalize(None, shutil.rmtree, args=(folder,), kwargs=keywords, exitpriority=-200)


# This table has seconds of tests, or of whole files with all their tests.
DURATIONS = Path(__file__).with_name("durations.csv")
MOST_SECONDS = 3.5  # a test that takes longer is not for `make test`


def pytest_runtest_logreport(report):
    """Write down what each test costs, with DDP_COURSE_DURATIONS=FILE.

    tests/durations.py makes the table from it.
    """
    path = os.environ.get("DDP_COURSE_DURATIONS")
    if path and "PYTEST_XDIST_WORKER" not in os.environ and report.duration >= 0.1:
        with open(path, "a", encoding="utf-8", newline="") as file:
            csv.writer(file).writerow(
                [f"{report.duration:.1f}", report.nodeid.removeprefix("tests/"), report.when]
            )


def pytest_collection_modifyitems(items):
    """Mark as slow what has cost too much for every day, by itself or as a file.

    "keep" makes an exception. The files with the longest tests come first, so that no worker begins
    one when the others have ended.
    """
    with DURATIONS.open(encoding="utf-8") as file:
        rows = {row["test"]: row for row in csv.DictReader(file)}
    longest = {}
    for name, row in rows.items():
        file = name.partition("::")[0]
        longest[file] = max(longest.get(file, 0.0), float(row["seconds"]))
    items.sort(
        key=lambda item: -longest.get(item.nodeid.removeprefix("tests/").partition("::")[0], 0.0)
    )
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        # The table may name any of these.
        names = [name, name.split("[")[0], name.partition("::")[0]]
        row = next((rows[name] for name in names if name in rows), None)
        if row and row["why"] != "keep" and float(row["seconds"]) > MOST_SECONDS:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file's tests stay with one worker, which shares its launches.

    Each lesson goes anywhere: it shares none.
    """
    # The import stands here, as a contributor may have come without pytest-xdist.
    from xdist.scheduler import LoadFileScheduling

    class ByFileOrLesson(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return nodeid if "::test_lesson_runs_" in nodeid else super()._split_scope(nodeid)

    return ByFileOrLesson(config, log) if config.option.dist == "loadfile" else None


# These processes end with the one that runs the tests.
OWN = re.compile(r"launching/server\.py|multiprocessing.(forkserver|resource_tracker)")


def descendants():
    """Return the command lines of all processes that this one started, by pid, zombies aside."""
    alive = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                alive[process.pid] = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
    return alive


def entries():
    """Return the names in the temporary folder, but for caches and what Python removes at its end.

    The caches are those of pytest and torch.
    """
    return {
        path.name
        for path in Path(tempfile.gettempdir()).iterdir()
        if not path.name.startswith(("pytest-", "torchinductor_", "pymp-"))
    }


@pytest.fixture(autouse=True, scope="module")
def no_leftovers():
    """After each test file nothing runs but the launcher's server, and no file is left behind."""
    before = entries()
    yield
    leftovers = {pid: line for pid, line in descendants().items() if not OWN.search(line)}
    for pid in leftovers:
        try:
            psutil.Process(pid).wait(60)  # A process that is on its way out may finish.
        except (psutil.NoSuchProcess, psutil.TimeoutExpired):
            continue
    leftovers = {pid: line for pid, line in descendants().items() if pid in leftovers}
    assert not leftovers, f"processes left behind: {leftovers}"
    assert not entries() - before, f"files left behind: {entries() - before}"
