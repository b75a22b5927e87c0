"""What each rank was doing when time ran out, in the learner's terms."""

import linecache
import re
from pathlib import Path

import psutil

from ..errors import RankState

FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
STATUS = {
    psutil.STATUS_STOPPED: "stopped by a signal (SIGSTOP) and never continued",
    psutil.STATUS_RUNNING: "running",
    psutil.STATUS_ZOMBIE: "ended",
}
LAUNCHER = tuple(str(Path(__file__).with_name(name)) for name in ("rank.py", "cell.py", "spawned.py"))
LIBRARY = ("/torch/distributed/c10d_logger.py", "/threading.py", "/concurrent/futures/thread.py")


def look(rank, pid, dump, call, finished, now) -> RankState:
    """Describe one rank from its process id, the text that faulthandler wrote, and its last collective."""
    if pid is None:
        return RankState(rank, "not started yet")
    threads = parse(dump)
    status = "finished, waiting for the others" if finished else status_of(pid)
    if call is not None:
        collective = f"{call} (finished)" if call.end else f"{call} (inside for {now - call.begin:.1f} s)"
    else:
        collective = next((f"torch.distributed.{f[2]}" for frames in threads for f in frames if is_torch_call(f)), "")
    return RankState(rank, status, collective, "\n".join(show(frames) for frames in threads))


def status_of(pid) -> str:
    """What the system says about a process, in words."""
    try:
        return STATUS.get(psutil.Process(pid).status(), "waiting")
    except psutil.NoSuchProcess:
        return "ended"


def parse(dump: str) -> list:
    """The threads of a dump that run the caller's code, the main thread first; frames are (file, line, function).

    Frames come as in a traceback, most recent last, without those of the launcher and of thread start-up.
    """
    threads = []
    for part in dump.split("(most recent call first):")[1:]:
        frames = []
        for match in map(FRAME.match, part.splitlines()):
            if match and match["file"] in LAUNCHER:
                break
            if match and not match["file"].endswith(LIBRARY):
                frames.append((match["file"], int(match["line"]), match["function"]))
        if frames:
            threads.append(frames[::-1])
    return threads[::-1]


def is_torch_call(frame) -> bool:
    """Whether this frame is one of torch's own collectives."""
    return frame[0].endswith("distributed_c10d.py") and not frame[2].startswith("_")


def show(frames) -> str:
    """Frames as in a Python traceback, with the source line where it is known."""
    lines = []
    for file, line, function in frames:
        lines.append(f'  File "{file}", line {line}, in {function}')
        source = linecache.getline(file, line).strip()
        lines += [f"    {source}"] if source else []
    return "\n".join(lines)
