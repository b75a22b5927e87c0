"""The commands and variables with which the caller starts the server, and the agent a new rank."""

import os
import sys
from pathlib import Path

from .. import own_code
from .protocol import Surroundings

SCRIPT = str(Path(__file__).with_name("server.py"))
# Linux starts no program with an environment variable of more than 131,072 bytes; a character has
# up to four.
LONGEST_VARIABLE = 32_000


def preloading_environment() -> dict[str, str]:
    """Return the environment for a process that loads torch.

    Its ranks get the caller's whole environment later.
    """
    short = {name: value for name, value in os.environ.items() if len(value) < LONGEST_VARIABLE}
    # torch's C++ prints no warnings, and NumPy starts no threads, which would not survive a fork.
    return {**short, "TORCH_CPP_LOG_LEVEL": "ERROR", "OPENBLAS_NUM_THREADS": "1"}


def server_command(role: str, *modules: str) -> list[str]:
    """Return the command that starts server.py in a role, after it has loaded these modules."""
    return [sys.executable, SCRIPT, role, own_code.LIBRARY.found_in, *modules]


def surroundings(**variables: str) -> Surroundings:
    """Return what ranks share with this process, with `variables` added to the environment."""
    environ = {**os.environ, **variables}
    return Surroundings(sys.path, sys.argv, os.getcwd(), environ, own_code.packages)
