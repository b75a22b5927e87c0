"""Badges that open a notebook on somebody else's machine, and the cell that installs the course
there.

The repository's address is in pyproject.toml, under [project.urls], and nowhere else. Where it is
not set, no notebook has a badge, and the cell installs from a wheel beside it or from PyPI.
"""

import re
from pathlib import Path

from nbformat.v4 import new_code_cell, new_markdown_cell

ROOT = Path(__file__).resolve().parents[1]
# These are the ids of the two cells.
BADGES = "open-elsewhere"
INSTALL = "install-elsewhere"
FIRST = "00_start_here"
FOLDED = {"jupyter": {"source_hidden": True}, "cellView": "form"}  # JupyterLab's word and Colab's.
NEEDED = ("cloudpickle", "pyroute2")  # Colab and Kaggle lack these packages and have the rest.
# This is the source of the cell, in which {course} and {needed} are filled in.
INSTALLING = """\
# On Colab and Kaggle this installs the course and leaves torch as it is.
# Anywhere else it does nothing.
import glob, importlib.util, os, subprocess, sys

hosted = {{"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"}} & os.environ.keys()
if hosted and not importlib.util.find_spec("ddp_course"):
    course = glob.glob("ddp_course-*.whl") or [{course!r}]
    for wanted in (["--no-deps", *course], {needed}):
        if subprocess.call([sys.executable, "-m", "pip", "install", "--quiet", *wanted]):
            raise RuntimeError("not installed: switch the internet on (Kaggle: Settings), or put"
                               " a wheel beside this notebook, and run this cell again")"""


def repository() -> str:
    """The address of the course's repository on GitHub, such as https://github.com/owner/name; ""
    where it has none.
    """
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pattern = r'^Repository = "(https://github\.com/[\w.-]+/[\w.-]+)"$'
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else ""


def addresses(path: str) -> dict[str, str]:
    """{place: address that opens the notebook at `path`, a path in the repository}; empty where the
    course has no address. Solutions are refused.
    """
    if not path.startswith(("notebooks/", "exercises/")):
        raise ValueError(f"badges open lessons and exercises, not {path}")
    home = repository()
    if not home:
        return {}
    name = home.removeprefix("https://github.com/")
    return {
        "Colab": f"https://colab.research.google.com/github/{name}/blob/main/{path}",
        "Kaggle": f"https://kaggle.com/kernels/welcome?src={home}/blob/main/{path}",
        "Binder": f"https://mybinder.org/v2/gh/{name}/main?urlpath=lab/tree/{path}",
        "Codespaces": f"https://codespaces.new/{name}",
    }


def cells(folder: str, topic: str, other: str | None) -> list:
    """The two cells: badges, with a link to the `other` notebook (exercise or lesson) of this
    `topic`, and install.
    """
    lines = []
    for place, address in addresses(f"{folder}/{topic}.ipynb").items():
        lines.append(f"[![Open in {place}](../docs/badges/{place.lower()}.svg)]({address})")
    links = []
    if other:
        kind = "Lesson" if folder == "exercises" else "Exercise"
        links.append(f"[{kind} {int(topic[:2])}](../{other}/{topic}.ipynb)")
    if topic != FIRST:
        links.append(f"[Map of the course](../notebooks/{FIRST}.ipynb)")
    lines.append(" · ".join(links))
    home = repository()
    course = f"ddp-course @ git+{home}" if home else "ddp-course"
    install = INSTALLING.format(course=course, needed=list(NEEDED))
    return [
        new_markdown_cell("\n".join(lines).rstrip(), id=BADGES),
        new_code_cell(install, id=INSTALL, metadata=FOLDED),
    ]
