"""Badges that open a notebook on somebody else's machine, and the cell that installs the course.

published.txt says at which address the course is published, or "nowhere": then no notebook has a
badge or the cell. `make publish URL=https://github.com/owner/name` writes the address there and
into all that repeats it; `make publish URL=nowhere` takes it out again.
"""

import re
from pathlib import Path

from nbformat.v4 import new_code_cell, new_markdown_cell

PUBLISHED = Path(__file__).with_name("published.txt")
ADDRESS = re.compile(r"https://github\.com/[\w.-]+/[\w.-]*[\w-]")
# These are the ids of the two cells.
BADGES = "open-elsewhere"
INSTALL = "install-elsewhere"
FIRST = "00_start_here"
FOLDED = {"jupyter": {"source_hidden": True}, "cellView": "form"}  # JupyterLab's word and Colab's.
# Colab and Kaggle lack these packages and have the rest. They need no other, and pip is told so:
# otherwise it would say in red that the ipywidgets there are older than the course asks for.
NEEDED = ("cloudpickle", "pyroute2")
# This is the source of the cell, in which {course} and {needed} are filled in.
INSTALLING = """\
# On Colab and Kaggle this installs the course and leaves torch as it is.
# Anywhere else it does nothing.
import glob, importlib.util, os, subprocess, sys

hosted = {{"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"}} & os.environ.keys()
if hosted and not importlib.util.find_spec("ddp_course"):
    course = glob.glob("ddp_course-*.whl") or [{course!r}]
    alone = ["install", "--quiet", "--no-deps"]
    if subprocess.call([sys.executable, "-m", "pip", *alone, *course, *{needed}]):
        raise RuntimeError("not installed: switch the internet on (Kaggle: Settings), or put"
                           " a wheel beside this notebook, and run this cell again")"""


def repository() -> str:
    """Return the address of the course's repository on GitHub; "" while it is published nowhere.

    It is of the form https://github.com/owner/name.
    """
    address = PUBLISHED.read_text(encoding="utf-8").strip()
    return "" if address == "nowhere" else address


def publish(address: str, root: Path) -> None:
    """Write the address, or "nowhere", to published.txt, pyproject.toml and CITATION.cff of `root`.

    Raises ValueError for an address of another form.
    """
    if address != "nowhere" and not ADDRESS.fullmatch(address):
        raise ValueError(
            f"{address!r} is no address of the form https://github.com/owner/name: badges and links"
            ' are made of its two names. Without an address give "nowhere"'
        )
    PUBLISHED.write_text(f"{address}\n", encoding="utf-8")
    project = f'[project.urls]\nRepository = "{address}"\n\n'
    citation = f"repository-code: {address}\n"
    # Each line stands before the one that is named here, where there is an address.
    for name, line, below in (
        ("pyproject.toml", project, "[project.scripts]\n"),
        ("CITATION.cff", citation, "abstract: "),
    ):
        text = (root / name).read_text(encoding="utf-8")
        old = re.escape(line).replace(re.escape(address), r'[^\n"]+')
        text = re.sub(old, "", text)
        if address != "nowhere":
            text = text.replace(below, line + below, 1)
        (root / name).write_text(text, encoding="utf-8")


def first_words() -> str:
    """Return how README.md says where its commands are typed: after a clone, or in this folder."""
    home = repository()
    if home:
        return f"`git clone {home} && cd {home.rpartition('/')[2]}`, and there:"
    return "In this folder:"


def addresses(path: str) -> dict[str, str]:
    """Return {place: address that opens the notebook at `path`, a path in the repository}.

    It is empty where the course has no address. Solutions are refused.
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
    """Return the cells below the title: badges, with a link to the `other` notebook, and install.

    The other notebook is the exercise or the lesson of this `topic`. While the course is published
    nowhere only the links are there.
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
    if links:
        lines.append(" · ".join(links))
    found = []
    if lines:
        found.append(new_markdown_cell("\n".join(lines), id=BADGES))
    home = repository()
    if home:
        install = INSTALLING.format(course=f"ddp-course @ git+{home}", needed=list(NEEDED))
        found.append(new_code_cell(install, id=INSTALL, metadata=FOLDED))
    return found
