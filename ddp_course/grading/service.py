"""The grader's helpers: processes that have loaded everything once, and fork one for each job."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

END_SECONDS = 15.0
PACKAGE = Path(__file__).resolve().parents[1]


class Service:
    """A Python module run as a process, which takes messages with open sockets; started again if it was killed."""

    def __init__(self, module: str, folder: Path):
        self.module, self.folder, self.lock = module, folder, threading.Lock()
        self.start()

    def start(self) -> None:
        """Start the process. Nothing of the grader's own surroundings changes what it imports."""
        self.control, theirs = socket.socketpair()
        environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1"}
        environ.pop("PYTHONPATH", None)
        if PACKAGE.parent.name not in ("site-packages", "dist-packages"):
            environ["PYTHONPATH"] = str(PACKAGE.parent)  # the same course as the grader's, whatever is installed
        safe = ["-P"] if sys.version_info >= (3, 11) else []
        with theirs, (self.folder / f"{self.module.rpartition('.')[2]}.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *safe, "-m", self.module],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=log,
                env={**environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}, cwd=self.folder, start_new_session=True,
            )  # fmt: skip

    def send(self, message: str, sockets: Sequence[socket.socket]) -> None:
        """Hand a job over; if the process dies at this moment, nothing will come back through the sockets."""
        with self.lock:
            if self.process.poll() is not None:
                self.control.close()
                self.start()
            with suppress(BrokenPipeError):
                socket.send_fds(self.control, [message.encode()], [one.fileno() for one in sockets])

    def end(self) -> None:
        """Let it finish, or kill it."""
        self.control.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
