"""The command line: help, suggestions, exit codes, and one line for bad input."""

import json
import os
import signal
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from ddp_course.lab import cli


def test_a_reader_who_has_seen_enough_is_no_error(monkeypatch):
    def talk(args):
        print("a table", flush=True)
        print("more")

    speaker = SimpleNamespace(main=talk)
    monkeypatch.setitem(cli.COMMANDS, "talk", "")
    monkeypatch.setitem(sys.modules, "ddp_course.lab.commands.talk", speaker)
    reading, writing = os.pipe()
    os.close(reading)  # The reader has ended, as `head` does.
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli.main(["talk"]) == 128 + signal.SIGPIPE


def test_compare_prints_a_table_and_writes_results(tmp_path, capsys):
    options = ["--world-size", "2", "--steps", "3", "--stages", "1,4", "--link", "none"]
    assert cli.main(["compare", *options, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "single device" in printed
    assert "ring" in printed
    results = json.loads((tmp_path / "compare.json").read_text())
    assert results["world_size"] == 2
    assert len(results["stages"]) == 2
    assert results["problem"] == "digits"
    assert results["steps"] == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("--world-size", "0"),
        ("--link", "fast"),
        ("--out", "/proc/results"),
        ("--world-size", "two"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        code = cli.main(["compare", *arguments])
    except SystemExit as stopped:  # argparse's own refusals
        code = stopped.code
    captured = capsys.readouterr()
    assert code == 2
    lines = [line for line in captured.err.splitlines() if line.startswith("ddp-course")]
    assert len(lines) == 1
    assert len(lines[0]) > 30
    assert not list(tmp_path.rglob("compare.*"))


def test_a_run_that_takes_too_long_is_exit_code_1(capsys, tmp_path):
    slow = [
        "compare",
        "--steps",
        "100000",
        "--timeout",
        "3",
        "--stages",
        "3",
        "--link",
        "none",
        "--out",
        str(tmp_path),
    ]
    assert cli.main(slow) == 1
    assert "ddp-course: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_command_has_help():
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            cli.main([name, "--help"])
        assert stopped.value.code == 0


def test_the_version_is_that_of_the_installed_package(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ddp-course {metadata.version('ddp-course')}\n"


def test_no_command_shows_all_and_the_first(capsys):
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)
    assert shown.splitlines()[-1] == "start with: ddp-course lab"


@pytest.mark.parametrize(
    ("words", "meant"), [("comprae", "compare"), ("compare --word-size 2", "--world-size")]
)
def test_what_is_misspelt_is_suggested(words, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")
