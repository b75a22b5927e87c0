"""`ddp-course check` without a number: where a learner is; and `ddp-course certificate`."""

import json

import nbformat
import pytest

from ddp_course.lab import cli, learners_copy, show
from ddp_exercises import check
from ddp_exercises.commands import certificate


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
    assert lines[3:] == ["exercises still to begin: 14", "nothing was checked or guessed yet"]


def test_checks_and_guesses_count_and_the_next_task_is_named(copy, capsys):
    check("4.1", rung_of_the_ring)
    for answer in (2, 4):
        guess = show.predict(f"how many, {answer}?", [2, 4])
        guess.buttons.value = 2
        guess.reveal("2", answer)
    capsys.readouterr()
    lines = lines_of(capsys)
    assert lines[2].split() == ["4", "1", "of", "15", "4.2"]
    assert lines[3] == "exercises still to begin: 14"
    assert lines[-1].startswith("right in 1 of 2 guesses; last visit: ")
    with pytest.raises(Exception, match=r"Exercise 4\.1"):  # What was right may become wrong again.
        check("4.1", lambda rank, step, world_size: rank)
    assert lines_of(capsys)[2].split() == ["4", "0", "of", "15", "4.1"]


def test_an_unsolved_task_is_not_wrong(copy, capsys):
    def chunk_to_send(rank, step, world_size):
        raise NotImplementedError("Exercise 4.1: Which chunk to send")

    check("4.1", chunk_to_send)
    assert capsys.readouterr().out == '4.1 is not solved yet; hint("4.1") helps.\n'
    assert learners_copy.progress_in(copy) == {}


def written_certificate(copy, capsys):
    """A certificate of one task, one guess, one run of one's own, one of the capstone, a figure."""
    check("4.1", rung_of_the_ring)
    guess = show.predict("how many <rings>?", [2, 4])
    guess.buttons.value = 2
    guess.reveal("4", 4)
    learners_copy.keep("runs", "my ring", "4 ranks, digits: 2.66 times as fast")
    run = dict.fromkeys(certificate.OF_A_RUN, 7) | {"wrap": "ddp"}
    (copy / "first").mkdir()
    (copy / "first" / "run.json").write_text(json.dumps(run))
    (copy / "exercises" / "run.json").write_text("[]")  # It is somebody else's.
    figure = nbformat.v4.new_output("display_data", data={"image/png": "aW1hZ2U="})
    cells = []
    for name, outputs in {"time-by-ranks": [figure], "yours-in-the-comparison": []}.items():
        cells.append(nbformat.v4.new_code_cell("show", id=name, outputs=outputs))
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells), copy / "notebooks" / "04_ring_all_reduce.ipynb"
    )
    nbformat.write(nbformat.v4.new_notebook(), copy / "notebooks" / "05_bucketed_ddp.ipynb")
    path = copy / "mine.html"
    assert cli.main(["certificate", "--name", "Ada <L>", "--out", str(path)]) == 0
    capsys.readouterr()
    return path


def test_the_certificate_has_points_guesses_runs_and_figures_and_loads_nothing(copy, capsys):
    page = written_certificate(copy, capsys).read_text()
    assert "<td>1 of 15</td>" in page
    assert "<td>4.1</td>" in page
    assert "<td>how many &lt;rings&gt;?</td><td>2</td>\n<td>no</td>" in page
    assert "2.66 times as fast" in page
    assert "<td>first</td><td>wrap ddp, world_size 7" in page
    assert page.count("data:image/png;base64,aW1hZ2U=") == 1
    assert "http" not in page
    assert "<script" not in page
    assert "prefers-color-scheme: dark" in page


def test_a_certificate_that_was_changed_is_told(copy, capsys):
    path = written_certificate(copy, capsys)
    assert cli.main(["certificate", "--verify", str(path)]) == 0
    assert "as it was written, by Ada <L>: 1 of " in capsys.readouterr().out
    page = path.read_text()
    changes = {
        "1 of 15": "15 of 15",
        "Ada": "Bob",
        "<td>no</td>": "<td>yes</td>",
        "aW1hZ2U=": "aW1hZ2V=",
        "</html>": "</html> ",
    }
    for old, new in changes.items():
        (copy / "changed.html").write_text(page.replace(old, new))
        assert cli.main(["certificate", "--verify", str(path), str(copy / "changed.html")]) == 1
        assert "changed.html: CHANGED since" in capsys.readouterr().out, old
    path.write_text("<p>I have solved everything</p>")
    assert cli.main(["certificate", "--verify", str(path)]) == 1
    assert "no certificate" in capsys.readouterr().out


def test_outside_a_copy_nothing_is_kept_and_the_way_in_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    check("4.1", rung_of_the_ring)
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["check"]) == cli.main(["certificate"]) == 2
    assert "ddp-course lab" in capsys.readouterr().err


def test_a_damaged_record_costs_no_check(copy):
    (copy / learners_copy.PROGRESS).write_text("{")
    check("4.1", rung_of_the_ring)
    assert json.loads((copy / learners_copy.PROGRESS).read_text())["tasks"] == {"4.1": True}
