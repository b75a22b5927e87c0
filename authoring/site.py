"""Build the course as a web site: `python authoring/site.py [--out site]`.

    notebooks/*.ipynb, exercises/*.ipynb  ->  pages of Markdown (web/pages.py), explorers drawn
                                              (web/explorers.py)
    docs/*.md                             ->  pages too
    the package's docstrings              ->  reference/, by mkdocstrings
    all of it                             ->  HTML by Material for MkDocs (web/mkdocs.yml says why)

Nothing is fetched, neither when the site is built nor when its pages are opened, from a server or
from a file.
"""

import argparse
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

import build
import elsewhere
from tqdm import tqdm
from web import explorers, pages

ROOT = Path(__file__).resolve().parents[1]
WEB = Path(__file__).resolve().parent / "web"
PICTURES = 180  # An explorer has at most about this many, so that a page stays below 6 MB.
ROOMS = {"The whole": ["cli", "train", "problems", "ladder", "variants", "errors"]}


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
    with tempfile.TemporaryDirectory() as folder:
        nav = write_sources(Path(folder), args.pictures)
        print("writing the pages, which takes about a minute", flush=True)
        generate(Path(folder), args.out.resolve(), nav)
    print(f"wrote {len(list(args.out.rglob('*.html')))} pages; open index.html in {args.out.name}/")
    return 0


def write_sources(folder, pictures):
    """Write all Markdown, pictures and scripts into `folder`; return the table of contents."""
    made = {
        "Lessons": [
            pages.notebook(path) for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
        ],
        "Exercises": [
            pages.notebook(path) for path in sorted((ROOT / "exercises").glob("[0-9]*.ipynb"))
        ],
        "More": [pages.document(path) for path in sorted((ROOT / "docs").glob("*.md"))],
    }
    every = [page for group in made.values() for page in group]
    recipes = {place: recipe for page in every for place, recipe in page.explorers.items()}
    drawn = draw(recipes, pictures)
    for page in every:
        write_page(folder, page, drawn)
    for name in ("figures", "badges"):
        shutil.copytree(ROOT / "docs" / name, folder / "docs" / name)
    shutil.copytree(WEB / "assets", folder / "assets")
    (folder / "index.md").write_text(first_page(), encoding="utf-8")
    nav = [{"Start": "index.md"}]
    for name, group in made.items():
        nav.append({name: [page.path for page in group]})
    return [*nav, {"Reference": reference(folder / "reference")}]


def draw(recipes, pictures):
    """{place: data} of all explorers, drawn in turn: a process that is forked beside torch's
    threads may never end.
    """
    return {
        place: explorers.drawn(recipe, pictures)
        for place, recipe in tqdm(recipes.items(), desc="explorers")
    }


def write_page(folder, page, drawn):
    """Write one page, its pictures, and its explorers' data, as scripts: a page that is a file
    loads nothing else.
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
    """The text of the first page: the comparison, the ladder, and where to start."""
    filled = {
        "repository": elsewhere.repository(),
        "name": elsewhere.repository().rsplit("/", 1)[1],
        "colab": elsewhere.addresses("notebooks/00_start_here.ipynb")["Colab"],
        "ladder": "\n".join(rung(*parts) for parts in build.rungs()),
    }
    text = (WEB / "index.md").read_text(encoding="utf-8")
    for name, value in filled.items():
        text = text.replace("{{" + name + "}}", value)
    return text


def rung(number, module, ideas, times):
    """One line of the ladder on the first page: the idea, which leads to its lesson, and what an
    average costs.
    """
    [lesson] = (ROOT / "notebooks").glob(f"{int(number):02}_*.ipynb")
    return f"{number}. [{ideas}](notebooks/{lesson.stem}.md) <span>{times}</span>"


def reference(folder):
    """Write the pages of the reference, a page for the stages and one for each room; return their
    part of the nav.
    """
    folder.mkdir(parents=True)
    package = ROOT / "ddp_course"
    stages = sorted(path for path in package.glob("stage*") if path.name != "__pycache__")
    rooms = {"Stages": [name for path in stages for name in modules(path)], **ROOMS}
    for path in sorted(package.iterdir()):
        if path.is_dir() and not path.name.startswith(("stage", "_")):
            rooms[path.name.capitalize()] = modules(path)
    nav = []
    for title, names in rooms.items():
        page = f"{title.lower().replace(' ', '_')}.md"
        blocks = [
            f"## {name}\n\n::: ddp_course.{name}\n    options: {{show_root_heading: false}}"
            for name in names
        ]
        behind = "---\nsearch:\n  boost: 0.2\n---"  # The search shows lessons first.
        (folder / page).write_text(
            "\n\n".join([behind, f"# {title}: reference", *blocks, ""]), encoding="utf-8"
        )
        nav.append({title: f"reference/{page}"})
    return nav


def modules(path):
    """The names of all modules in a file or folder of the package, below `ddp_course`."""
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    names = [file.relative_to(ROOT / "ddp_course").with_suffix("") for file in files]
    return [".".join(name.parts).removesuffix(".__init__") for name in names]


def generate(sources, out, nav):
    """Let MkDocs write the pages; a link that leads nowhere is an error."""
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    logging.basicConfig(level=logging.WARNING, format="site.py: %(message)s")
    build(
        load_config(
            str(WEB / "mkdocs.yml"), docs_dir=str(sources), site_dir=str(out), nav=nav, strict=True
        )
    )


if __name__ == "__main__":
    sys.exit(main())
