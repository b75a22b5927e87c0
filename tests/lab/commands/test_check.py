"""`ddp-course check` without a number: where a learner is, and one page to keep."""

import json

import nbformat
import pytest

from ddp_course.lab import cli, learners_copy, show
from ddp_exercises import check


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A learner's copy, of which this process runs in the exercises."""
    (tmp_path / learners_copy.RECORD).write_text("{}")
    for name in ("notebooks", "exercises"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "exercises")
    return tmp_path


def rung_of_the_ring(rank, step, world_size):
    return (rank - step) % world_size


def lines_of(capsys, *options):
    assert cli.main(["check", *options]) == 0
    return capsys.readouterr().out.splitlines()


def test_nothing_done_yet(copy, capsys):
    lines = lines_of(capsys)
    assert lines[2].split() == ["1", "0", "of", "6", "1.1"]
    assert lines[-1] == "nothing was checked or guessed yet"


def test_checks_and_guesses_count_and_the_next_task_is_named(copy, capsys):
    check("4.1", rung_of_the_ring)
    for answer in (2, 4):
        guess = show.predict(f"how many, {answer}?", [2, 4])
        guess.buttons.value = 2
        guess.reveal("2", answer)
    capsys.readouterr()
    lines = lines_of(capsys)
    assert lines[5].split() == ["4", "1", "of", "15", "4.2"]
    assert lines[-1].startswith("right in 1 of 2 guesses; last visit: ")
    with pytest.raises(Exception, match=r"Exercise 4\.1"):  # What was right may become wrong again.
        check("4.1", lambda rank, step, world_size: rank)
    assert lines_of(capsys)[5].split() == ["4", "0", "of", "15", "4.1"]


def test_an_unsolved_task_is_not_wrong(copy, capsys):
    def chunk_to_send(rank, step, world_size):
        raise NotImplementedError("Exercise 4.1: Which chunk to send")

    check("4.1", chunk_to_send)
    assert capsys.readouterr().out == '4.1 is not solved yet; hint("4.1") helps.\n'
    assert learners_copy.progress_in(copy) == {}


def test_the_page_has_points_and_own_figures_and_loads_nothing(copy, capsys):
    check("4.1", rung_of_the_ring)
    figure = nbformat.v4.new_output("display_data", data={"image/png": "aW1hZ2U="})
    cell = nbformat.v4.new_code_cell("show", id="time-by-ranks", outputs=[figure])
    nbformat.write(
        nbformat.v4.new_notebook(cells=[cell]), copy / "notebooks" / "04_ring_all_reduce.ipynb"
    )
    nbformat.write(nbformat.v4.new_notebook(), copy / "notebooks" / "05_bucketed_ddp.ipynb")
    lines_of(capsys, "--html", str(copy / "mine.html"))
    page = (copy / "mine.html").read_text()
    assert "<td>1 of 15</td>" in page and page.count("data:image/png;base64,aW1hZ2U=") == 1
    assert "http" not in page and "<script" not in page
    assert "prefers-color-scheme: dark" in page


def test_outside_a_copy_nothing_is_kept_and_the_way_in_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    check("4.1", rung_of_the_ring)
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["check"]) == 2
    assert "ddp-course lab" in capsys.readouterr().err


def test_a_damaged_record_costs_no_check(copy):
    (copy / learners_copy.PROGRESS).write_text("{")
    check("4.1", rung_of_the_ring)
    assert json.loads((copy / learners_copy.PROGRESS).read_text())["tasks"] == {"4.1": True}
