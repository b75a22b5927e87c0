"""Whether virtual hosts can be built here: tried once, in a small process of its own, as namespaces need one without
threads. Who has something else to do meanwhile begins early: nothing here takes time to import.
"""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

SCRIPT = Path(__file__).parent / "links" / "virtual_hosts.py"
SECONDS = 60


@cache
def begin() -> subprocess.Popen | OSError | None:
    """Start building two hosts without waiting for it; the error if no process can be had, None if not on Linux."""
    if sys.platform != "linux":
        return None
    nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
    try:
        return subprocess.Popen([sys.executable, str(SCRIPT)], stdin=nothing, stdout=pipe, stderr=nothing)
    except OSError as error:
        return error


@cache
def try_hosts() -> dict:
    """What came of it: {"reason": None or one line about what forbids them, "latency": whether they can have it}."""
    building = begin()
    if isinstance(building, OSError):
        return refused(building)
    if building is None:
        return {"reason": "virtual hosts need Linux", "latency": False}
    with building:
        try:
            told, _ = building.communicate(timeout=SECONDS)
            return json.loads(told)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            building.kill()
            return refused(error)


def refused(error: Exception) -> dict:
    """What is told where the attempt itself has failed."""
    return {"reason": f"the attempt to build them failed ({error})", "latency": False}
