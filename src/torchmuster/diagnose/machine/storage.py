"""Storage: the folder for runs and the folder for temporary files."""

import errno
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.finding import Finding, Status
from torchmuster.units import GiB, MiB, format_bytes

_BARELY_ANY_BYTES = 16 * MiB
_LITTLE_BYTES = GiB
_LITTLE_TEMPORARY_BYTES = 64 * MiB
_EVERYBODYS = ("/tmp", "/var/tmp")  # noqa: S108
_LOG = "sudo dmesg | tail  # shows disk errors"


def run_folder(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the folder for runs."""
    folder = surroundings.folder
    findings = list(_no_room(folder, "run-folder", _LITTLE_BYTES))
    yield from findings or [_fine("run-folder", folder)]


def temporary_folder(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the folder that torchrun, multiprocessing and torch.compile write to."""
    folder = Path(surroundings.environment.get("TMPDIR") or surroundings.path("/tmp"))  # noqa: S108
    findings = list(_no_room(folder, "temporary-folder", _LITTLE_TEMPORARY_BYTES))
    yield from findings or [_fine("temporary-folder", folder)]


def _fine(name: str, folder: Path) -> Finding:
    _, free = _room(_existing(folder))
    return Finding(
        name=name, status=Status.OK, what=f"{folder}: {format_bytes(free)} free, writable"
    )


def _existing(folder: Path) -> Path:
    """Return the folder or its nearest existing parent: missing folders will be created."""
    return next((item for item in (folder, *folder.parents) if item.exists()), folder)


def _trouble(folder: Path) -> OSError | None:
    """Return the error of a test write; permissions alone do not show it (root, NFS, quotas)."""
    try:
        with tempfile.TemporaryFile(dir=_existing(folder)) as stream:
            stream.write(b"\0" * 4096)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        return error
    return None


def _room(folder: Path) -> tuple[int, int]:
    """Return size and free bytes."""
    usage = shutil.disk_usage(folder)
    return usage.total, usage.free


def _no_room(folder: Path, name: str, little_bytes: int) -> Iterator[Finding]:
    existing = _existing(folder)
    trouble = _trouble(existing)
    total, free = _room(existing)
    quoted = shlex.quote(str(existing))
    full = trouble is not None and trouble.errno == errno.ENOSPC
    if trouble is not None and not full:
        yield _cannot_write(folder, name, trouble)
    elif full or free < little_bytes:
        yield Finding(
            name=f"{name}-full",
            status=Status.FAILURE if full or free < _BARELY_ANY_BYTES else Status.WARNING,
            what=f"the disk of {folder} is {'full' if full else 'nearly full'}: "
            f"{format_bytes(free)} of {format_bytes(total)} are free",
            why="writing logs and checkpoints fails with “No space left on device”, and a partly "
            "written checkpoint is lost",
            fix=f"du -xh --max-depth=2 {quoted} | sort -h | tail  # the largest folders",
            evidence=f"df -h {quoted}",
        )


def _cannot_write(folder: Path, name: str, trouble: OSError) -> Finding:
    kinds = {
        errno.EROFS: ("read-only", "its filesystem is mounted read-only"),
        errno.EDQUOT: ("quota", "your quota there is used up"),
    }
    word, why = kinds.get(
        trouble.errno or 0, ("not-writable", (trouble.strerror or str(trouble)).lower())
    )
    return Finding(
        name=f"{name}-{word}",
        status=Status.FAILURE,
        what=f"cannot write to {folder}",
        why=f"{why}; logs and checkpoints cannot be written" if name == "run-folder" else why,
        fix="\n".join(_ways_to_write(_existing(folder), name, trouble.errno)),
        evidence=str(trouble),
    )


def _ways_to_write(folder: Path, name: str, number: int | None) -> Iterator[str]:
    """Yield the commands, least invasive first; none changes the folder's owner."""
    quoted = shlex.quote(str(folder))
    everybodys = str(folder) in _EVERYBODYS
    if number in (errno.EROFS, errno.EIO, errno.ESTALE):
        yield _LOG
    elif number == errno.EDQUOT:
        yield "quota -s  # your limits"
        yield f"du -xh --max-depth=2 {quoted} | sort -h | tail"
    elif number in (errno.EACCES, errno.EPERM) and everybodys:
        yield f"sudo chmod 1777 {quoted}  # the standard permissions"
    if name == "run-folder":
        yield "mkdir -p ~/runs  # or any folder you can write to"
        yield "muster run --runs ~/runs …"
    else:
        yield f"export TMPDIR={'/tmp' if str(folder) == '/var/tmp' else '/var/tmp'}"  # noqa: S108
    if number == errno.EROFS:
        # A filesystem that the kernel remounted read-only after an error is damaged by writes.
        yield f'sudo mount -o remount,rw "$(stat -c %m {quoted})"  # only if the log shows no error'


CHECKS = (
    Check(
        name="run-folder",
        asks="Is the folder for runs writable, with enough free space?",
        run=run_folder,
    ),
    Check(
        name="temporary-folder",
        asks="Can temporary files be written?",
        run=temporary_folder,
        systems=("linux", "darwin"),
    ),
)
