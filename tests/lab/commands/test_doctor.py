"""`doctor` names what is here, what is missing, and what to do about it."""

import re
import subprocess
import sys
import warnings
from importlib.metadata import PackageNotFoundError

from ddp_course.lab.commands import doctor
from manyranks import linux, this_torch
from manyranks.errors import LaunchError
from manyranks.launching import launch


def test_the_report_names_what_is_here(capsys):
    import torch

    assert doctor.main() == 0
    printed = capsys.readouterr().out
    for part in (
        "their sum on cpu with gloo is right",
        "cores",
        "memory",
        "gloo",
        "GPUs",
        "jupyterlab",
        "hosts",
        "the same here as on any machine",
        "lessons 01 to 11, 14",
        torch.__version__,
        "docs/VERSIONS.md",
    ):
        assert part in printed, part
    assert printed.rstrip().endswith("The course runs on this machine.")


def test_a_torch_that_nobody_tried_is_a_hint(monkeypatch, capsys):
    monkeypatch.setattr(this_torch, "tried", lambda: [{"torch": "1.0.0"}])
    monkeypatch.setattr(doctor, "lessons", lambda: [])
    assert doctor.main() == 0
    printed = capsys.readouterr().out
    assert "has not been tried; 1.0.0 have been (docs/VERSIONS.md)" in printed
    assert "\n  tried" not in printed


def test_a_missing_package_is_fatal_and_says_what_to_do(capsys, monkeypatch):
    def without_widgets(package):
        if package == "ipywidgets":
            raise PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(doctor, "version", without_widgets)
    assert doctor.main() == 1
    assert (
        "No package metadata was found for ipywidgets; run: make setup" in capsys.readouterr().out
    )


def test_a_hub_of_one_core_and_little_memory_says_what_to_set(capsys, monkeypatch):
    """The sentence is a hint, and the doctor goes on."""
    monkeypatch.setattr(linux, "free_memory", lambda: 3 << 29)
    monkeypatch.setattr(linux, "processor_share", lambda: 1.0)
    monkeypatch.setattr(doctor, "NEEDED_GIB", 2)
    assert doctor.main() == 0
    printed = capsys.readouterr().out
    assert printed.count("! set K = 2 in the first cell of each lesson") == 2
    assert re.search(r"cores +1; .*four of them want two\n", printed)
    assert "1.5 GiB free; a lesson with four ranks takes 2 GiB" in printed


def test_gpus_that_cuda_cannot_use_are_a_line_and_no_traceback(capsys, monkeypatch):
    import torch

    def broken():
        warnings.warn(
            "CUDA initialization: The NVIDIA driver on your system is too old", stacklevel=1
        )
        return False

    def named(index):
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setattr(torch.cuda, "get_device_name", named)
    assert doctor.main() == 0
    printed = capsys.readouterr().out
    assert "! CUDA initialization: The NVIDIA driver on your system is too old" in printed
    assert "another machine's times, as there is no GPU here" in printed


def test_without_torch_the_report_ends_with_what_to_do(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert doctor.main() == 1
    printed = capsys.readouterr().out
    assert "jupyterlab" in printed
    assert re.search(r"\nThe course cannot run here: .*torch.*; run: make setup\n$", printed)


def test_two_ranks_that_cannot_be_launched_are_the_end(capsys, monkeypatch):
    def refuse(*_, **__):
        raise LaunchError("ranks meet on 127.0.0.1, but this machine's loopback is down\nmore")

    monkeypatch.setattr(launch, "launch", refuse)
    assert doctor.main() == 1
    assert capsys.readouterr().out.endswith(
        "cannot run here: ranks meet on 127.0.0.1, but this machine's loopback is down\n"
    )


def test_the_command_alone_loads_no_torch():
    loaded = "import sys, ddp_course.lab.commands.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0
