"""Landlock: Linux keeps a thread, and all that it starts, inside a fence.

From inside the fence nothing writes elsewhere or signals other processes. Nobody can leave it, and
code in C is inside it as well. Source: landlock(7) and the kernel's userspace-api/landlock. ABI 2
added REFER, 3 TRUNCATE, 6 (Linux 6.12) signals.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Sequence
from enum import IntFlag

from manyranks.linux import libc, prctl

# The numbers of these system calls are the same on all machines.
CREATE_RULESET = 444
ADD_RULE = 445
RESTRICT_SELF = 446
# These are the kernel's flags of the calls.
ASK_VERSION = 1
PATH_BENEATH = 1
SCOPE_SIGNAL = 2
PR_SET_NO_NEW_PRIVS = 38
# The rights, in the order of their bits, have the kernel's names without LANDLOCK_ACCESS_FS_. With
# REFER a file may be moved or linked into another folder.
Right = IntFlag(
    "Right",
    "EXECUTE WRITE_FILE READ_FILE READ_DIR REMOVE_DIR REMOVE_FILE MAKE_CHAR MAKE_DIR MAKE_REG"
    " MAKE_SOCK MAKE_FIFO MAKE_BLOCK MAKE_SYM REFER TRUNCATE",
)


def version() -> int:
    """Return the version of Landlock that this machine has; 0 if it has none."""
    if sys.platform != "linux":
        return 0
    return max(0, libc().syscall(CREATE_RULESET, 0, 0, ASK_VERSION))


def fence(paths: Sequence[str]) -> None:
    """Let this thread, and all that it starts, write only at or below `paths`.

    They can signal only processes that are inside the fence. Nothing happens where Landlock is
    missing. Raises OSError if the kernel refuses.
    """
    abi = version()
    if not abi:
        return
    # To execute and to read stays free.
    rights = set(Right) - {Right.EXECUTE, Right.READ_FILE, Right.READ_DIR}
    # An older kernel refuses a call with a right or a scope that it does not know.
    if abi < 2:
        rights.remove(Right.REFER)
    if abi < 3:
        rights.remove(Right.TRUNCATE)
    writes = sum(rights)
    scope = SCOPE_SIGNAL if abi >= 6 else 0
    attributes = struct.pack("QQQ", writes, 0, scope)
    rules = call(CREATE_RULESET, attributes, len(attributes), 0)
    for path in filter(os.path.exists, paths):
        allowed = writes if os.path.isdir(path) else writes & (Right.WRITE_FILE | Right.TRUNCATE)
        beneath = os.open(path, os.O_PATH)
        call(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", allowed, beneath), 0)
        os.close(beneath)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    call(RESTRICT_SELF, rules, 0)
    os.close(rules)


def call(number: int, *arguments: object) -> int:
    """Make a system call; raises OSError if it fails."""
    result = libc().syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "Landlock refuses")
    return result
