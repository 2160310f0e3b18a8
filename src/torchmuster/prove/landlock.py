"""Let this process and its children write only below some folders, by the kernel's Landlock.

Unlike an audit hook it also holds for native code and child processes. It needs no root, and Linux
5.19 or later (https://docs.kernel.org/userspace-api/landlock.html).
"""

import ctypes
import os
import platform
import struct
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls, on all architectures
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_NO_NEW_PRIVILEGES = 38
_LEAST_ABI = 2  # the first one that can allow renames between folders
_TRUNCATE_ABI = 3
_WRITE_FILE, _REMOVE_DIR, _TRUNCATE = 1 << 1, 1 << 4, 1 << 14
# From removing a folder to linking and renaming between folders: consecutive bits.
_CHANGE_FOLDERS = sum(1 << bit for bit in range(4, 14))


def is_available() -> bool:
    """Return whether this kernel can confine a process without root."""
    if platform.system() != "Linux":
        return False
    version = ctypes.CDLL(None, use_errno=True).syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    return bool(version >= _LEAST_ABI)


def allow_writes_only(folders: Iterable[str]) -> None:
    """Refuse writes outside of these folders with ``PermissionError``, until the process ends.

    Raises OSError if the kernel refuses to confine the process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = _called(libc.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG))
    rights = _WRITE_FILE | _CHANGE_FOLDERS
    if version >= _TRUNCATE_ABI:
        rights |= _TRUNCATE
    handled = struct.pack("=Q", rights)
    ruleset = _called(libc.syscall(_CREATE_RULESET, handled, len(handled), 0))
    for folder in folders:
        try:
            descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        allowed = rights
        if not Path(folder).is_dir():
            allowed &= _WRITE_FILE | _TRUNCATE
        rule = struct.pack("=Qi", allowed, descriptor)
        _called(libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0))
        os.close(descriptor)
    _called(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _called(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _called(result: int) -> int:
    """Return the result of a system call; raise its error."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
