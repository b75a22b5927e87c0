"""The library stands alone: it names no course, needs nothing of it, and its front has types."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import manyranks

INSTALLED = Path(manyranks.__file__).parent  # The library is imported from here.
HOME = Path(__file__).parents[2] / "manyranks"  # Its sources are here.
ALONE = Path(__file__).parents[1] / "support" / "alone"
README = (HOME / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
PRINTED = [  # Each example of the README prints this, among other words.
    "[10.0, 10.0, 10.0, 10.0]",
    "0.486",
    "dist.recv(torch.zeros(1), other)",
    "False",
    "weights differ",
    "0.181, 0.181",
]


def run_alone(program, folder):
    """Run a program without the course, in its ranks too; return its output."""
    path = folder / "program.py"
    path.write_text(program, encoding="utf-8")
    paths = os.pathsep.join([str(ALONE), str(INSTALLED.parent)])
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_the_library_must_do_without_is_hidden(tmp_path):
    with pytest.raises(AssertionError, match="No module named 'ddp_course'"):
        run_alone("import ddp_course", tmp_path)


def test_the_examples_of_the_readme_run_without_the_course(tmp_path):
    assert len(EXAMPLES) == len(PRINTED)
    printed = run_alone("\nprint('next example')\n".join(EXAMPLES), tmp_path)
    for words, expected in zip(printed.split("next example"), PRINTED, strict=True):
        assert expected in words


def test_no_file_of_the_library_names_the_course():
    texts = {
        path.relative_to(HOME).as_posix(): path.read_text(encoding="utf-8")
        for path in HOME.rglob("*")
        if path.suffix in (".py", ".md", ".csv")
    }
    assert len(texts) > 50
    assert [name for name, text in texts.items() if re.search(r"ddp_|ddp-course", text)] == []


CHECKED = {  # What a type checker says of each line.
    "reveal_type(launch)": 'Revealed type is "def [T] (fn: def (*Any, **Any) -> T,',
    "launch(3, worldsize='x')": 'Argument 1 to "launch" has incompatible type "int"',
    "launch(print, world_size='4')": 'Argument "world_size" to "launch" has incompatible',
    "launch(print, device=Device(2e9))": 'Argument 1 to "Device" has incompatible type "float"',
    "launch(print, link=Link('1Gbit', 5))": 'Argument 2 to "Link" has incompatible type "int"',
    "reveal_type(join())": 'Revealed type is "tuple[int, int]"',
    "manyranks.lunch": 'Module has no attribute "lunch"',
}


def test_a_type_checker_knows_the_front(tmp_path):
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    imports = ["import manyranks", "from manyranks import Device, Link, join, launch"]
    program.write_text("\n".join([*imports, *CHECKED]), encoding="utf-8")
    # The front names no type of torch, which mypy would read for twenty seconds.
    options = tmp_path / "mypy.ini"
    options.write_text("[mypy]\nfollow_imports = silent\n[mypy-torch.*]\nfollow_imports = skip\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(options), str(program)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(HOME.parent)},
    )
    for number, said in enumerate(CHECKED.values(), len(imports) + 1):
        [line] = [
            line for line in done.stdout.splitlines() if line.startswith(f"program.py:{number}:")
        ]
        assert said in line


def test_every_name_of_the_front_is_there_and_no_other():
    assert all(getattr(manyranks, name) is not None for name in manyranks.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        manyranks.lunch  # noqa: B018 (the access itself raises)


def test_the_librarys_own_build_lists_all_its_packages():
    text = (HOME / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.findall(r'^    "(manyranks[\w.]*)",', text, re.MULTILINE)
    folders = {path.parent.relative_to(HOME.parent) for path in HOME.rglob("__init__.py")}
    assert sorted(listed) == sorted(".".join(folder.parts) for folder in folders)
