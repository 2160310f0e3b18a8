"""Files that all users of a machine may lock: the kernel's ``flock``, and what stands in the file."""

import json
import os
import stat
from pathlib import Path

from torchmuster.errors import Impossible

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

AVAILABLE = fcntl is not None
# Others may have put anything there: links are not followed, a pipe is not waited for.
_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_READ_ONLY = os.O_RDONLY | _SAFELY
_READ_WRITE = os.O_RDWR | _SAFELY


def try_lock(file: int) -> bool:
    """Take the lock if nobody has it. It is dropped when the last copy of ``file`` is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def drop(file: int) -> None:
    """Drop the lock. Closing the file alone would leave it with a child forked in the meantime."""
    fcntl.flock(file, fcntl.LOCK_UN)


def open_to_look(path: Path) -> int:
    """Open a file only to see whether it is locked and what it says."""
    file = os.open(path, _READ_ONLY)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is not a file")
    return file


def open_own(path: Path) -> int:
    """Make a new file that only this user writes and everybody may read."""
    made = os.open(path, _READ_WRITE | os.O_CREAT | os.O_EXCL, 0o644)
    os.fchmod(made, 0o644)  # whatever the umask says
    return made


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
                why=error.strerror or str(error),
                fix="make it a plain file that all users may write, or let every user of this "
                "machine set TORCHMUSTER_CLAIMS_DIR to a local folder where that is so",
            ) from error


def read_json(file: int) -> dict[str, object]:
    """Read what a file says. Anybody may have written it: anything but an object is nothing."""
    try:
        stored = json.loads(os.pread(file, 64 * 1024, 0))
    except (ValueError, RecursionError, OSError):
        return {}
    return stored if isinstance(stored, dict) else {}


def write_json(file: int, values: dict[str, object]) -> None:
    """Replace what a file says."""
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(values).encode(), 0)
