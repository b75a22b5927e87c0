"""Try versions of torch, each in a fresh environment, and write docs/VERSIONS.md: `make versions`.

    python authoring/versions.py 2.14.1 2.15.0    # quick tests, three lessons, virtual times
    python authoring/versions.py --whole 2.15.0   # all of make test and all lessons instead
    python authoring/versions.py --here           # the torch of this environment, no other one
    python authoring/versions.py                  # only the page, from the table

The table is `manyranks/tried.csv`, which is a part of the package: `ddp-course doctor` and
the sentence about a torch that nobody tried read it. An environment takes some minutes and 1.5 to 7
GB in the temporary folder until its torch has been tried.
"""

import argparse
import csv
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "manyranks" / "tried.csv"
PAGE = ROOT / "docs" / "VERSIONS.md"
NOT_RUN = "not run"
COLUMNS = ["torch", "python", "system", "date", "tests", "lessons", "virtual times", "remarks"]
LESSONS = "00 or 05 or 06"  # the whole ladder, hooks, and torch's own class with torch.compile
ABOUT = """# Versions that were tried

`make versions` writes this page, from `manyranks/tried.csv`. *Tests*: the quick ones, or
all of `make test`. *Lessons*: how many of those that were run came to their end, with the outputs
that are stored. *Virtual times*: the beginning of a SHA-256 of one comparison of seven stages, with
all its times, bytes and timelines. Where it is the same, so is each of these times.

With a torch that is not in this table, the first launch says so, and goes on; `ddp-course doctor`
says whether yours is in it. No code asks for torch by its number: what differs between versions is
in `manyranks/torch_inside.py`, which looks for what torch has. A private part of torch that is
gone is named in the error of what needs it, and all else works.

The lock names 2.13.0, though newer ones work: docs/CONTRIBUTING.md says why, under
*Move to a new torch*.

"""


def main() -> int:
    """Try the versions that were asked for, and write the table and the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("torch", nargs="*", help="versions, such as 2.15.0")
    parser.add_argument("--here", action="store_true", help="try this environment's torch")
    parser.add_argument(
        "--whole", action="store_true", help="all of make test, and every lesson, not only three"
    )
    args = parser.parse_args()
    # Behind a shell's "&" interrupts are ignored, by what is run here too; some tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if args.here:
        add(tried(Path(sys.executable), args.whole))
    for release in args.torch:
        with tempfile.TemporaryDirectory(prefix=f"torch-{release}-") as folder:
            add(tried(fresh_environment(Path(folder), release), args.whole))
    PAGE.write_text(page(read()), encoding="utf-8")
    return 0


def fresh_environment(folder: Path, release: str) -> Path:
    """Return the Python of a new environment with this torch, the course, and what locks say."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    wanted = folder / "wanted.txt"
    lines = []
    for name in ("requirements.lock", "requirements-dev.lock"):
        lines += (ROOT / name).read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if "==" in line and not line.startswith("torch==")]
    wanted.write_text("\n".join(kept), encoding="utf-8")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for what in ([f"torch=={release}"], ["-r", wanted], ["--no-deps", "--editable", ROOT]):
        subprocess.run([*pip, *what], check=True)
    return python


def tried(python: Path, whole: bool) -> dict[str, str]:
    """Return the table's row about an environment: what fails is written down, and ends nothing."""
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    if whole:
        target = "make test"
        chosen = ["-m", "not slow and not weekly", "tests"]
        of_lessons: list[str] = []
    else:
        target = "make test-quick"
        chosen = quick_tests()
        of_lessons = ["-k", LESSONS]
    tests = counts(output_of(python, *pytest, "-n", "2", "--dist", "loadfile", *chosen))
    name = "tests/test_notebooks.py::test_lesson_runs_from_a_copy_in_another_folder"
    lessons = counts(output_of(python, *pytest, name, *of_lessons))
    digest = "from benchmarks.virtual_time import hash_under; print(hash_under('quiet')[:16])"
    return {
        "torch": output_of(python, "-c", "import torch; print(torch.__version__)").split("+")[0],
        "python": output_of(python, "-c", "import platform; print(platform.python_version())"),
        "system": f"{platform.system()} {platform.machine()}",
        "date": date.today().isoformat(),
        "tests": f"{tests} of {target}",
        "lessons": lessons,
        "virtual times": output_of(python, "-c", digest).splitlines()[-1],
        "remarks": "",
    }


def quick_tests() -> list[str]:
    """Return the files that `make test-quick` runs."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    return re.search(r"^QUICK := (.*)$", text, re.MULTILINE)[1].split()


def output_of(python: Path, *words: str) -> str:
    """Return what a command of this Python printed, in the checkout; print its errors."""
    print(f"{python} {' '.join(words)[:100]}", flush=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        print(done.stdout[-8000:], flush=True)
    return done.stdout.strip() or "failed"


def counts(printed: str) -> str:
    """Return pytest's last line without its seconds: "2 failed, 88 passed"."""
    last = printed.splitlines()[-1].strip("= ")
    return re.sub(r" in [\d.]+s.*", "", last)


def read() -> list[dict[str, str]]:
    """Return the rows of the table."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def add(row: dict[str, str]) -> None:
    """Write a row into the table, in the place of an earlier one about the same versions."""
    rows = [other for other in read() if about(other) != about(row)]
    rows.append(row)
    rows.sort(key=about)
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def about(row: dict[str, str]) -> tuple:
    """Return what a row is about: the versions of torch and Python, as numbers, and the system."""
    return *map(numbers, (row["torch"], row["python"])), row["system"]


def numbers(release: str) -> list[int]:
    """Return the numbers of a version."""
    return [int(number) for number in re.findall(r"\d+", release)]


def page(rows: list[dict[str, str]]) -> str:
    """Return the page about these rows."""
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    for row in rows:
        cells = [row[column] or NOT_RUN for column in COLUMNS[:-1]]
        lines.append(" | ".join([*cells, row["remarks"]]))
    return ABOUT + "".join(f"| {line} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
