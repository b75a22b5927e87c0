"""Build the course as a web site: `python authoring/site.py [--out site]`.

    notebooks/*.ipynb, exercises/*.ipynb  ->  pages of Markdown (web/pages.py), explorers drawn
                                              (web/explorers.py)
    docs/*.md                             ->  pages too
    the packages' docstrings              ->  reference/, by mkdocstrings
    all of it                             ->  HTML by Material for MkDocs (web/mkdocs.yml says why)

Nothing is fetched, neither when the site is built nor when its pages are opened, from a server or
from a file.
"""

import argparse
import logging
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import build
import elsewhere
from tqdm import tqdm
from web import explorers, pages

import manyranks

ROOT = Path(__file__).resolve().parents[1]
WEB = Path(__file__).resolve().parent / "web"
PICTURES = 180  # An explorer has at most about this many, so that a page stays below 6 MB.
LAB = "ddp_course/lab"
PACKAGES = ("manyranks", "ddp_course", LAB, "ddp_exercises", "ddp_predictions")
SHORT = "show_root_heading: false"


def main(arguments=None):
    """Build the whole site; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "site", help="folder to build into (default: site)"
    )
    parser.add_argument(
        "--pictures", type=int, default=PICTURES, metavar="N", help="most pictures an explorer gets"
    )
    args = parser.parse_args(arguments)
    if args.out.exists() and any(args.out.iterdir()) and not (args.out / "index.html").exists():
        print(
            f"site.py: {args.out} is not empty and holds no site; choose another folder",
            file=sys.stderr,
        )
        return 2
    if not elsewhere.repository():
        print(
            "site.py: the pages link into the repository, and authoring/published.txt says"
            " nowhere; run: make publish URL=https://github.com/owner/name",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory() as folder:
        nav = write_sources(Path(folder), args.pictures)
        print("writing the pages, which takes about a minute", flush=True)
        generate(Path(folder), args.out.resolve(), nav)
    print(f"wrote {len(list(args.out.rglob('*.html')))} pages; open index.html in {args.out.name}/")
    return 0


def write_sources(folder, pictures):
    """Write all Markdown, pictures and scripts into `folder`; return the table of contents."""
    lessons = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    exercises = sorted((ROOT / "exercises").glob("[0-9]*.ipynb"))
    documents = sorted((ROOT / "docs").glob("*.md"))
    groups = {
        "Lessons": list(map(pages.notebook, lessons)),
        "Exercises": list(map(pages.notebook, exercises)),
        "More": list(map(pages.document, documents)),
    }
    all_pages = [page for group in groups.values() for page in group]
    recipes = {}
    for page in all_pages:
        recipes |= page.explorers
    drawn = draw(recipes, pictures)
    for page in all_pages:
        write_page(folder, page, drawn)
    for name in ("figures", "badges", "workshop"):
        shutil.copytree(ROOT / "docs" / name, folder / "docs" / name)
    shutil.copytree(WEB / "assets", folder / "assets")
    (folder / "index.md").write_text(first_page(), encoding="utf-8")
    nav = [{"Start": "index.md"}]
    for name, group in groups.items():
        nav.append({name: [page.path for page in group]})
    return [*nav, {"Reference": reference(folder / "reference")}]


def draw(recipes, pictures):
    """Return {place: data} of all explorers, drawn in turn.

    A process that is forked beside torch's threads may never end.
    """
    return {
        place: explorers.drawn(recipe, pictures)
        for place, recipe in tqdm(recipes.items(), desc="explorers")
    }


def write_page(folder, page, drawn):
    """Write one page, its pictures, and its explorers' data.

    The data are scripts, because a page that is a file loads nothing else.
    """
    path = folder / page.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page.markdown, encoding="utf-8")
    for name, png in page.pictures.items():
        (path.parent / name).write_bytes(png)
    for place in page.explorers:
        script = f'(window.explorers ??= {{}})["{place}"] = {drawn[place]};\n'
        (path.parent / f"{place}.js").write_text(script, encoding="utf-8")


def first_page():
    """Return the text of the first page: the comparison, the ladder, and where to start."""
    values = {
        "repository": elsewhere.repository(),
        "name": elsewhere.repository().rsplit("/", 1)[1],
        "colab": elsewhere.addresses("notebooks/00_start_here.ipynb")["Colab"],
        "ladder": "\n".join(rung(*parts) for parts in build.rungs()),
    }
    text = (WEB / "index.md").read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace("{{" + name + "}}", value)
    return text


def rung(number, module, ideas, times):
    """Return one line of the ladder on the first page: the idea, and what an average costs.

    The idea leads to its lesson.
    """
    [lesson] = (ROOT / "notebooks").glob(f"{int(number):02}_*.ipynb")
    return f"{number}. [{ideas}](notebooks/{lesson.stem}.md) <span>{times}</span>"


def reference(folder):
    """Write the pages of the reference; return their part of the nav.

    They are the stages, the names of the library's front, and each room of each package.
    """
    folder.mkdir(parents=True)
    stages = []
    for path in sorted((ROOT / "ddp_course").glob("stage*")):
        stages += modules(path)
    nav = [write_reference(folder, "Stages", stages)]
    for package in PACKAGES:
        entries = [write_reference(folder, *room) for room in rooms(package).items()]
        nav.append({package.replace("/", "."): entries})
    # These names stand on the pages of their modules too, to which the site's links lead.
    again = f"{SHORT}, skip_local_inventory: true"
    nav.insert(1, write_reference(folder, "Names of manyranks", front(), again))
    return nav


def rooms(package):
    """Return {room: names of its modules} of a package: the files in it, and each folder in it."""
    whole = package.replace("/", ".")
    found = {f"{whole}: modules": []}
    for path in sorted((ROOT / package).iterdir()):
        is_stage = path.name.startswith("stage")
        if path.suffix == ".py" and not is_stage:
            found[f"{whole}: modules"] += modules(path)
        elif (path / "__init__.py").exists() and not is_stage and path != ROOT / LAB:
            found[f"{whole}.{path.name}"] = modules(path)
    return found


def front():
    """Return where each name that `manyranks` has itself is defined."""
    homes = [getattr(manyranks, name) for name in manyranks.__all__]
    return [f"{each.__module__}.{each.__qualname__}" for each in homes]


def modules(path):
    """Return the names of all modules in a file or folder."""
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    names = [file.relative_to(ROOT).with_suffix("") for file in files]
    return [".".join(name.parts).removesuffix(".__init__") for name in names]


def write_reference(folder, title, names, options=SHORT):
    """Write a page with the docstrings of these modules, classes and functions; return its nav."""
    page = re.sub(r"\W+", "_", title.lower()) + ".md"
    blocks = []
    for name in names:
        heading = name.rsplit(".", 1)[-1]
        blocks.append(f"## {heading}\n\n`{name}`\n\n::: {name}\n    options: {{{options}}}")
    search_shows_lessons_first = "---\nsearch:\n  boost: 0.2\n---"
    parts = [search_shows_lessons_first, f"# {title}: reference", *blocks, ""]
    (folder / page).write_text("\n\n".join(parts), encoding="utf-8")
    return {title: f"reference/{page}"}


def generate(sources, out, nav):
    """Let MkDocs write the pages; a link that leads nowhere is an error."""
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")  # Material reads this when it is imported.
    from mkdocs.commands.build import build as build_site
    from mkdocs.config import load_config

    logging.basicConfig(level=logging.WARNING, format="site.py: %(message)s")
    settings = load_config(
        str(WEB / "mkdocs.yml"), docs_dir=str(sources), site_dir=str(out), nav=nav, strict=True
    )
    build_site(settings)


if __name__ == "__main__":
    sys.exit(main())
