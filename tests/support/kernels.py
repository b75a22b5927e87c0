"""A real Jupyter kernel to run cells in."""

from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
from jupyter_client.manager import KernelManager


@dataclass
class Output:
    """What a cell gave: its streams, the value of its last expression, and its error, if any."""

    stdout: str = ""
    stderr: str = ""
    result: str = ""
    error: str = ""
    message: str = ""
    displays: list = field(default_factory=list)


class Kernel:
    """A kernel process with its client."""

    def __init__(self):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=300)

    @property
    def pid(self):
        """Process id of the kernel."""
        return self.manager.provisioner.pid

    def run(self, source, timeout=300, on_stdout=None):
        """Run a cell to its end; `on_stdout(text)` is called while it runs."""
        output = Output()

        def collect(message):
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    setattr(
                        output, content["name"], getattr(output, content["name"]) + content["text"]
                    )
                    if on_stdout and content["name"] == "stdout":
                        on_stdout(content["text"])
                case "execute_result":
                    output.result = content["data"]["text/plain"]
                case "display_data":
                    output.displays.append(content["data"])
                case "error":
                    output.error = content["ename"]
                    output.message = "\n".join(content["traceback"])

        self.client.execute_interactive(
            source, timeout=timeout, output_hook=collect, store_history=True
        )
        return output

    def descendants(self):
        """Return all processes below the kernel, and below its launch server."""
        return psutil.Process(self.pid).children(recursive=True)

    def close(self):
        """End the kernel."""
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_connection_file()  # A kernel that was killed has left the file.


@contextmanager
def running_kernel():
    """Yield a fresh kernel, and end it after the block."""
    kernel = Kernel()
    try:
        yield kernel
    finally:
        kernel.close()
