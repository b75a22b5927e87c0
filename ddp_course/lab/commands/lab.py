"""`ddp-course lab [DIR]`: copy lessons, exercises and documents to DIR and open them in JupyterLab.

Files that you have changed stay as they are, also when the course has been updated since; those
that you have not touched are renewed. A notebook counts as changed when the source of a cell has
changed: to open, run and save it changes nothing. Lessons come without outputs, so that they show
no answer before the guess.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from ...base.files import replace_file
from ..folders import course_folder
from ..learners_copy import RECORD
from ..waiting import say_while
from . import as_typed

FOLDERS = ("notebooks", "exercises", "docs")
NOT_COPIED = {".ipynb_checkpoints", "__pycache__", "checks", "answers"}
STYLE = """/* Words stay whole; on a phone a figure fits its cell, and scrolls in its own size once
it is touched, the title of a slider stands above it, and a bar keeps some width. In the dark,
figures and the blocks of show.source are dark too. */
.jp-OutputArea-output.jp-RenderedText pre { word-break: normal; overflow-wrap: anywhere; }
@media (hover: none) {
  .jp-OutputArea-output img:hover { flex-shrink: 0; max-width: none !important; }
}
@media (max-width: 500px) {
  .jp-OutputArea-output .widget-inline-hbox { flex-flow: row wrap; height: auto; }
  .widget-inline-hbox > .widget-label { width: 100% !important; text-align: left !important; }
  .jp-RenderedHTMLCommon, .jp-RenderedMarkdown { overflow-x: auto; }
  .jp-OutputArea-output .widget-hprogress { flex: 1 0 60px; height: 28px; }
  .widget-hbox:has(.widget-hprogress) { flex-wrap: wrap; }
  /* A figure's title is small there, and stands below it once more. */
  .title-for-all {
    position: static !important; clip-path: none !important; white-space: normal !important;
  }
}
/* Comments say what to do: in the dark they are as easy to read as the code. */
[data-jp-theme-light="false"] {
  --jp-mirror-editor-comment-color: #7fb8b8; --jp-mirror-editor-def-color: #66a3ff;
}
[data-jp-theme-light="false"] .jp-OutputArea-output :is(img, [style*="color:#111"]),
[data-jp-theme-light="false"] .jp-RenderedMarkdown img[src*="docs/figures/"] {
  filter: invert(.93) hue-rotate(180deg);
}
/* The kernel that these sliders belong to has ended: what they cannot move is the picture. */
.widget-vbox.jupyter-widgets-disconnected .widget-inline-hbox { display: none; }
.jp-OutputArea-output > .widget-vbox.jupyter-widgets-disconnected::after {
  content: "Its kernel has ended. Run the cells down to this one again to use it.";
}
/* A cell that runs says for how long, in place of its star. */
.jp-InputPrompt[data-seconds]:not([data-seconds="1"]) { font-size: 0; }
.jp-InputPrompt[data-seconds]:not([data-seconds="1"])::after {
  content: "[" attr(data-seconds) " s]:"; font-size: 12px;
}"""
SETTINGS = {
    # JupyterLab sends what sliders say to a subshell of the kernel. After a restart that the page
    # did not ask for it goes to the old one, and is lost.
    "@jupyterlab/apputils-extension:kernels-settings": {"commsOverSubshells": "disabled"},
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension:tracker": {"codeCellConfig": {"lineWrap": True}},
    # Who closes the tab loses no more than what was typed last.
    "@jupyterlab/docmanager-extension:plugin": {"autosaveInterval": 20},
    # Explorers return when a lesson is reopened.
    "@jupyter-widgets/jupyterlab-manager:plugin": {"saveState": True},
}

FIRST_LESSON = "notebooks/00_start_here.ipynb"
FIRST_TAB = f"notebook:{FIRST_LESSON}"
FIRST_TABS = {  # This is how JupyterLab keeps its tabs: one notebook is open.
    "data": {
        "layout-restorer:data": {
            "main": {
                "dock": {"type": "tab-area", "currentIndex": 0, "widgets": [FIRST_TAB]},
                "current": FIRST_TAB,
            }
        },
        FIRST_TAB: {"data": {"path": FIRST_LESSON, "factory": "Notebook"}},
    },
    "metadata": {"id": "default"},
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to its parser."""
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("work"),
        metavar="DIR",
        help="where your copies are, or shall be (default: work)",
    )
    parser.add_argument("--no-open", action="store_true", help="copy only")
    parser.add_argument(
        "options", nargs="*", metavar="OPTION", help="after --, for JupyterLab: -- --no-browser"
    )


def main(args: argparse.Namespace) -> None:
    """Bring the course into the folder and open it in JupyterLab, as the options say."""
    # In `ddp-course lab -- --no-browser` the parser takes JupyterLab's first option for the folder.
    if str(args.folder).startswith("-"):
        args.options.insert(0, str(args.folder))
        args.folder = Path("work")
    folder = args.folder.resolve()
    for path in bring(folder):
        print(
            f"{path}: kept yours; the course has another, which comes when you rename or delete"
            " yours"
        )
    print(f"Your copies of the course are in {folder}, and what you change there stays.")
    if args.no_open:
        print(f"Next: {as_typed(f'lab {args.folder}')} opens them in JupyterLab.")
        return
    print(
        "The browser opens at lesson 00; Ctrl-C twice ends the lab. Next, in a terminal of the lab:"
        "\nddp-course check says what you have solved.",
        flush=True,
    )
    prepare_environment(folder)
    sys.argv = ["jupyter-lab"]  # JupyterLab's extensions read these arguments, too.
    with ExitStack() as until_ready:
        until_ready.enter_context(say_while("JupyterLab starts, some seconds"))
        from jupyterlab.labapp import LabApp  # When it is imported, it reads the environment.
        from tornado.ioloop import IOLoop

        # What is put into the loop runs once the server answers.
        IOLoop.current().add_callback(until_ready.close)
        LabApp.launch_instance([*lab_options(folder), *args.options])


def lab_options(folder: Path) -> list[str]:
    """Return JupyterLab's options for the copies in `folder`, before those of the learner."""
    # Without a terminal of its own, the server would open login shells, which reset PATH.
    shell = os.environ.get("SHELL", "sh")
    options = [
        # A kernel that has been idle for an hour ends, and frees its memory.
        "--MappingKernelManager.cull_idle_timeout=3600",
        "--MappingKernelManager.cull_connected=True",
        f"--ServerApp.root_dir={folder}",
        f"--LabApp.default_url=/lab/tree/{FIRST_LESSON}",
        "--LabApp.news_url=None",  # Without an address JupyterLab asks for no news.
        "--LabApp.custom_css=True",
        f"--LabApp.extra_labextensions_path={Path(__file__).with_name('labextensions')}",
        "--ServerApp.log_level=WARN",
        f"--ServerApp.tornado_settings=static_custom_path={folder}/.jupyter/custom",
        f"--ServerApp.terminado_settings=shell_command={shell}",
    ]
    if os.geteuid() == 0:
        options.append("--allow-root")
    return options


def prepare_environment(folder: Path) -> None:
    """Let JupyterLab's terminals and kernels start in `folder` and find our programs; style it."""
    os.environ["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    )
    # Who forgets the first cell, or restarts the kernel, is told what to run.
    os.environ.setdefault("PYTHONSTARTUP", str(Path(__file__).with_name("at_kernel_start.py")))
    os.chdir(folder)
    from jupyterlab_server.workspaces_handler import WorkspacesManager

    home = folder / ".jupyter"
    files = {
        "labconfig/default_setting_overrides.json": json.dumps(SETTINGS),
        "custom/custom.css": STYLE,
    }
    for path, text in files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text, encoding="utf-8")
    # Each copy has its own tabs. The first one is lesson 00, at whichever address the lab opens.
    os.environ["JUPYTERLAB_WORKSPACES_DIR"] = str(home / "workspaces")
    tabs = WorkspacesManager(str(home / "workspaces"))
    if not tabs.list_workspaces():
        tabs.save("default", json.dumps(FIRST_TABS))
    folders = [str(home), os.environ.get("JUPYTER_CONFIG_PATH")]
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, folders))


def bring(folder: Path) -> list[str]:
    """Copy the course's files into `folder`; return those that stay, as both sides changed them."""
    record_path = folder / RECORD
    record = {}  # the digest of the version that was copied last, by file
    # Without a record, or with a damaged one, nothing is overwritten.
    with suppress(OSError, ValueError):
        record = json.loads(record_path.read_text())
    both_changed = []
    for name, source in course_files():
        content = source.read_bytes()
        copied = folder / name
        learner_digest = digest(copied.read_bytes()) if copied.exists() else None
        course_digest = digest(content)
        # The learner has no copy, or the course's newest version, or has not changed the copy.
        if learner_digest in (None, course_digest, record.get(name)):
            copied.parent.mkdir(parents=True, exist_ok=True)
            if learner_digest != course_digest:
                if copied.suffix == ".ipynb":
                    content = without_outputs(content)
                replace_file(copied, content)
            record[name] = course_digest
        elif record.get(name) != course_digest:
            both_changed.append(name)
    replace_file(record_path, json.dumps(record).encode())
    return both_changed


def course_files() -> Iterator[tuple[str, Path]]:
    """Yield all files that a learner gets, as the path in the course and where the file is."""
    for top in map(course_folder, FOLDERS):
        for path in sorted(top.rglob("*")):
            if path.is_file() and not NOT_COPIED & {*path.parts}:
                yield path.relative_to(top.parent).as_posix(), path


def without_outputs(content: bytes) -> bytes:
    """Return the notebook without outputs, and with the Python that will run it.

    JupyterLab would add the Python when the notebook is opened, and that would be an unsaved
    change.
    """
    from ipykernel.ipkernel import IPythonKernel  # It takes a while to load.

    notebook = json.loads(content)
    notebook["metadata"]["language_info"] = IPythonKernel.language_info
    notebook["metadata"].pop("widgets", None)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
    return (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()


def digest(content: bytes) -> str:
    """Return a hash of a file's content; of a notebook only the sources of its cells count."""
    # Any other file counts as it is.
    with suppress(ValueError, KeyError, TypeError):
        cells = json.loads(content)["cells"]
        sources = [[cell["cell_type"], "".join(cell["source"])] for cell in cells]
        content = json.dumps(sources).encode()
    return hashlib.sha256(content).hexdigest()
