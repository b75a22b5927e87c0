"""Speed, as ratios measured side by side in one run: `ddp-course bench NAME`."""

import argparse
from importlib import import_module
from typing import Any

BENCHMARKS = ("launch", "links", "ring", "ddp", "sharded", "simulator", "devices", "grade", "gpu")


def add_parser(subparsers: Any) -> None:
    """Add `bench NAME …` to the command line; the options are those of the benchmark itself."""
    parser = subparsers.add_parser("bench", help="measure speed ratios, side by side")
    parser.add_argument("name", choices=BENCHMARKS, help=", ".join(BENCHMARKS))
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the benchmark (try NAME --help)")
    parser.set_defaults(run=_run)


def _run(args):
    parser = argparse.ArgumentParser(prog="ddp-course bench")
    benchmark = import_module(f".{args.name}", __name__).BENCHMARK
    benchmark.add_parser(parser.add_subparsers(metavar="NAME", required=True))
    chosen = parser.parse_args([args.name, *args.options])
    return chosen.run(chosen)
