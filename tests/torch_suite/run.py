"""Run PyTorch's own tests of DistributedDataParallel against a class.

Call it as `python tests/torch_suite/run.py [--ddp NAME]`.

    python tests/torch_suite/run.py                                                       # stage 6
    python tests/torch_suite/run.py --ddp torch.nn.parallel.DistributedDataParallel  # the control
    python tests/torch_suite/run.py --ddp stand_ins.Silent  # must fail
    python tests/torch_suite/run.py --only no_sync --verbose

The tests are those in tests.txt: all that torch's own class passes on the CPU (see `on_cpu`). Every
rank of every test is a process of its own. Exit code 1 if one fails, 2 if the suite cannot run.
"""

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

HERE = Path(__file__).parent
TORCH = "2.13"  # the list was made with this version of the tests
GRACE = 3.0  # seconds that the others have to say why, after one rank has failed
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import on_cpu  # noqa: E402


def listed(world_size):
    """Return {test: seconds that torch's class takes}, those that this world size has."""
    tests = {}
    for line in (HERE / "tests.txt").read_text().splitlines():
        columns = line.split("#")[0].split()
        if columns and columns[{2: 1, 3: 2}[world_size]] != "-":
            tests[columns[0]] = float(columns[{2: 1, 3: 2}[world_size]])
    return tests


def be_rank(module, suite, name, rank, world_size, folder):
    """Live the life of one rank: bring the group up, run the test, leave word in `folder`.

    The word says how it ended.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # The rank ends with the runner.
    log = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1), os.dup2(log, 2)
    code = 10
    try:
        run_test_method(module, suite, name, rank, world_size, folder)
        Path(f"{folder}/done{rank}").touch()  # exit status 0 alone could be anybody's os._exit(0)
        code = 0
    except BaseException as error:
        lines = [line for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
        Path(f"{folder}/why{rank}").write_text(f"{time.time()} {lines[0]}")
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def run_test_method(module, suite, name, rank, world_size, folder):
    """Do what torch's `MultiProcessTestCase` does around a test, without its pipes and threads."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_utils

    os.environ["TEMP_DIR"] = os.environ["TMPDIR"] = tempfile.tempdir = folder
    torch.set_num_threads(1)
    test = suite(name)
    test.rank = rank
    test.file_name = f"{folder}/rendezvous"
    # With file:// the tests save and load the wrapper in mid-training, and torch's own class fails
    # this one then.
    module.INIT_METHOD = "env://" if name == "test_DistributedDataParallel" else "file://"
    seconds = module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout)
    dist.init_process_group("gloo", test.init_method, timedelta(seconds=seconds), world_size, rank)
    test._barrier()
    common_utils.set_rng_seed()
    getattr(test, name)()
    test._barrier()
    # Some tests destroy the group themselves.
    with contextlib.suppress(AssertionError, ValueError):
        dist.destroy_process_group()


def run_test(module, suite, name, world_size, limit, top):
    """Run one test; return (why it failed or "", seconds, what the ranks printed).

    Nothing outlives this call.
    """
    folder = tempfile.mkdtemp(dir=top)
    for inner in ("barrier", "test_dir"):
        os.mkdir(f"{folder}/{inner}")
    sys.stdout.flush(), sys.stderr.flush()
    begin = time.time()
    ranks = []
    try:
        for rank in range(world_size):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                os.setpgid(0, ranks[0])
                be_rank(module, suite, name, rank, world_size, folder)
            with contextlib.suppress(OSError):  # The child may have been faster.
                os.setpgid(ranks[-1], ranks[0])
        over = wait_for(ranks, begin + limit)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks[0], signal.SIGKILL)
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)  # had it left the group; not reaped yet, so still ours
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    logs = [
        f"--- rank {rank}\n{Path(f'{folder}/rank{rank}.log').read_text(errors='replace')}"
        for rank in range(len(ranks))
    ]
    why = (
        ""
        if all(os.path.exists(f"{folder}/done{rank}") for rank in range(world_size))
        else reason_for(folder, codes)
    )
    shutil.rmtree(folder, ignore_errors=True)
    if over:
        why = f"not finished after {limit:.0f} s; {why}"
    return why, time.time() - begin, "".join(logs)


def wait_for(ranks, deadline):
    """Wait until all have ended, or one has failed and the others had time to.

    Return whether time ran out. The ends are looked at and not reaped: so long the number of the
    process group cannot be used again.
    """
    while True:
        ends = [os.waitid(os.P_PID, rank, os.WEXITED | os.WNOHANG | os.WNOWAIT) for rank in ranks]
        if all(ends):
            return False
        if any(end and end.si_status for end in ends):
            deadline = min(deadline, time.time() + GRACE)
            if time.time() >= deadline:
                return False
        elif time.time() > deadline:
            return True
        time.sleep(0.01)


def reason_for(folder, codes):
    """Return why the test failed: what the rank said that failed first, broken connections last."""
    reasons = [(path.read_text(), path.name[3:]) for path in sorted(Path(folder).glob("why*"))]
    reasons.sort(key=lambda reason: ("by peer" in reason[0], reason[0]))
    return (
        f"rank {reasons[0][1]}: {reasons[0][0].split(' ', 1)[1]}"
        if reasons
        else f"ranks ended with {codes}"
    )


def run_all(args, top):
    """Run the chosen tests, print a line each; return {test: why it failed, or ""}."""
    importing, _, attribute = args.ddp.rpartition(".")
    ddp = getattr(importlib.import_module(importing), attribute)
    module, suite = on_cpu.load_tests(ddp, args.world_size)
    kernels = on_cpu.teach_sync_batchnorm(ddp)
    results = {}
    for name, seconds in listed(args.world_size).items():
        if re.search(args.only, name):
            limit = args.patience + 20 * seconds
            why, took, log = run_test(module, suite, name, args.world_size, limit, top)
            results[name] = why
            verdict = "FAIL" if why else "pass"
            print(f"{verdict} {name} {took:.1f} s {why[:200]}".rstrip(), flush=True)
            if why and args.verbose:
                print(log[-6000:], flush=True)
    del kernels  # The kernels stay registered until here.
    return results


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ddp", default="adapter.WithPrivateNames", help="dotted name of a class")
    parser.add_argument("--world-size", type=int, default=2, choices=[2, 3])
    parser.add_argument("--only", default="", help="regular expression on the names of tests")
    parser.add_argument(
        "--patience",
        type=float,
        default=180.0,
        help="seconds for a test, and 20 times the control's",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="print what the ranks of failed tests print"
    )
    parser.add_argument("--json", help="write {test: why it failed, or ''} to this file")
    args = parser.parse_args()
    import torch

    if not torch.__version__.startswith(TORCH):
        parser.exit(2, f"tests.txt was made with torch {TORCH}, this is {torch.__version__}\n")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    top = tempfile.mkdtemp(prefix="torch_suite_")
    compiling = {"TORCHINDUCTOR_CACHE_DIR": f"{top}/inductor", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    os.environ.update(TMPDIR=top, OMP_NUM_THREADS="1", **compiling)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    tempfile.tempdir = top
    try:
        results = run_all(args, top)
    finally:
        shutil.rmtree(top, ignore_errors=True)
    good = sum(not why for why in results.values())
    if args.json:
        Path(args.json).write_text(json.dumps(results))
    print(
        f"{args.ddp}, torch {torch.__version__}, {args.world_size} ranks: {good} of {len(results)}"
        " pass"
    )
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
