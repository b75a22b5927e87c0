"""Launches: the processes that run a function on K ranks, and what they say to each other."""

import sys

from ..errors import LaunchError

# The modules of this folder need functions of Unix, which cannot even be imported there.
if sys.platform == "win32":
    raise LaunchError("ranks need Linux or macOS: on Windows start this Python in WSL 2")
