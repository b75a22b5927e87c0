"""Where does each rank of a job stand when it hangs? py-spy looks from outside, on Linux and macOS:

    python exercises/clinic/stacks.py exercises/clinic/patient_02.py

The script runs under torchrun on three ranks. When they stand still, each rank's innermost line outside of torch and
Python's library is printed. Where the system forbids a look into another process (ptrace) py-spy says so: then put
`faulthandler.dump_traceback_later(seconds)` into the script.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
SPY = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
PATIENCE = 90  # seconds
FRAME = re.compile(r"\(.+:\d+\)$")  # such as "main (train.py:33)"
LIBRARY = re.compile(r"site-packages|torch/|<frozen|lib/python")
IMPORTING = "<frozen importlib"


def main(*script):
    if not Path(SPY).exists():
        sys.exit('py-spy is not installed; run: pip install "ddp-course[clinic]"')
    job = subprocess.Popen([*TORCHRUN, *script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    places = {}
    end = time.monotonic() + PATIENCE
    try:
        still = False
        while not still and time.monotonic() < end and job.poll() is None:
            time.sleep(4)
            before = places
            places = {rank: innermost(pid) for rank, pid in ranks_below(job.pid)}
            still = bool(places) and places == before and all(places.values())
    finally:
        job.terminate()
        job.wait()
    lines = [f"rank {rank}: {place}" for rank, place in sorted(places.items())]
    print("$ py-spy dump --pid …, for each rank, when they stand still", *lines, sep="\n")
    if not lines:
        print("all ranks had ended")


def ranks_below(pid):
    """(rank, process number) of all processes below `pid` that torchrun has given a rank."""
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # It has ended meanwhile.
            if (rank := child.environ().get("RANK")) is not None:
                yield int(rank), child.pid


def innermost(pid):
    """The innermost line of a process outside of torch and Python's library; what py-spy says if it cannot look.

    A process that still imports, which takes long on a busy machine, has not come to a line yet: "".
    """
    plain = {name: value for name, value in os.environ.items() if "COLOR" not in name}  # Jupyter asks for colours.
    dump = subprocess.run([SPY, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=60, env=plain)
    if IMPORTING in dump.stdout:
        return ""
    lines = [text.strip() for text in dump.stdout.splitlines() if FRAME.search(text)]
    own = [text for text in lines if not LIBRARY.search(text)]
    return own[0] if own else dump.stderr.strip()[:200]


if __name__ == "__main__":
    main(*sys.argv[1:])
