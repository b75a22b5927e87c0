"""`ddp-course audit FILE` says what is wrong with a script, and ends with 1 if anything is."""

import inspect

import pytest

from ddp_course import script
from ddp_course.lab import cli

SOURCE = inspect.getsource(script)


@pytest.mark.parametrize(
    "source, words",
    [
        (SOURCE, "none of the"),
        (SOURCE.replace("sampler.set_epoch(epoch)", "pass"), "set_epoch is not called"),
    ],
    ids=["right", "wrong"],
)
def test_a_script_of_ones_own(source, words, tmp_path, capsys):
    (tmp_path / "train.py").write_text(source)
    command = ["audit", str(tmp_path / "train.py"), "--", "FOLDER"]
    assert cli.main(command) == int(source != SOURCE)
    assert words in capsys.readouterr().out
