"""Landlock: Linux keeps a thread, and all that it starts, from writing elsewhere and from
signalling others.

Nobody can leave such a fence, and code in C is inside it as well. Source: landlock(7) and the
kernel's userspace-api/landlock. ABI 2 added REFER, 3 TRUNCATE, 6 (Linux 6.12) signals.
"""

import ctypes
import os
import stat
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
WRITE_FILE = 1 << 1
REFER = 1 << 13
TRUNCATE = 1 << 14
REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
SINCE = {REFER: 2, TRUNCATE: 3}  # Older kernels refuse a whole call that has one of these.


def version() -> int:
    """The version of Landlock that this machine has; 0 if it has none."""
    if sys.platform != "linux":
        return 0
    return max(0, libc().syscall(CREATE_RULESET, 0, 0, ASK_VERSION))


def fence(folders: Sequence[str], devices: Sequence[str] = ()) -> None:
    """From here on this thread, and all that it starts, can write below `folders` and to `devices`
    only, and signal only processes that are inside the fence.

    Nothing happens where Landlock is missing. Raises OSError if the kernel refuses.
    """
    abi = version()
    if not abi:
        return
    writes = WRITE_FILE | REMOVE_AND_MAKE
    for right, since in SINCE.items():
        writes |= right if abi >= since else 0
    attributes = (
        struct.pack("QQQ", writes, 0, SCOPE_SIGNAL) if abi >= 6 else struct.pack("Q", writes)
    )
    rules = call(CREATE_RULESET, attributes, len(attributes), 0)
    for path in filter(os.path.exists, [*folders, *devices]):
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
        rights = writes if is_folder else writes & (WRITE_FILE | TRUNCATE)
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
        raise OSError(ctypes.get_errno(), f"landlock: {os.strerror(ctypes.get_errno())}")
    return result
