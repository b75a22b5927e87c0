"""Run every lesson as another machine would: `python tests/soak/lessons.py [--world-size 2] [--without-namespaces]`."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import nbformat

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from test_notebooks import LESSONS, altered, read, run_nbval

LONGEST = 60.0  # seconds of a lesson on a quiet machine


def main():
    """Run the lessons one after the other; return 1 if one failed or took too long."""
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--without-namespaces", action="store_true", help="where the kernel allows none")
    parser.add_argument("--only", nargs="*", default=[""], metavar="NN", help="only lessons whose name starts so")
    args = parser.parse_args()
    failed = False
    for path in LESSONS:
        if not path.name.startswith(tuple(args.only)):
            continue
        with tempfile.TemporaryDirectory() as folder:
            notebook = altered(read(path), args.world_size)
            nbformat.write(notebook, Path(folder) / path.name)
            start = time.perf_counter()
            done = run_nbval([path.name], Path(folder), args.without_namespaces)
            seconds = time.perf_counter() - start
            too_long = seconds > LONGEST
            print(f"{path.name}: exit code {done.returncode} in {seconds:.0f} s{too_long * ', too long'}", flush=True)
            failed = failed or too_long or done.returncode != 0
            if done.returncode:
                print(done.stdout[-3000:])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
