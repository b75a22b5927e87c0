"""A Python that may make no network namespaces, as on many hubs.

Call it as `python denied.py -m MODULE`.
"""

import ctypes
import os
import sys
from pathlib import Path

NEW_USER_NAMESPACE = 0x10000000


def deny():
    """Forbid network namespaces to this process and its children, by a limit that the kernel keeps.

    Where no process may make one, this does nothing.
    """
    user = os.geteuid()
    group = os.getegid()
    if sys.platform != "linux" or ctypes.CDLL(None).unshare(NEW_USER_NAMESPACE):
        return
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    Path("/proc/sys/user/max_net_namespaces").write_text("0")


if __name__ == "__main__":
    deny()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
