"""The command `ddp-course`: doctor, compare, grade and the rest.

A bad setting ends the command with exit code 2 and one line that says what to do; a failed run ends
it with exit code 1.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable
from importlib import import_module, metadata

from manyranks.errors import ManyranksError

from ..base.errors import CourseError
from .waiting import say_while

# Each command has a module with main(args), which returns the exit code (None for 0). The module
# may also have add_options(parser).
COMMANDS = {
    "lab": "lessons and exercises in JupyterLab",
    "doctor": "what this machine has, and what each lesson will use",
    "compare": "train with every stage on the same batches and compare",
    "predict": "published runs, predicted and measured",
    "claims": "what people say, and the verdicts of the lessons",
    "grade": "grade exercises",
    "check": "check your own exercise",
    "certificate": "a page of what you solved, guessed and ran; or whether one was changed",
    "audit": "look for the usual mistakes in your own training script",
}

# These commands have their modules in other packages.
PACKAGES = {
    "predict": "ddp_predictions",
    "grade": "ddp_exercises",
    "check": "ddp_exercises",
    "certificate": "ddp_exercises",
}


def version() -> str:
    """Return the installed version; "unknown" for a folder of modules that was not installed."""
    try:
        return metadata.version("ddp-course")
    except metadata.PackageNotFoundError:
        return "unknown"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="ddp-course", description=__doc__.split("\n\n")[0])
    parser.add_argument("--version", action="version", version=f"ddp-course {version()}")
    subparsers = parser.add_subparsers(metavar="COMMAND")
    parsers = {
        name: subparsers.add_parser(name, help=help_text, description=help_text)
        for name, help_text in COMMANDS.items()
    }
    wanted = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    # Only the module of this command is loaded, as the other commands' libraries take seconds.
    if wanted in parsers:
        return exit_code(lambda: run(wanted, parsers[wanted], arguments[1:]))
    if wanted:
        parser.error(f"there is no command {wanted!r}{did_you_mean(wanted, COMMANDS)}")
    parser.parse_args(arguments)
    parser.print_help()
    print("\nstart with: ddp-course lab")
    return 0


def run(name: str, parser: argparse.ArgumentParser, arguments: list[str]) -> int | None:
    """Run the command `name` with its own arguments, and return what its `main` returns."""
    with say_while(f"ddp-course {name}: loading, some seconds"):
        module = import_module(f"{PACKAGES.get(name, __package__)}.commands.{name}")
    if hasattr(module, "add_options"):
        module.add_options(parser)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        options = re.findall(r"--[\w-]+", parser.format_help())
        parser.error(f"no such option: {unknown[0]}{did_you_mean(unknown[0], options)}")
    return module.main(args)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that suggests the known word most like `word`, or ""."""
    similar = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {similar[0]}?" if similar else ""


def exit_code(command: Callable[[], int | None]) -> int:
    """Return the exit code of a command; an error is printed in one line, without a traceback."""
    try:
        code = command() or 0
        # The stream is None where the caller has closed it by >&-.
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        # In `ddp-course … | head` the reader may end first. Python would complain when it flushes
        # at exit, so the output now goes nowhere.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        return 128 + 13  # A shell gives this code to a program that the signal SIGPIPE (13) ended.
    except (ValueError, OSError, CourseError, ManyranksError) as error:
        print(f"ddp-course: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ValueError, OSError)) else 1
    except KeyboardInterrupt:
        print("ddp-course: stopped", file=sys.stderr)
        return 130  # A shell gives this code to a program that Ctrl-C (SIGINT, 2) ended.


if __name__ == "__main__":
    sys.exit(main())
