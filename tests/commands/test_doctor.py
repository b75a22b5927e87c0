import re
import subprocess
import sys
import warnings
from importlib.metadata import PackageNotFoundError

import pytest

from ddp_course.commands import doctor
from ddp_course.running import linux


def test_the_report_names_what_is_here(capsys):
    import torch

    assert doctor.main() == 0
    printed = capsys.readouterr().out
    for part in ("cores", "memory", "gloo", "GPUs", "jupyterlab", "hosts", "wire", "01, 02", torch.__version__):
        assert part in printed, part
    assert printed.rstrip().endswith("The course runs on this machine.")


@pytest.mark.parametrize("version, told", [("2.9.1+cu128", True), ("2.10.0", False), ("3.0.0.dev20270101", False)])
def test_an_old_torch_is_named(monkeypatch, version, told):
    import torch

    monkeypatch.setattr(torch, "__version__", version)
    hints = {name: problem for name, _, problem in doctor.torch_parts()}
    assert hints["torch"] == (("hint", "the course was tried with torch 2.10 and newer") if told else None)


def test_a_missing_package_is_fatal_and_says_what_to_do(capsys, monkeypatch):
    def without_nbval(package):
        if package == "nbval":
            raise PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(doctor, "version", without_nbval)
    assert doctor.main() == 1
    assert "nbval is missing; run: make setup" in capsys.readouterr().out


def test_a_hub_of_one_core_and_little_memory_says_what_to_set(capsys, monkeypatch):
    """It is a hint, not the end."""
    monkeypatch.setattr(linux, "free_memory", lambda: 3 << 29)
    monkeypatch.setattr(linux, "processor_share", lambda: 1.0)
    monkeypatch.setattr(doctor, "NEEDED_MEMORY", 2 << 30)
    assert doctor.main() == 0
    printed = capsys.readouterr().out
    for what in ("2 GiB", "two cores"):
        assert f"four ranks want {what}; set K = 2 in the first cell of each lesson" in printed
    assert re.search(r"cores +1\n", printed) and "1.5 GiB free" in printed


def test_gpus_that_cuda_cannot_use_are_a_line_and_no_traceback(capsys, monkeypatch):
    import torch

    def broken():
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old", stacklevel=1)
        return False

    def named(index):
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setattr(torch.cuda, "get_device_name", named)
    assert doctor.main() == 0
    printed = capsys.readouterr().out
    assert "! this machine has 2 GPUs, but CUDA cannot use them (CUDA initialization: The NVIDIA" in printed
    assert "4 ranks on the CPU with gloo" in printed


def test_without_torch_the_report_ends_with_what_to_do(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor, "links", lambda: pytest.fail("links need torch"))
    assert doctor.main() == 1
    assert "run: make setup" in (printed := capsys.readouterr().out)
    assert "jupyterlab" in printed


def test_the_command_alone_loads_no_torch():
    loaded = "import sys, ddp_course.commands.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0
