"""Everything that can go wrong in a launch: the same table for the script test, the kernel test and the soak.

Each fault is the body of a function `fault()` that runs on every rank, the error that the caller must get, and a
pattern that its message must match; `{culprit}` is the last rank.
"""

from dataclasses import dataclass
from textwrap import dedent, indent

HEADER = """
import contextlib, ctypes, os, resource, signal, sys, threading, time
import numpy, psutil, torch
import torch.distributed as dist
from ddp_course import launch, ring_all_reduce

def later(seconds, action):
    threading.Timer(seconds, action).start()
"""


@dataclass(frozen=True)
class Fault:
    """One row: what the culprit does, what the others do meanwhile, and what the caller must be told."""

    name: str
    culprit: str
    error: str
    pattern: str
    others: str = "dist.barrier()"
    timeout: float = 60.0

    def cell(self, world_size):
        """The source of a cell that launches this fault."""
        return (
            "def fault():\n    rank, world_size = dist.get_rank(), dist.get_world_size()\n"
            f"    if rank == world_size - 1:\n{indent(dedent(self.culprit).strip(), ' ' * 8)}\n"
            f"    else:\n{indent(dedent(self.others).strip(), ' ' * 8)}\n\n"
            f"launch(fault, world_size={world_size}, timeout={self.timeout})\n"
        )


KILL = "os.kill(os.getpid(), signal.SIGKILL)"
RING = "for _ in range(10**6): ring_all_reduce(torch.ones(100_000))"
TIMEOUT = r"(?s)not finished after 1 s.*rank {culprit}: "

FAULTS = [
    Fault(
        "exception", "numpy.zeros(3)[7]", "RankError", r"(?s)rank {culprit}: IndexError: index 7.*numpy.zeros\(3\)\[7\]"
    ),
    Fault(
        "exceptions in all ranks",
        "dist.barrier()\nraise ValueError('the first')",
        "RankError",
        r"(?s)rank {culprit}: ValueError: the first.*raise ValueError.*After that:\n  rank \d: KeyError",
        others="dist.barrier()\ntime.sleep(0.15)\nraise KeyError(rank)",
    ),
    Fault(
        "killed in forward",
        f"torch.nn.Linear(4, 4)(torch.ones(4))\n{KILL}",
        "RankError",
        "rank {culprit}: killed: by SIGKILL",
    ),
    Fault(
        "killed in all-reduce",
        f"later(0.1, lambda: {KILL})\n{RING}",
        "RankError",
        "rank {culprit}: killed: by SIGKILL",
        RING,
    ),
    Fault(
        "killed in teardown", f"later(0.2, lambda: {KILL})", "RankError", "rank {culprit}: killed: by SIGKILL", "pass"
    ),
    Fault("os._exit", "os._exit(3)", "RankError", "rank {culprit}: exited: with code 3"),
    Fault("sys.exit", "sys.exit(5)", "RankError", r"rank {culprit}: SystemExit: sys.exit was called with 5"),
    Fault(
        "segmentation fault",
        "ctypes.string_at(0)",
        "RankError",
        r"(?s)rank {culprit}: killed: by SIGSEGV.*ctypes.string_at\(0\)",
    ),
    Fault(
        "out of memory",
        "limit = psutil.Process().memory_info().vms + (1 << 28)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "kept = [numpy.ones(1 << 23) for _ in range(20)]",
        "RankError",
        "rank {culprit}: .*(MemoryError|SIGKILL)",
    ),
    Fault(
        "unpicklable result",
        "return (n for n in range(3))",
        "RankError",
        "rank {culprit}: TypeError: the result is a generator",
        "pass",
    ),
    Fault(
        "stopped", "os.kill(os.getpid(), signal.SIGSTOP)", "LaunchTimeout", TIMEOUT + "stopped by a signal", timeout=1
    ),
    Fault("infinite loop", "while True: pass", "LaunchTimeout", TIMEOUT + ".*while True: pass", timeout=1),
    Fault(
        "mismatched collectives",
        "dist.broadcast(torch.ones(3), 0)",
        "LaunchTimeout",
        r"(?s)not finished after 1 s.*torch.distributed.(barrier|broadcast)",
        others="dist.barrier()\ndist.barrier()",
        timeout=1,
    ),
    Fault(
        "one rank does not call",
        "time.sleep(100)",
        "LaunchTimeout",
        r"(?s)after 5 s: rank {culprit} has not entered ring_all_reduce of float32 \[8\], call 1, in which ranks? 0"
        r".* wait.*\n\nrank {culprit}: .*time.sleep\(100\).*\n\nrank 0: waiting\n  last .*call 1 \(inside",
        others="ring_all_reduce(torch.ones(8))",
        timeout=5,
    ),
    Fault(
        "one rank does not call torch's",
        "time.sleep(100)",
        "LaunchTimeout",
        r"(?s)after 5 s: rank {culprit} has not entered torch.distributed.all_reduce, in which ranks? 0.* wait",
        others="dist.all_reduce(torch.ones(8))",
        timeout=5,
    ),
    Fault(
        "a rank that returned is missed",
        "return",
        "LaunchTimeout",
        r"(?s)after 5 s: rank {culprit} has not entered ring_all_reduce.*where they were:\n\nrank {culprit}: finished",
        others="ring_all_reduce(torch.ones(8))",
        timeout=5,
    ),
    Fault(
        "a connection of the learner's own",
        "raise ConnectionResetError('the data base is gone')",
        "RankError",
        r"^(RankError: )?rank {culprit}: ConnectionResetError: the data base is gone",
    ),
    Fault(
        "left the process group",
        "import subprocess\nsubprocess.Popen(['sleep', '300'], start_new_session=True)\nraise ValueError('left')",
        "RankError",
        "rank {culprit}: ValueError: left",
    ),
    Fault(
        "a report that something else wrote over",
        "for file in range(3, 60):\n    with contextlib.suppress(OSError): os.write(file, b'damaged!' * 4)",
        "RankError",
        "rank {culprit}: TypeError: its result cannot be read here",
    ),
    Fault(
        "a child that the rank forked returns",
        "if os.fork() == 0: return 'child'\ntime.sleep(0.3)\nraise ValueError('parent')",
        "RankError",
        "rank {culprit}: ValueError: parent",
    ),
    Fault(
        "breakpoint",
        "breakpoint()",
        "RankError",
        "rank {culprit}: CourseError: breakpoint.*nobody can type.*Debug a rank",
    ),
    Fault(
        "a second process group",
        "dist.init_process_group('gloo')",
        "RankError",
        "rank {culprit}: ValueError: launch has brought the process group up already",
    ),
    Fault(
        "mismatched shapes",
        "ring_all_reduce(torch.ones(5, 3))",
        "RankError",
        r"MismatchError: collective number 1 is ring_all_reduce of float32 \[\d, 3\] on rank \d, but .* on rank \d",
        others="ring_all_reduce(torch.ones(4, 3))",
    ),
    Fault(
        "mismatched shapes that fit",
        "ring_all_reduce(torch.ones(4, 6))",
        "RankError",
        r"MismatchError: .*\[\d, \d\] on rank \d, but .*\[\d, \d\] on rank \d",
        others="ring_all_reduce(torch.ones(6, 4))",
    ),
    Fault(
        "mismatched types",
        "ring_all_reduce(torch.ones(8, dtype=torch.int32))",
        "RankError",
        r"MismatchError: .*(float32 \[8\] on rank \d, but .*int32|int32 \[8\] on rank {culprit}, but .*float32)",
        others="ring_all_reduce(torch.ones(8))",
    ),
]
