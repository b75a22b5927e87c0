"""Build the course as a web site: `python authoring/site.py [--out site]`.

    notebooks/*.ipynb, exercises/*.ipynb  ->  pages, by nbconvert
    docs/*.md                             ->  glossary and workshop guide
    the package's docstrings              ->  reference/, by pdoc
    index.html                            ->  contents, and a search over all pages

Nothing is fetched when the pages are opened: figures are inside them, formulas are MathML, scripts of others are left
out. Sliders need a kernel, so each stands as the figure of its first setting.
"""

import argparse
import html
import json
import re
import shutil
import sys
import warnings
from pathlib import Path

import nbformat
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbconvert.filters import markdown2html

ROOT = Path(__file__).resolve().parents[1]
WIDGET = "application/vnd.jupyter.widget-view+json"
FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$([^$\n`]+?)\$(?!\d)", re.DOTALL)
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
STYLE = """
body { max-width: 60rem; margin: 0 auto; padding: 1rem; font-family: system-ui, sans-serif; line-height: 1.5; }
nav.course { display: flex; gap: 1.5rem; padding: 0.6rem 0; border-bottom: 1px solid #ccc; margin-bottom: 1rem;
  font-family: system-ui, sans-serif; }
details { margin: 0.3rem 0 1rem 0; padding: 0.4rem 0.8rem; background: #f4f6f8; }
table { border-collapse: collapse; } td, th { border: 1px solid #ddd; padding: 0.3rem 0.6rem; text-align: left; }
img { max-width: 100%; } #found li { margin: 0.3rem 0; } input { font-size: 1rem; padding: 0.3rem; width: 22rem; }
"""
SEARCH = """
const pages = %s;
const box = document.getElementById("search"), list = document.getElementById("found");
box.addEventListener("input", () => {
  const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
  list.replaceChildren();
  if (!words.length) return;
  for (const page of pages) {
    const text = page.text.toLowerCase();
    if (!words.every(word => text.includes(word))) continue;
    const at = Math.max(0, text.indexOf(words[0]) - 60), item = document.createElement("li");
    const link = document.createElement("a");
    link.href = page.url; link.textContent = page.title;
    item.append(link, " \\u2026 " + page.text.slice(at, at + 160) + " \\u2026");
    list.append(item);
  }
  if (!list.children.length) list.append("nothing found");
});
"""


def main(arguments=None):
    """Build the whole site; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder to build into (default: site)")
    parser.add_argument("--without-reference", action="store_true", help="leave out the package reference")
    args = parser.parse_args(arguments)
    if args.out.exists() and any(args.out.iterdir()) and not (args.out / "index.html").exists():
        print(f"site.py: {args.out} is not empty and holds no site; choose another folder", file=sys.stderr)
        return 2
    shutil.rmtree(args.out, ignore_errors=True)
    pages = [page for folder in ("notebooks", "exercises") for page in notebook_pages(folder)]
    pages += [document_page(path) for path in sorted((ROOT / "docs").glob("*.md"))]
    for page, before, after in zip(pages, [None, *pages], [*pages[1:], None], strict=False):
        write(args.out / page["url"], decorated(page, before, after))
    write(args.out / "index.html", contents(pages))
    if not args.without_reference:
        reference(args.out / "reference")
    print(f"wrote {len(pages) + 1} pages; open index.html in {args.out.name}/")
    return 0


def notebook_pages(folder):
    """All notebooks of a folder as pages: dicts of url, title, text (for the search) and html."""
    return [notebook_page(path) for path in sorted((ROOT / folder).glob("[0-9]*.ipynb"))]


def notebook_page(path):
    """One notebook as a page."""
    notebook = nbformat.read(path, as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = linked(with_mathml(cell.source))
        for output in cell.get("outputs", []):
            if "data" in output and WIDGET in output.data:
                del output.data[WIDGET]
    notebook.metadata.pop("widgets", None)
    body, _ = HTMLExporter(template_name="lab").from_notebook_node(notebook)
    body = with_alt_texts(body, notebook)
    url = f"{path.parent.name}/{path.stem}.html"
    return {"url": url, "title": title_of(text, path), "text": plain(text), "html": without_scripts(body)}


def with_alt_texts(body, notebook):
    """Put the figures' own descriptions in the place of nbconvert's, one after the other."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    alts = [one.metadata.get("image/png", {}).get("alt") or one.data.get("text/plain", "a figure") for one in figures]
    remaining = iter(alts)
    return re.sub(
        r'alt="No description has been provided for this image"',
        lambda _: f'alt="{html.escape(next(remaining, "a figure"))}"',
        body,
    )


def document_page(path):
    """One Markdown document as a page."""
    text = path.read_text(encoding="utf-8")
    title = title_of(text, path)
    body = frame(title, markdown2html(linked(with_mathml(text))))
    return {"url": f"docs/{path.stem}.html", "title": title, "text": plain(text), "html": body}


def with_mathml(markdown):
    """Replace TeX formulas by MathML, which browsers show without help; code is left alone."""

    def formula(match):
        shown = match[1] is not None
        return convert((match[1] or match[2]).strip().replace("\n", " "), display="block" if shown else "inline")

    parts = CODE.split(markdown)
    return "".join(part if index % 2 else FORMULA.sub(formula, part) for index, part in enumerate(parts))


def linked(markdown):
    """Let links to notebooks and documents point to their pages."""
    return re.sub(r"\]\(([^)\s]+?)\.(ipynb|md)(#[^)]*)?\)", r"](\1.html\3)", markdown)


def without_scripts(body):
    """Take all scripts and links to other places out of a page's head."""
    body = re.sub(r"<script\b.*?</script>", "", body, flags=re.DOTALL)
    return re.sub(r"<link\b[^>]*https?:[^>]*>", "", body)


def decorated(page, before, after):
    """A page with its way back and forth on top."""
    up = "../" * page["url"].count("/")
    links = [f'<a href="{up}index.html">Contents</a>']
    for neighbour, arrow in ((before, "←"), (after, "→")):
        if neighbour:
            links.append(f'<a href="{up}{neighbour["url"]}">{arrow} {html.escape(neighbour["title"])}</a>')
    bar = f'<style>{STYLE}</style><nav class="course">{"".join(links)}</nav>'
    body = re.sub(r"<title>.*?</title>", f"<title>{html.escape(page['title'])}</title>", page["html"], count=1)
    return re.sub(r"(<body[^>]*>)", lambda match: match[1] + bar, body, count=1)


def contents(pages):
    """The first page: what there is, and the search."""
    parts = []
    for folder, heading in (("notebooks", "Lessons"), ("exercises", "Exercises"), ("docs", "More")):
        chosen = [page for page in pages if page["url"].startswith(folder)]
        items = "".join(f'<li><a href="{page["url"]}">{html.escape(page["title"])}</a></li>' for page in chosen)
        items += '<li><a href="reference/index.html">Package reference</a></li>' if folder == "docs" else ""
        parts.append(f"<h2>{heading}</h2><ul>{items}</ul>")
    index = json.dumps([{key: page[key] for key in ("url", "title", "text")} for page in pages]).replace("</", "<\\/")
    search = '<p><input id="search" placeholder="Search" aria-label="Search"></p><ul id="found"></ul>'
    script = f"<script>{SEARCH % index}</script>"
    heading = "<h1>Distributed data parallel training, built from nothing</h1>"
    return frame("ddp_course", f"<style>{STYLE}</style>{heading}{search}{''.join(parts)}{script}")


def frame(title, body):
    """A plain HTML page."""
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    return f'<!DOCTYPE html><html lang="en"><head>{head}</head><body>{body}</body></html>'


def reference(folder):
    """The reference of the package, from its docstrings."""
    import pdoc

    pdoc.render.configure(docformat="markdown", show_source=False, search=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names that `ddp_course` offers from elsewhere stand on their own pages
        pdoc.pdoc("ddp_course", output_directory=folder)


def title_of(text, path):
    """The first heading of a text, or the file's name."""
    found = re.search(r"^#\s+(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else path.stem


def plain(text):
    """Text without Markdown's and TeX's signs, for the search."""
    return re.sub(r"[\s#*`$|<>]+", " ", text).strip()


def write(path, text):
    """Write one page, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
