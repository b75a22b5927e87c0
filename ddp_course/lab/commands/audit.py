"""`ddp-course audit FILE`: runs a training script on two ranks, and names the usual mistakes."""

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command to its parser."""
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="a script that torchrun could start"
    )
    script_arguments = "after --, for the script; FOLDER stands for a temporary folder"
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help=script_arguments)


def main(args: argparse.Namespace) -> int:
    """Run the audit and print its findings; return 1 if there is a mistake, else 0."""
    from manyranks.auditing import audit

    messages = audit(args.file.read_text(encoding="utf-8"), arguments=args.arguments)
    nothing_found = (
        "none of the usual mistakes: samples, epochs, weights and checkpoint are as they should be"
    )
    print("\n".join(messages) or nothing_found)
    # "not seen: …" is about what the script did not do, and is no mistake.
    return int(any(not message.startswith("not seen") for message in messages))
