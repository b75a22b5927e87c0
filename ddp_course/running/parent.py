"""Ranks of torchrun end with it: one that lived on would join the next job that takes the same port.

torch takes seconds to import, and torchrun may be killed meanwhile. So a program that torchrun starts calls
`end_with_torchrun` before it imports torch; this module imports no torch.
"""

import os
import sys
import threading

from .linux import die_with_parent

JOB = "TORCHELASTIC_RUN_ID"


def end_with_torchrun() -> None:
    """Have this process end as soon as the torchrun that started it does; without torchrun nothing happens."""
    if JOB not in os.environ:
        return
    parent = os.getppid()
    die_with_parent(parent)
    if not may_be_torchrun(parent):
        os._exit(1)
    if sys.platform != "linux":
        import psutil

        threading.Thread(target=lambda: (psutil.Process(parent).wait(), os._exit(1)), daemon=True).start()


def may_be_torchrun(parent: int) -> bool:
    """Whether the process `parent` started this rank; if torchrun had ended before, init or the like adopted it.

    torchrun runs in the same Python as its ranks. A shell between the two has the job's name in its environment.
    """
    import psutil  # only ranks of torchrun come here

    try:
        process = psutil.Process(parent)
        return process.exe() == psutil.Process().exe() or process.environ().get(JOB) == os.environ[JOB]
    except psutil.Error:
        return False
