"""`ddp-course certificate`: a page of what you solved, guessed and ran, which a teacher can check.

Its signature belongs to this very page, as that of the capstone's run.json to its numbers. It tells
a page that was changed, and keeps no determined forger out.
"""

import argparse
import getpass
import hashlib
import html
import json
import re
from contextlib import suppress
from pathlib import Path

from ddp_course.base.files import replace_file
from ddp_course.lab.learners_copy import find_copy, progress_in

from ..errors import GradingError
from ..grading import overview
from ..grading.answers import load_exercises
from ..grading.report import rendered

UNSIGNED = '<code id="signature"></code>'
SIGNED = re.compile(r'<code id="signature">([0-9a-f]{16})</code>')
OF_A_RUN = ("wrap", "world_size", "steps", "loss", "step_s", "devices", "signature")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="whose page it is (default: the login name)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("certificate.html"),
        metavar="FILE",
        help="default: certificate.html",
    )
    parser.add_argument(
        "--verify", type=Path, nargs="+", metavar="FILE", help="were these pages changed?"
    )


def main(args: argparse.Namespace) -> int:
    """The command itself: 0, or 1 if a page to verify was changed.

    Raises GradingError where there is no copy of the course.
    """
    if args.verify:
        verdicts = {path: verdict(path.read_text(encoding="utf-8")) for path in args.verify}
        for path, (_, words) in verdicts.items():
            print(f"{path}: {words}")
        return int(not all(right for right, _ in verdicts.values()))
    copy = find_copy()
    if copy is None:
        raise GradingError("no copy of the course is here; ddp-course lab makes one, in work/")
    replace_file(args.out, signed(page(copy, args.name or getpass.getuser())).encode())
    print(f"wrote {args.out}; a teacher checks it by ddp-course certificate --verify {args.out}")
    return 0


def page(copy: Path, name: str) -> str:
    """The page of this copy, still without its signature."""
    progress = progress_in(copy)
    results = overview.results_so_far(copy, load_exercises())
    points = sum(result.points for result in results)
    possible = sum(result.possible for result in results)
    return rendered(
        "certificate.html",
        name=name,
        points=f"{points:g} of {possible:g}",
        sentence=overview.sentence(copy),
        results=results,
        guesses=progress.get("guesses", {}),
        guessed=progress.get("guessed", {}),
        runs={**progress.get("runs", {}), **capstone_runs(copy)},
        figures=list(overview.figures(copy)),
    )


def capstone_runs(copy: Path) -> dict[str, str]:
    """{folder: in words what the capstone's script wrote there}, with the run's own signature."""
    runs = {}
    for path in sorted(copy.rglob("run.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):  # Others may have such a name.
            run = json.loads(path.read_text(encoding="utf-8"))
            words = [f"{key} {run[key]}" for key in OF_A_RUN]
            runs[path.parent.relative_to(copy).as_posix()] = ", ".join(words)
    return runs


def signature_of(text: str) -> str:
    """The first 16 digits of the SHA-256 of a page without its signature."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def signed(unsigned: str) -> str:
    """The page with its signature in it."""
    return unsigned.replace(UNSIGNED, UNSIGNED.replace("><", f">{signature_of(unsigned)}<"))


def verdict(text: str) -> tuple[bool, str]:
    """Whether a page is as the command wrote it, and that in words."""
    found = SIGNED.search(text)
    title = re.search("<title>(.*)</title>", text)
    if not found or not title:
        return False, "no certificate of this course"
    if signature_of(SIGNED.sub(UNSIGNED, text)) != found[1]:
        return False, "CHANGED since it was written: its signature belongs to another page"
    return True, f"as it was written, by {html.unescape(title[1])}"
