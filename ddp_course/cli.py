"""The command `ddp-course`: doctor, compare, grade and the rest.

A bad setting ends with one line that says what to do and exit code 2; a failed run with exit code
1.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable
from importlib import import_module, metadata

from .errors import CourseError
from .running.waiting import say_while

# Each has a module with main(args), which returns the exit code, and perhaps add_options(parser).
COMMANDS = {
    "lab": "lessons and exercises in JupyterLab",
    "doctor": "what this machine has, and what each lesson will use",
    "compare": "train with every stage on the same batches and compare",
    "predict": "published runs, predicted and measured",
    "claims": "what people say, and the verdicts of the lessons",
    "grade": "grade exercises",
    "check": "check your own exercise",
    "audit": "look for the usual mistakes in your own training script",
}

# These commands are not in ddp_course.
PACKAGES = {
    "predict": "ddp_predictions",
    "grade": "ddp_grading",
    "check": "ddp_grading",
}


def version() -> str:
    """The installed version; "unknown" for a folder of modules that was not installed."""
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
    wanted = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    commands = {
        name: subparsers.add_parser(name, help=help_text, description=help_text)
        for name, help_text in COMMANDS.items()
    }
    if wanted in commands:  # Only its module is loaded: the other commands' libraries take seconds.
        return exit_code(lambda: run(wanted, commands[wanted], arguments[1:]))
    if wanted:
        parser.error(f"there is no command {wanted!r}{did_you_mean(wanted, COMMANDS)}")
    parser.parse_args(arguments)
    parser.print_help()
    print("\nstart with: ddp-course lab")
    return 0


def run(name: str, parser: argparse.ArgumentParser, arguments: list[str]) -> int | None:
    """Run the command `name` with its own arguments; who waits for torch is told so."""
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
    """The end of a sentence about a word that is not `known`: the one that is most like it."""
    close = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def exit_code(command: Callable[[], int | None]) -> int:
    """Run the command; return its exit code, with one line about what went wrong instead of a
    traceback.
    """
    try:
        code = command() or 0
        if sys.stdout is not None:  # It is None where the caller has closed it: >&-
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # In `ddp-course … | head` the reader may end first.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # Python says nothing more about it at its end.
        return 128 + 13
    except (ValueError, OSError) as error:
        print(f"ddp-course: {error}", file=sys.stderr)
        return 2
    except CourseError as error:
        print(f"ddp-course: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ddp-course: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
