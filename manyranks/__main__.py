"""The command `manyranks`, also as `python -m manyranks`.

manyranks run --ranks 8 --device H100 --link NVLink train.py --epochs 1
"""

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    from .rehearsal import command  # Other programs that import this package do not need it.

    parser = argparse.ArgumentParser("manyranks", description="Run torch.distributed programs.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    summary, _, exit_codes = (command.__doc__ or "").partition("\n\n")
    run = commands.add_parser("run", help=summary, description=summary, epilog=exit_codes)
    command.add_options(run)
    return command.main(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
