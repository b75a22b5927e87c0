"""A warm spare: a process that has imported torch and waits to become one rank of one launch.

A script, not a part of the package, like the server: it imports nothing of the course and nothing of the learner's
until it is needed, so that every launch reads both afresh. Its standard input brings one line of JSON with the
launch's folder and the number of the rank, later an empty line when all ranks may leave. When the input ends, so does
this process: its caller is gone.
"""

# ruff: noqa: E402 (the folder of this script must leave the path before anything else is imported)
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]

import atexit
import gc
import importlib
import json
import pickle
import queue
import threading

MARK = "DDP_COURSE_SPARE"  # as in `spares`: whatever this process starts bears it
AT_ONCE = ["torch.distributed", "torch.multiprocessing", "numpy", "cloudpickle", "psutil"]
WHEN_IDLE = ["torch._dynamo", "torch.utils.data"]  # what ranks would import with their first optimizer


def main() -> None:
    """Import, wait, become a rank."""
    words: queue.Queue = queue.Queue()
    threading.Thread(target=listen, args=(os.dup(0), words), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    gc.disable()  # what modules define is no garbage: a fifth of the time to import them
    for name in AT_ONCE:
        importlib.import_module(name)
    for name in WHEN_IDLE:
        if words.empty():
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    order = json.loads(words.get())
    folder, rank = order["folder"], order["rank"]
    with open(os.path.join(folder, "setting"), "rb") as file:
        setting = pickle.load(file)
    sys.path[:], sys.argv[:] = setting["path"], setting["argv"]
    os.environ.update({name: value for name, value in setting["environ"].items() if name != MARK})
    if os.path.isdir(setting["folder"]):
        os.chdir(setting["folder"])
    be_rank(folder, rank, setting)
    words.get()  # the others may still be looking for this rank
    importlib.import_module("ddp_course.running.launching.rank").leave_nccl()
    atexit.register(os._exit, 0)  # when its threads have ended, but before gloo's would be torn down


def listen(descriptor: int, words: queue.Queue) -> None:
    """In a thread: pass on every line; when the caller is gone, end this process and all that it started."""
    with os.fdopen(descriptor) as lines:
        for line in lines:
            words.put(line)
    import psutil

    for process in psutil.Process().children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(1)


def be_rank(folder: str, number: int, setting: dict) -> None:
    """The same as `rank.main`, with files instead of pipes."""
    ranks = importlib.import_module("ddp_course.running.launching.rank")
    binary = getattr(os, "O_BINARY", 0)

    def shared(name, flags):
        return os.open(os.path.join(folder, name), flags | binary)

    own = [shared(f"{name}-{number}", os.O_WRONLY | os.O_APPEND) for name in ("report", "stdout", "stderr", "stacks")]
    link = pickle.loads(setting["link"])
    if link is not None:
        link.enter(number)
    ranks.work(setting, number, link, None, shared("call", os.O_RDONLY), shared("recorder", os.O_RDWR), *own)


if __name__ == "__main__":
    main()
