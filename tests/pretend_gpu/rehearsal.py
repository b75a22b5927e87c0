"""`make gpu-rehearsal`: run lessons and solutions to their end on pretended GPUs.

It says what a real one would punish.

    make gpu-rehearsal    every lesson and solution, on 1, 2, 4 and 8 GPUs
    make gpu-rehearsal ARGS="--gpus 4 notebooks/00_start_here.ipynb"

A run fails if a cell raises, on a race, on a context that a rank opens beside the one on its own
GPU, on a communicator that is made while a rank receives, and if the processor waits at one line
more often than 20 times for each GPU, except where `waits.csv` says why. The table of all runs is
results/gpu_rehearsal.csv.
"""

import argparse
import csv
import os
import sys
import tempfile
import time
from pathlib import Path

import nbclient
import nbformat

from pretend_gpu import build, environment, read

ROOT = Path(__file__).resolve().parents[2]
WAITS = Path(__file__).with_name("waits.csv")  # These places of the course may wait for the GPU.
OTHER_WAITS = 20  # so often may the ranks of one GPU wait anywhere else
PATIENCE = 900  # seconds of a cell: eight ranks may share two cores with other programs
TABLE = ROOT / "results" / "gpu_rehearsal.csv"
NAMES = ("notebook", "GPUs", "NCCL", "waits", "MiB", "figures", "races", "seconds", "verdict")
# What runs before the first cell. Sizes and steps are chosen for the speed of a GPU: where eight
# pretended ones share two cores, half of the steps, the smallest model and a quarter of its batch
# are enough, and to be slow is no fault.
BEFORE = """
import ddp_course.lab.measuring.on_your_gpus as probe
from ddp_course import launch
from ddp_course.lab.showing import shell

for function in (launch, shell.command):
    function.__kwdefaults__["timeout"] = PATIENCE


def find_size(world_size, probe=probe):
    size = next(probe.sizes(world_size))
    size = size._replace(global_batch=max(4, size.global_batch // 4))
    probe.step_seconds(size)
    return size, [probe.torch.cuda.get_device_name(gpu) for gpu in range(probe.usable_gpus())]


def run(run=probe.run, **options):
    return run(**options | {"steps": 5, "timeout": PATIENCE})


probe.find_size = find_size
probe.run = run
""".replace("PATIENCE", str(PATIENCE))
COLUMNS = "{:<50}{:>5}{:>6}{:>6}  {:<40}{:>8}{:>6}{:>8}  {}"


def run(path, gpus, log):
    """Run a notebook with so many GPUs; return its errors, and the number of its figures.

    An error is such as "cell 3: NameError: …".
    """
    notebook = nbformat.read(path, 4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(BEFORE))
    folder = str(Path(path).resolve().parent)
    client = nbclient.NotebookClient(
        notebook, timeout=PATIENCE, allow_errors=True, resources={"metadata": {"path": folder}}
    )
    client.create_kernel_manager()
    errors = []
    figures = 0
    try:
        client.execute(env=environment(gpus, log, PATIENCE))
    except Exception as error:  # the kernel died, or a cell took too long
        errors.append(f"stopped: {type(error).__name__}: {str(error)[:300]}")
    for number, cell in enumerate(notebook.cells, -1):
        for output in cell.get("outputs", []):
            figures += "image/png" in output.get("data", {})
            tags = cell.metadata.get("tags", [])
            if output.output_type == "error" and "raises-exception" not in tags:
                errors.append(f"cell {number}: {output.ename}: {output.evalue[:600]}")
    return errors, figures


def may_wait(place):
    """Return whether the table of waits has this place: "… at stage3.py:109 (train)"."""
    with WAITS.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return any(row["file"] in place and f"({row['function']})" in place for row in rows)


def judge(errors, findings, gpus):
    """Return all that fails a run, a line each."""
    wrong = list(errors)
    wrong += [f"race: {race}" for race in dict.fromkeys(findings.races)]
    wrong += list(dict.fromkeys(findings.foreign + findings.late))
    for place, count in findings.syncs.most_common():
        if count > OTHER_WAITS * gpus and not may_wait(place):
            wrong.append(f"the processor waited {count} times for a GPU: {place}")
    return wrong


def rehearse(path, gpus):
    """Run one notebook with so many GPUs; return a row of the table, and what is wrong."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "findings")
        errors, figures = run(path, gpus, log)
        findings = read(log)
    wrong = judge(errors, findings, gpus)
    verdict = "WRONG" if wrong else "right"
    row = {
        "notebook": f"{Path(path).parent.name}/{Path(path).stem}",
        "GPUs": gpus,
        "NCCL": findings.communicators,
        "waits": findings.syncs.total(),
        "MiB": " ".join(f"{findings.peaks.get(gpu, 0) / 2**20:.1f}" for gpu in range(gpus)),
        "figures": figures,
        "races": len(findings.races),
        "seconds": round(time.perf_counter() - began),
        "verdict": verdict,
    }
    print(COLUMNS.format(*row.values()), flush=True)
    for line in wrong[:10]:
        print("    " + line.replace("\n", "\n    "), flush=True)
    return row, wrong


def write(rows):
    """Put rows into the table of all runs, each in the place of an older one."""
    table = {}
    if TABLE.exists():
        with TABLE.open(encoding="utf-8", newline="") as file:
            table = {(row["notebook"], row["GPUs"]): row for row in csv.DictReader(file)}
    for row in rows:
        table[row["notebook"], str(row["GPUs"])] = row
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, NAMES, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table[key] for key in sorted(table))


def counts(text):
    """Return the numbers of GPUs in a text such as "1,2"."""
    return [int(number) for number in text.split(",")]


def main(arguments=None):
    """Carry out the command; return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=counts, default=[1, 2, 4, 8], help="default 1,2,4,8")
    parser.add_argument("notebooks", nargs="*", help="default: all lessons and solutions")
    options = parser.parse_args(arguments)
    if reason := build.why_not():
        print(f"skipped: {reason}")
        return 0
    paths = options.notebooks or sorted(
        [*ROOT.glob("notebooks/[0-9]*.ipynb"), *ROOT.glob("solutions/[0-9]*.ipynb")]
    )
    build.library()
    print(COLUMNS.format(*NAMES))
    failed = 0
    for path in paths:
        done = [rehearse(path, gpus) for gpus in options.gpus]
        failed += sum(bool(wrong) for _, wrong in done)
        write([row for row, _ in done])
    print(f"{len(paths) * len(options.gpus)} runs, {failed} of them wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
