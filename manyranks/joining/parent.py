"""Ends the ranks of torchrun when torchrun ends.

A rank that lived on would join the next job that takes the same port.

torch takes seconds to import, and torchrun may be killed meanwhile. So a program that torchrun
starts calls `end_with_torchrun` before it imports torch, and this module does not import it.
"""

import os
import sys
import threading

from ..linux import die_with_parent

JOB = "TORCHELASTIC_RUN_ID"


def end_with_torchrun() -> None:
    """Have this process end as soon as the torchrun that started it ends, if one did."""
    if JOB not in os.environ:
        return
    import psutil  # Only ranks of torchrun need this module.

    try:
        parent = psutil.Process(os.getppid())
        die_with_parent(parent.pid)
        # torchrun runs in the same Python as its ranks. A shell between the two has the job's name
        # in its environment.
        is_torchrun = parent.exe() == psutil.Process().exe()
        orphaned = not is_torchrun and parent.environ().get(JOB) != os.environ[JOB]
    except psutil.Error:
        orphaned = True
    # If torchrun had ended already, another process, such as init, has adopted this rank.
    if orphaned:
        os._exit(1)

    def end_after_parent():
        parent.wait()
        os._exit(1)

    if sys.platform != "linux":
        threading.Thread(target=end_after_parent, daemon=True).start()
