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
def begin() -> subprocess.Popen | None:
    """Start building two hosts without waiting for it; None where no system could."""
    if sys.platform != "linux":
        return None
    nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
    return subprocess.Popen([sys.executable, str(SCRIPT)], stdin=nothing, stdout=pipe, stderr=nothing)


@cache
def try_hosts() -> dict:
    """What came of it: {"reason": None or one line about what forbids them, "latency": whether they can have it}."""
    try:
        building = begin()
    except OSError as error:
        return refused(error)
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
