"""A warm spare: a process that has imported torch and waits to become one rank of one launch.

A script, not a part of the package, like the server: it imports nothing of the course and nothing of the learner's
until it is needed, so that every launch reads both afresh. Its standard input brings messages as in `channel`: first
the launch's folder, the number of the rank and the setting; later further calls, or an empty message when all ranks may
leave. When the input ends, so does this process: its caller is gone. Its arguments are the open pipes on which the rank
reports, prints and shows its stacks.
"""

# ruff: noqa: E402 (the folder of this script must leave the path before anything else is imported)
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]

import atexit
import gc
import importlib
import pickle
import queue
import shutil
import struct
import threading

MARK = "DDP_COURSE_LAUNCH"  # as in `local`: the caller has marked this process, and so what it starts
AT_ONCE = ["torch.distributed", "torch.multiprocessing", "numpy", "cloudpickle", "psutil"]
WHEN_IDLE = ["torch._dynamo", "torch.utils.data"]  # what ranks would import with their first optimizer
IDLE_SECONDS = float(os.environ.get("DDP_COURSE_IDLE") or 900)


def main() -> None:
    """Import, wait, become a rank; end if nobody wants one for long."""
    orders: queue.Queue = queue.Queue()
    folders: list = []
    threading.Thread(target=listen, args=(os.dup(0), orders, folders), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    pipes = [opened(int(number)) for number in sys.argv[1:]]
    gc.disable()  # what modules define is no garbage: a fifth of the time to import them
    for name in AT_ONCE:
        importlib.import_module(name)
    for name in WHEN_IDLE:
        if orders.empty():
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    try:
        order = pickle.loads(orders.get(timeout=IDLE_SECONDS))
    except queue.Empty:
        return
    folder, rank, setting = order["folder"], order["rank"], order["setting"]
    folders.append(folder)
    sys.path[:], sys.argv[:] = setting["path"], setting["argv"]
    os.environ.update({name: value for name, value in setting["environ"].items() if name != MARK})
    if os.path.isdir(setting["folder"]):
        os.chdir(setting["folder"])
    be_rank(folder, rank, setting, orders, pipes)
    importlib.import_module("ddp_course.running.launching.rank").leave_nccl()
    atexit.register(os._exit, 0)  # when its threads have ended, but before gloo's would be torn down


def listen(descriptor: int, orders: queue.Queue, folders: list) -> None:
    """In a thread: pass on every order; when the caller is gone, end this process and leave nothing behind."""
    with os.fdopen(descriptor, "rb") as messages:
        while header := messages.read(8):
            orders.put(messages.read(struct.unpack("<Q", header)[0]))
    import psutil

    for process in psutil.Process().children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def opened(number: int) -> int:
    """The descriptor of a pipe that the caller has passed on; processes that this one starts do not get it."""
    if sys.platform == "win32":
        import msvcrt

        number = msvcrt.open_osfhandle(number, os.O_WRONLY | os.O_BINARY)
    os.set_inheritable(number, False)
    return number


def be_rank(folder: str, number: int, setting: dict, orders: queue.Queue, pipes: list) -> None:
    """The same as `rank.main`, with files of a folder instead of open ones."""
    ranks = importlib.import_module("ddp_course.running.launching.rank")

    def next_call():
        try:
            return orders.get(timeout=setting["idle"])
        except queue.Empty:
            raise TimeoutError from None

    link = pickle.loads(setting["link"])
    if link is not None:
        link.enter(number)
    flags = os.O_RDWR | getattr(os, "O_BINARY", 0)
    payload, recorder = (os.open(os.path.join(folder, name), flags) for name in ("call", "recorder"))
    ranks.work(setting, number, link, None, next_call, payload, recorder, *pipes)


if __name__ == "__main__":
    main()
