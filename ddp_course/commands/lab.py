"""`ddp-course lab DIR`: copy lessons, exercises and documents to DIR and open them in JupyterLab.

What you changed there stays as it is, also when the course has been updated since; what you did not touch is renewed.
"""

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

from ..running.files import course_folder, replace_file

FOLDERS = ("notebooks", "exercises", "docs")
FIRST = "notebooks/00_start_here.ipynb"
RECORD = ".ddp-course.json"  # what was copied: {path: SHA-256 of the course's own}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add `lab` to the command line."""
    parser = subparsers.add_parser(
        "lab", help="lessons and exercises in JupyterLab", description=__doc__.split("\n")[0]
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="where your copies are, or shall be")
    parser.add_argument("--no-open", action="store_true", help="copy only")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="after --, for JupyterLab: -- --no-browser")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command itself."""
    folder = args.folder.resolve()
    for path in bring(folder):
        print(f"{path}: kept yours; the course has a newer one, which comes when you rename or delete yours")
    if args.no_open:
        print(f"lessons and exercises are in {args.folder}; open them with: ddp-course lab {args.folder}")
        return 0
    from jupyterlab.labapp import LabApp

    as_root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    # without an address for news JupyterLab does not ask whether it may fetch any
    fixed = [f"--ServerApp.root_dir={folder}", "--LabApp.news_url=None", *as_root]
    sys.argv = ["jupyter-lab"]  # its extensions look there too
    LabApp.launch_instance([*fixed, *args.options, str(folder / FIRST)])
    return 0


def bring(folder: Path) -> list[str]:
    """Copy the course's files into `folder`; return those that both the learner and the course changed: they stay.

    ValueError where `folder` cannot be written.
    """
    record_path, kept = folder / RECORD, []
    record = json.loads(record_path.read_text(encoding="utf-8")) if record_path.exists() else {}
    try:
        for name, source in course_files().items():
            text, there = source.read_bytes(), folder / name
            mine, theirs = digest(there.read_bytes()) if there.exists() else None, digest(text)
            if mine in (None, theirs, record.get(name)):
                there.parent.mkdir(parents=True, exist_ok=True)
                if mine != theirs:
                    replace_file(there, text)
                record[name] = theirs
            elif record.get(name) != theirs:
                kept.append(name)
        replace_file(record_path, json.dumps(record, indent=1).encode())
    except OSError as error:
        raise ValueError(f'cannot copy the course to "{folder}" ({error}); name a folder that you may write') from error
    return kept


def course_files() -> dict[str, Path]:
    """All files that a learner gets: {path in the course: where it is}."""
    found = {}
    for name in FOLDERS:
        top = course_folder(name)
        files = (path for path in sorted(top.rglob("*")) if path.is_file() and ".ipynb_checkpoints" not in path.parts)
        found |= {f"{name}/{path.relative_to(top).as_posix()}": path for path in files}
    return found


def digest(content: bytes) -> str:
    """What tells one version of a file from another."""
    return hashlib.sha256(content).hexdigest()
