"""`python -m benchmarks NAME …`: each benchmark has a module here and options of its own."""

import argparse
import sys
from importlib import import_module

from ddp_course.lab.cli import exit_code

from . import BENCHMARKS


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark that the first word names, with the options after it; return its code."""
    words = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="measure speed, and judge what is promised of it"
    )
    parser.add_argument("name", choices=BENCHMARKS, help="NAME --help lists its options")
    name = parser.parse_args(words[:1]).name
    benchmark = import_module(f".{name}", __package__).BENCHMARK
    args = benchmark.parser().parse_args(words[1:])
    return exit_code(lambda: benchmark.run(args))


if __name__ == "__main__":
    sys.exit(main())
