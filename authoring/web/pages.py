"""Notebooks and documents as the Markdown pages that the site's generator reads.

Prose stays as it is, formulas become MathML, code and outputs fenced blocks, figures files of their
own with their alternative texts, explorers and predictions the HTML that assets/course.js brings to
life.
"""

import base64
import html
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from elsewhere import BADGES, INSTALL, addresses, repository
from latex2mathml.converter import convert

from ddp_course.lab.showing.widgets import MIME

ROOT = Path(__file__).resolve().parents[2]
WIDGET = "application/vnd.jupyter.widget-view+json"
# $$...$$, or $...$ that no letter or digit touches from outside and that has at most two lines.
FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$([^$\n`]+?(?:\n[^$\n`]+?)?)\$(?!\d)", re.DOTALL)
# A fenced block, or code in a line; the group keeps it as every second part of a split.
CODE = re.compile(r"(^ *(?:```|~~~).*?^ *(?:```|~~~) *$|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
TERMINAL = re.compile(r"\x1b\[[0-9;]*m")
PROGRESS = re.compile(r"\|.*\| \d+/\d+ \[|it/s\]")  # A bar that nothing moves any more is left out.
STARTS_LIST = re.compile(r"( *)(?:[-*+]|1\.) +\S")
LIST_ITEM = re.compile(r" *(?:[-*+]|\d+\.) +\S")


@dataclass
class Page:
    """One page: its Markdown, the pictures beside it by file name, and the explorers to draw.

    Each explorer has a place in HTML.
    """

    path: str
    markdown: str
    pictures: dict[str, bytes] = field(default_factory=dict)
    explorers: dict[str, dict] = field(default_factory=dict)


def notebook(path: Path) -> Page:
    """Return the page of a lesson or an exercise, with links between the two."""
    page = Page(f"{path.parent.name}/{path.stem}.md", "")
    parts = []
    predictions = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.id == BADGES:
            parts.append(ways_in(path))
        elif cell.cell_type == "markdown":
            parts.append(prose(cell.source, page.path))
        elif cell.id != INSTALL:
            parts.append(code_cell(cell, page, predictions))
    page.markdown = "\n\n".join(parts) + "\n"
    return page


def document(path: Path) -> Page:
    """Return the page of one of the documents in docs/."""
    where = f"docs/{path.name}"
    return Page(where, prose(path.read_text(encoding="utf-8"), where))


def ways_in(path: Path) -> str:
    """Return the links under a page's title: where to open the notebook, and its counterpart.

    The counterpart is the lesson or the exercise that goes with it.
    """
    other = "notebooks" if path.parent.name == "exercises" else "exercises"
    opening = addresses(f"{path.parent.name}/{path.name}")
    places = [f"[{place}]({address})" for place, address in opening.items()]
    links = ["Open in " + " · ".join(places)]
    if (ROOT / other / path.name).exists():
        kind = "Lesson" if other == "notebooks" else "Exercise"
        links.insert(0, f"[{kind} {int(path.stem[:2])}](../{other}/{path.stem}.md)")
    return f'<p class="ways-in" markdown="1" data-search-exclude>{" · ".join(links)}</p>'


def prose(markdown: str, where: str) -> str:
    """Return a text of CommonMark as the generator's Markdown.

    Lists are set apart, answers are opened to Markdown, and links are mended.
    """
    parts = CODE.split(markdown)
    for index in range(0, len(parts), 2):  # The others are code.
        text = FORMULA.sub(mathml, parts[index])
        text = text.replace("<details>", '<details markdown="1">')
        parts[index] = LINK.sub(lambda match: f"]({target(match[1], where)})", text)
    return with_lists_apart("".join(parts))


def mathml(match: re.Match) -> str:
    """Return one TeX formula as MathML, which browsers show without help."""
    block, inline = match.groups()
    tex = (block or inline).strip().replace("\n", " ")
    display = "block" if block else "inline"
    # Markdown would take these two for emphasis.
    return convert(tex, display=display).replace("*", "&#42;").replace("_", "&#95;")


def target(link: str, where: str) -> str:
    """Return where a link on the page `where` leads: to a page of the site, or the repository."""
    name = link.partition("#")[0]
    if re.match(r"[a-z]+:", link) or not name:
        return link
    file = ((ROOT / where).parent / name).resolve()
    if name.endswith(".ipynb") and file.exists():
        return f"{name.removesuffix('.ipynb')}.md"
    path = file.relative_to(ROOT).as_posix()
    is_page = file.parent.name == "docs" and name.endswith(".md")
    is_picture = path.startswith("docs/") and file.is_file()
    if is_page or is_picture:
        return link
    kind = "tree" if file.is_dir() else "blob"
    return f"{repository()}/{kind}/main/{path}"


def with_lists_apart(markdown: str) -> str:
    """Return an empty line before each list that CommonMark would begin in mid-paragraph.

    Code is left alone.
    """
    lines = []
    fenced = False
    for line in markdown.split("\n"):
        fenced ^= bool(re.match(r" *(```|~~~)", line))
        before = lines[-1] if lines else ""
        goes_on = not before.strip() or LIST_ITEM.match(before) or before.startswith("  ")
        if STARTS_LIST.match(line) and not fenced and not goes_on:
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def code_cell(cell, page: Page, predictions: list) -> str:
    """Return a code cell and what came out of it.

    The search finds the words around cells, not in them.
    """
    parts = []
    if cell.source.strip():
        parts.append(fence(cell.source, "python"))
    if "jupyter" in cell.metadata:  # The lab folds its code away, too.
        parts = [f'<details markdown="1"><summary>code</summary>\n\n{parts[0]}\n\n</details>']
    language = None
    if cell.source.startswith("show.source("):
        language = "python"
    elif cell.source.startswith("show.diff("):
        language = "diff"
    for output in cell.outputs:
        parts.append(markdown_of(output, page, predictions, language))
    body = "\n\n".join(filter(None, parts))
    return f'<div class="cell" markdown="1" data-search-exclude>\n\n{body}\n\n</div>'


def fence(text: str, language: str) -> str:
    """Return a fenced block that nothing in `text` can end."""
    longest_run = max(map(len, re.findall(r"`+", text)), default=0)
    ticks = "`" * max(3, longest_run + 1)
    return f"{ticks}{language}\n{TERMINAL.sub('', text).rstrip()}\n{ticks}"


def markdown_of(output, page: Page, predictions: list, language: str | None) -> str:
    """Return one output of a cell; `language` is that of a text which is code.

    `predictions` are the page's questions so far, of which the last one waits for its answer.
    """
    if "data" not in output:
        text = output.get("text") or "\n".join(output.get("traceback", []))
        lines = [line for line in text.splitlines() if not PROGRESS.search(line)]
        return fence("\n".join(lines), "text") if lines else ""
    data = output.data
    text = data.get("text/plain", "")
    ours = data.get(MIME, {})
    if PROGRESS.search(text):
        return ""
    if "explorer" in ours:
        return explorer(output, page)
    if "questions" in ours:
        return "".join(map(opening_question, ours["questions"]))
    if "right" in ours:
        return reveal(ours, len(predictions) - 1, text)
    if WIDGET in data and "( )" in text:
        predictions.append(text)
        return prediction(text, len(predictions) - 1)
    if "image/png" in data:
        return picture(output, page)
    if language:
        return fence(text, language)
    if "text/html" in data:
        # An empty line would end the block of HTML.
        without_gaps = re.sub(r"\n\s*\n", "\n", data["text/html"])
        return f'<div class="output">{without_gaps}</div>'
    return fence(text, "text")


def alternative(output) -> str:
    """Return what a figure shows, in words."""
    return output.metadata.get("image/png", {}).get("alt") or output.data.get("text/plain", "")


def picture(output, page: Page) -> str:
    """Return a figure as a file beside the page."""
    name = f"{Path(page.path).stem}-{len(page.pictures) + 1}.png"
    page.pictures[name] = base64.b64decode(output.data["image/png"])
    words = html.escape(" ".join(alternative(output).split()))
    return f'<img class="figure" src="{name}" alt="{words}" loading="lazy">'


def explorer(output, page: Page) -> str:
    """Return the place of an explorer, and its first picture until the script has run."""
    place = f"{Path(page.path).stem}-explorer-{len(page.explorers) + 1}"
    page.explorers[place] = output.data[MIME]
    return (
        f'<div class="explorer" id="{place}">{picture(output, page)}<script'
        f' src="{place}.js"></script></div>'
    )


def prediction(text: str, number: int) -> str:
    """Return a question with its answers to choose from.

    `text` has a line for each answer, marked "( )".
    """
    question, *answers = text.split("\n")
    inside = f"<legend>{html.escape(question)}</legend>"
    for place, answer in enumerate(answers):
        words = html.escape(answer.strip().removeprefix("( ) "))
        radio = f'<input type="radio" name="prediction-{number}" value="{place}">'
        inside += f"<label>{radio} {words}</label>"
    return f'<fieldset class="prediction" data-number="{number}">{inside}</fieldset>'


def opening_question(question: dict) -> str:
    """Return a question about an earlier lesson; answers and their reasons are behind a click."""
    items = ""
    for answer, reason in question["answers"].items():
        verdict = "right" if answer == question["right"] else "no"
        items += f"<li>{html.escape(answer)}: {verdict}. {html.escape(reason)}</li>"
    choices = html.escape("; ".join(question["answers"]))
    words = f"<b>{html.escape(question['ask'])}</b> {choices}"
    return f"<details><summary>{words}</summary><ul>{items}</ul></details>"


def reveal(ours: dict, number: int, line: str) -> str:
    """Return the line that answers prediction `number`."""
    outcome = html.escape(line)  # "The answer: 1.5 p (counted)."
    why = html.escape(json.dumps(ours.get("why", [])))
    settings = (
        f'data-number="{number}" data-right="{ours["right"]}" data-outcome="{outcome}"'
        f' data-why="{why}"'
    )
    return f'<p class="reveal" {settings} aria-live="polite">{outcome}</p>'
