"""Landlock: Linux keeps a thread, and all that it starts, from writing elsewhere and from
signalling others.

Nobody can leave such a fence, and code in C is inside it as well. Source: landlock(7) and the
kernel's userspace-api/landlock. ABI 2 added REFER, 3 TRUNCATE, 6 (Linux 6.12) signals.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Sequence

from ddp_course.running.linux import libc, prctl

CREATE_RULESET = 444  # The numbers of system calls are the same on all machines.
ADD_RULE = 445
RESTRICT_SELF = 446
ASK_VERSION = 1
PATH_BENEATH = 1
SCOPE_SIGNAL = 2
PR_SET_NO_NEW_PRIVS = 38
# The rights to change something, as the kernel names them, without LANDLOCK_ACCESS_FS_. To execute
# and read files, and to read folders, is free.
WRITE_FILE = 1 << 1
REMOVE_DIR = 1 << 4
REMOVE_FILE = 1 << 5
MAKE_CHAR = 1 << 6
MAKE_DIR = 1 << 7
MAKE_REG = 1 << 8
MAKE_SOCK = 1 << 9
MAKE_FIFO = 1 << 10
MAKE_BLOCK = 1 << 11
MAKE_SYM = 1 << 12
REFER = 1 << 13  # To link or move a file into another folder.
TRUNCATE = 1 << 14


def version() -> int:
    """The version of Landlock that this machine has; 0 if it has none."""
    if sys.platform != "linux":
        return 0
    return max(0, libc().syscall(CREATE_RULESET, 0, 0, ASK_VERSION))


def fence(paths: Sequence[str]) -> None:
    """From here on this thread, and all that it starts, can write to what is at or below
    `paths` only, and signal only processes that are inside the fence.

    Nothing happens where Landlock is missing. Raises OSError if the kernel refuses.
    """
    abi = version()
    if not abi:
        return
    writes = WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_CHAR | MAKE_DIR
    writes |= MAKE_REG | MAKE_SOCK | MAKE_FIFO | MAKE_BLOCK | MAKE_SYM
    # The kernel refuses a call with a right that it does not know, and takes zeros for it.
    if abi >= 2:
        writes |= REFER
    if abi >= 3:
        writes |= TRUNCATE
    scope = SCOPE_SIGNAL if abi >= 6 else 0
    attributes = struct.pack("QQQ", writes, 0, scope)
    rules = call(CREATE_RULESET, attributes, len(attributes), 0)
    for path in filter(os.path.exists, paths):
        rights = writes if os.path.isdir(path) else writes & (WRITE_FILE | TRUNCATE)
        beneath = os.open(path, os.O_PATH)
        call(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", rights, beneath), 0)
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
