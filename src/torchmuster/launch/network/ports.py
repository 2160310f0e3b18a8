"""Who holds a port of this machine."""

from pathlib import Path

import psutil

from torchmuster.devices.readers import sysfs
from torchmuster.redaction import printable

PROC = Path("/proc")
_UNKNOWN = "another user's program"
_COMMAND_SHOWN = 100
_LISTENS = "0A"  # the state of a socket in /proc/net/tcp


def holder_of(port: int, *, proc_root: Path = PROC) -> str | None:
    """Return who holds a TCP port, ``python train.py (pid 123, user ana)``; None if nobody does.

    Other people's processes cannot be looked at without being root; then at least the owner is told
    where the system tells it.
    """
    try:
        held = [one for one in psutil.net_connections("tcp") if one.laddr[1:] == (port,)]
    except (psutil.Error, OSError):  # macOS shows only one's own
        return _own_holder(port) or _UNKNOWN
    if not held:
        return None
    # One who waits for connections is the holder rather than one who was given one.
    held.sort(key=lambda one: (one.status != psutil.CONN_LISTEN, one.pid is None))
    if held[0].pid is not None:
        return _told(held[0].pid)
    owner = _owner(port, proc_root)
    return f"a program of user {owner}" if owner else _UNKNOWN


def _own_holder(port: int) -> str | None:
    for process in psutil.process_iter():
        try:
            mine = process.net_connections("tcp")
        except (psutil.Error, OSError):
            continue
        if any(one.laddr[1:] == (port,) and one.status == psutil.CONN_LISTEN for one in mine):
            return _told(process.pid)
    return None


def _told(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            command = _short(printable(process.cmdline() or [process.name()]))
            return f"{command} (pid {pid}, user {process.username()})"
    except (psutil.Error, OSError):
        return f"pid {pid}"


def _short(command: str) -> str:
    """Leave out the middle of a long command: a program's name is at one end, its job at the other."""
    half = _COMMAND_SHOWN // 2
    return command if len(command) <= 2 * half else f"{command[:half]} … {command[-half:]}"


def _owner(port: int, proc_root: Path) -> str | None:
    """Read the owner of a listening socket from the kernel's table, which all may read."""
    for table in ("net/tcp", "net/tcp6"):
        for line in (sysfs.text(proc_root / table) or "").splitlines()[1:]:
            fields = line.split()
            listens = len(fields) > 7 and fields[3] == _LISTENS
            if listens and int(fields[1].rpartition(":")[2], 16) == port:
                return _user_name(int(fields[7]))
    return None


def _user_name(uid: int) -> str:
    try:
        import pwd  # not on Windows
    except ImportError:
        return str(uid)
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
