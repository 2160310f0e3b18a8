"""Files that all users of a machine may lock: the kernel's ``flock``, and what stands in the file."""

import json
import os
from pathlib import Path

from torchmuster.errors import Impossible

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

AVAILABLE = fcntl is not None
_READ_ONLY = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_READ_WRITE = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def try_lock(file: int) -> bool:
    """Take the lock if nobody has it. It is dropped when the last copy of ``file`` is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_to_look(path: Path) -> int:
    """Open a file only to see whether it is locked and what it says."""
    return os.open(path, _READ_ONLY)


def open_own(path: Path) -> int:
    """Make a new file that only this user writes and everybody may read."""
    return os.open(path, _READ_WRITE | os.O_CREAT | os.O_EXCL, 0o644)


def open_shared(path: Path) -> int:
    """Open a file that all users may lock and write, making it if need be.

    Opening and making are two steps: in a folder like /tmp the kernel refuses O_CREAT on a file
    that belongs to somebody else (fs.protected_regular).
    """
    while True:
        try:
            return os.open(path, _READ_WRITE)
        except FileNotFoundError:
            try:
                made = os.open(path, _READ_WRITE | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                continue
            os.fchmod(made, 0o666)  # whatever the umask says
            return made
        except OSError as error:
            raise Impossible(
                f"GPUs cannot be claimed: {path} cannot be opened",
                why=str(error),
                fix=f"sudo rm {path}  # it is made anew with the right permissions",
            ) from error


def read_json(file: int) -> dict[str, object]:
    """Read what a file says. Anybody may have written it: anything but an object is nothing."""
    try:
        stored = json.loads(os.pread(file, 64 * 1024, 0))
    except ValueError:
        return {}
    return stored if isinstance(stored, dict) else {}


def write_json(file: int, values: dict[str, object]) -> None:
    """Replace what a file says."""
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(values).encode(), 0)
