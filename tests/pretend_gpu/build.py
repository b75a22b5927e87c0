"""The C++ half, compiled once: `library()` is its path, `why_not()` says what is missing."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

VERSION = "2.13.0"  # of torch, which these tests look into
SOURCE = Path(__file__).with_name("shim.cpp")


def why_not():
    """Return why there can be no pretended GPUs on this machine, or None."""
    found = version("torch")
    if found.partition("+")[0] != VERSION:
        return f"pretended GPUs are written for torch {VERSION}, and this is {found}"
    if not found.endswith("+cpu"):
        return f"pretended GPUs are for torch's CPU build, and this is {found}"
    if shutil.which("g++") is None:
        return "pretended GPUs need the compiler g++"
    return None


def library():
    """Return the path of the compiled library; the first call compiles it, in about ten seconds."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddp_course"
    mark = hashlib.sha256(SOURCE.read_bytes() + version("torch").encode()).hexdigest()[:12]
    path = cache / f"pretend_gpu-{mark}.so"
    if path.exists():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    torch = Path(importlib.util.find_spec("torch").origin).parent
    include = torch / "include"
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        made = Path(folder) / path.name
        command = [
            "g++", "-O1", "-std=c++20", "-shared", "-fPIC",
            f"-I{include}", f"-I{include}/torch/csrc/api/include",
            "-DUSE_DISTRIBUTED", "-DUSE_C10D", "-DUSE_C10D_GLOO",
            str(SOURCE), "-o", str(made), f"-L{torch}/lib", "-lc10", "-ltorch_cpu",
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.replace(path)
    return path
