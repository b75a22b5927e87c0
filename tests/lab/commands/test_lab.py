"""`ddp-course lab`: the learner's copies are kept, the untouched ones renewed."""

import io
import json
import os
import platform
import sys
import time

import pytest
import tqdm

from ddp_course.lab import cli, waiting
from ddp_course.lab.commands import as_typed, compare, lab
from ddp_course.lab.learners_copy import RECORD
from ddp_course.lab.measuring import comparison


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course of two files that a test may change."""
    home = tmp_path / "course"
    for name in lab.FOLDERS:
        (home / name).mkdir(parents=True)
    (home / "notebooks" / "00_start_here.md").write_text("first")
    (home / "exercises" / "04_ring.md").write_text("exercise")
    monkeypatch.setattr(lab, "course_folder", lambda name: home / name)
    return home


def test_all_is_copied_and_a_second_time_changes_nothing(course, tmp_path):
    mine = tmp_path / "mine"
    assert lab.bring(mine) == []
    assert (mine / "notebooks" / "00_start_here.md").read_text() == "first"
    before = times_of(mine)
    assert lab.bring(mine) == []
    assert times_of(mine) == before


def times_of(folder):
    """Return when each document in a folder was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.md")}


def test_an_update_renews_what_nobody_touched_and_keeps_the_learners_work(course, tmp_path):
    mine = tmp_path / "mine"
    lab.bring(mine)
    answered = mine / "exercises" / "04_ring.md"
    answered.write_text("my answer")
    assert lab.bring(mine) == []
    assert answered.read_text() == "my answer"
    (course / "exercises" / "04_ring.md").write_text("exercise, mended")
    (course / "notebooks" / "00_start_here.md").write_text("first, mended")
    for _ in range(2):
        assert lab.bring(mine) == ["exercises/04_ring.md"]
        assert answered.read_text() == "my answer"
    assert (mine / "notebooks" / "00_start_here.md").read_text() == "first, mended"
    answered.rename(mine / "exercises" / "04_ring_mine.md")
    assert lab.bring(mine) == []
    assert answered.read_text() == "exercise, mended"


def test_a_lesson_comes_without_outputs_and_running_it_does_not_make_it_the_learners(
    course, tmp_path
):
    def lesson(source, output, **metadata):
        outputs = [{"output_type": "stream", "name": "stdout", "text": output}]
        cell = {"cell_type": "code", "source": source, "outputs": outputs, "execution_count": 1}
        return json.dumps({"cells": [cell], "metadata": metadata})

    original = course / "notebooks" / "00_start_here.ipynb"
    mine = tmp_path / "notebooks" / "00_start_here.ipynb"
    original.write_text(lesson("1 + 1", "2", widgets={"state": {}}))
    lab.bring(tmp_path)
    copied = json.loads(mine.read_text())
    assert copied["cells"][0]["outputs"] == []
    assert copied["metadata"]["language_info"]["version"] == platform.python_version()
    # JupyterLab takes the states of unused widgets out, which would be a change to save.
    assert "widgets" not in copied["metadata"]
    # The learner has opened, run and saved it.
    mine.write_text(lesson(["1 ", "+ 1"], "2", language_info={"name": "python"}))
    original.write_text(lesson("1 + 2", "3"))
    assert lab.bring(tmp_path) == []
    assert "1 + 2" in mine.read_text()


def test_what_was_there_before_is_not_overwritten(course, tmp_path):
    own = tmp_path / "mine" / "notebooks" / "00_start_here.md"
    own.parent.mkdir(parents=True)
    own.write_text("not of this course")
    assert lab.bring(tmp_path / "mine") == ["notebooks/00_start_here.md"]
    assert own.read_text() == "not of this course"


@pytest.mark.parametrize("damaged", ["", '{"exercises/04_ring.md": "6f'])
def test_a_damaged_record_costs_no_work_and_is_written_anew(course, tmp_path, damaged):
    lab.bring(tmp_path)
    answered = tmp_path / "exercises" / "04_ring.md"
    answered.write_text("my answer")
    (tmp_path / RECORD).write_text(damaged)
    assert lab.bring(tmp_path) == ["exercises/04_ring.md"]
    assert answered.read_text() == "my answer"
    (course / "notebooks" / "00_start_here.md").write_text("first, mended")
    lab.bring(tmp_path)
    assert (tmp_path / "notebooks" / "00_start_here.md").read_text() == "first, mended"


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(course, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["lab", str(tmp_path / "file"), "--no-open"]) == 2
    assert capsys.readouterr().err.startswith("ddp-course: [Errno 20] Not a directory: ")
    assert cli.main(["lab", str(tmp_path / "mine"), "--no-open"]) == 0
    assert "ddp-course lab" in capsys.readouterr().out


def test_each_copy_has_tabs_of_its_own(tmp_path, monkeypatch):
    for name in ("PATH", "JUPYTER_CONFIG_PATH", "JUPYTERLAB_WORKSPACES_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.chdir(tmp_path)
    lab.prepare_environment(tmp_path)
    assert os.environ["JUPYTERLAB_WORKSPACES_DIR"].startswith(str(tmp_path))


def test_without_a_folder_copies_go_to_work(course, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["lab", "--no-open"]) == 0
    assert (tmp_path / "work" / "notebooks" / "00_start_here.md").exists()
    assert capsys.readouterr().out.splitlines()[-1].startswith("Next: ")


def test_a_command_that_the_shell_would_not_find_is_named_with_its_path(monkeypatch):
    monkeypatch.setattr("sys.argv", [".venv/bin/ddp-course"])
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert as_typed("lab") == ".venv/bin/ddp-course lab"
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/ddp-course")
    assert as_typed("lab") == "ddp-course lab"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_what_takes_long_has_its_seconds_counted_on_a_terminal_only(monkeypatch):
    monkeypatch.setattr(waiting, "TICK_SECONDS", 0.05)
    shown = {}
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", stream)
        with pytest.raises(KeyError), waiting.say_while("loading"):
            wait_for_seconds(stream)
            raise KeyError
        shown[type(stream)] = stream.getvalue()
    assert shown[Terminal].startswith("loading\n0.05 s\r0.1 s\r")
    assert shown[io.StringIO] == ""


def wait_for_seconds(stream):
    """Wait until two seconds were counted on a terminal, or for a moment if none are."""
    time.sleep(0.1)
    enough = stream.getvalue().count(" s\r") + 2
    deadline = time.monotonic() + 60
    while stream.isatty() and stream.getvalue().count(" s\r") < enough:
        assert time.monotonic() < deadline, "no seconds are counted"
        time.sleep(0.01)


def slowly(function):
    """Return the function, as a slow machine carries it out."""

    def call(*args, **kwargs):
        wait_for_seconds(sys.stderr)
        return function(*args, **kwargs)

    return call


def test_compare_counts_seconds_before_its_first_bar_and_before_its_table(tmp_path, monkeypatch):
    monkeypatch.setattr(waiting, "TICK_SECONDS", 0.05)
    monkeypatch.setattr("sys.stderr", Terminal())
    # Where a test before has had a kernel in this process, the bar would be a widget.
    monkeypatch.setattr("tqdm.auto.tqdm", tqdm.tqdm)
    for module, name in ((comparison, "device_and_link"), (compare, "save")):
        monkeypatch.setattr(module, name, slowly(getattr(module, name)))
    options = ["--world-size", "1", "--stages", "1", "--steps", "1"]
    assert cli.main(["compare", *options, "--out", str(tmp_path)]) == 0
    before_bar, _, after_bar = sys.stderr.getvalue().partition("single device:")
    assert "0.05 s\r" in before_bar.partition("preparing")[2]
    assert "0.05 s\r" in after_bar.partition("drawing")[2]
