import sys
from importlib.metadata import PackageNotFoundError

import pytest

from ddp_course.commands import doctor


def test_the_report_names_what_is_here(capsys):
    import torch

    assert doctor.main() == 0
    printed = capsys.readouterr().out
    for part in ("cores", "memory", "gloo", "GPUs", "jupyterlab", "hosts", "wire", "01, 02", torch.__version__):
        assert part in printed, part
    assert printed.rstrip().endswith("The course runs on this machine.")


def test_a_missing_package_is_fatal_and_says_what_to_do(capsys, monkeypatch):
    def without_nbval(package):
        if package == "nbval":
            raise PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(doctor, "version", without_nbval)
    assert doctor.main() == 1
    assert "nbval is missing; run: make setup" in capsys.readouterr().out


def test_little_memory_is_a_hint_not_an_end(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "NEEDED_MEMORY", 2**60)
    assert doctor.main() == 0
    assert "use --world-size 2" in capsys.readouterr().out


def test_without_torch_the_report_ends_with_what_to_do(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor, "links", lambda: pytest.fail("links need torch"))
    assert doctor.main() == 1
    assert "run: make setup" in (printed := capsys.readouterr().out)
    assert "jupyterlab" in printed
