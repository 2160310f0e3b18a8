"""Shared memory: /dev/shm, through which DataLoader workers, gloo and NCCL exchange data."""

import os
import re
import shlex
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.finding import Finding, Status
from torchmuster.units import MiB, format_bytes

FOLDER = "/dev/shm"  # noqa: S108
# The default of Docker, Podman and Kubernetes; bare-metal hosts have gigabytes.
_CONTAINER_DEFAULT_BYTES = 64 * MiB
_BARELY_ANY_BYTES = MiB
# A younger file may still be in use by its creator.
_STALE_AFTER_S = 60.0
# Left behind by torch, OpenMP and CUDA, with the process id in the name. Files of Python and NCCL
# do not name their process.
_LEFTOVER = re.compile(
    r"torch_(\d+)_.*|__KMP_REGISTERED_LIB_(\d+).*|cuda\.shm\.\w+\.([0-9a-f]+)\..*"
)
# The initial PID namespace. A container that shares /dev/shm but not the PID namespace would
# mistake files in use for leftovers.
_ALL_PROCESSES = "pid:[4026531836]"
_FILES_SHOWN = 5

_LARGER = """docker run --shm-size=8g …  # or --ipc=host
shm_size: 8gb  # in a Docker Compose file, under the service
volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}]  # Kubernetes, mounted at /dev/shm
sudo mount -o remount,size=90% /dev/shm  # outside containers"""


@dataclass(frozen=True, kw_only=True)
class _Leftover:
    """A file whose creator has exited and that no process has open."""

    path: str
    size_bytes: int
    uid: int


def check_shared_memory(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the size and free space of /dev/shm, and files left there by dead processes."""
    try:
        room = os.statvfs(surroundings.path(FOLDER))
    except OSError:
        yield _missing()
        return
    total, free = room.f_frsize * room.f_blocks, room.f_frsize * room.f_bavail
    seen = f"{format_bytes(total)} at {FOLDER}, {format_bytes(free)} of it free"
    leftovers = _leftovers(surroundings)
    findings = list(_findings(total, free, seen, leftovers))
    if not findings:
        findings.append(Finding(name="shared-memory", status=Status.OK, what=seen))
    yield from findings


def _findings(
    total: int, free: int, seen: str, leftovers: Sequence[_Leftover]
) -> Iterator[Finding]:
    small = total <= _CONTAINER_DEFAULT_BYTES
    if small:
        yield Finding(
            name="shared-memory-small",
            status=Status.WARNING,
            what=f"{FOLDER} has only {format_bytes(total)}",
            why="this is the default of a container. One batch of 64 images takes 37 MiB, and "
            "each DataLoader worker holds two. Workers and NCCL fail with “Bus error” or “unable "
            "to allocate shared memory”",
            fix=_LARGER,
            evidence=seen,
        )
    wasted = sum(one.size_bytes for one in leftovers)
    if free < (_BARELY_ANY_BYTES if small else _CONTAINER_DEFAULT_BYTES):
        yield Finding(
            name="shared-memory-full",
            status=Status.FAILURE if free < _BARELY_ANY_BYTES else Status.WARNING,
            what=f"{FOLDER} is full: {format_bytes(free)} of {format_bytes(total)} are free",
            why="DataLoader workers and NCCL allocate buffers in it and fail with “Bus error” or "
            "“No space left on device”" + (f"; {_message(leftovers)}" if leftovers else ""),
            fix=_removal(leftovers)
            or f"ls -lS {FOLDER} | head  # the largest files and their owners",
            evidence=seen,
        )
    elif wasted > _CONTAINER_DEFAULT_BYTES:
        yield Finding(
            name="shared-memory-stale",
            status=Status.NOTE,
            what=f"{format_bytes(wasted)} of {FOLDER} are taken by unused files",
            why=_message(leftovers),
            fix=_removal(leftovers),
            evidence=seen,
        )


def _missing() -> Finding:
    return Finding(
        name="shared-memory-missing",
        status=Status.FAILURE,
        what=f"{FOLDER} does not exist",
        why="DataLoader workers, gloo and NCCL exchange data through it and cannot start",
        fix=f"sudo mkdir -p {FOLDER} && sudo mount -t tmpfs -o size=50%,mode=1777 tmpfs {FOLDER}",
    )


def _message(leftovers: Sequence[_Leftover]) -> str:
    owners = sorted({one.uid for one in leftovers})
    wasted = format_bytes(sum(one.size_bytes for one in leftovers))
    files = "1 file is" if len(leftovers) == 1 else f"{len(leftovers)} files are"
    users = ", ".join(str(uid) for uid in owners)
    return f"{files} left over from processes that exited ({wasted}, user id {users})"


def _removal(leftovers: Sequence[_Leftover]) -> str:
    largest = sorted(leftovers, key=lambda one: -one.size_bytes)[:_FILES_SHOWN]
    return shlex.join(["rm", *(one.path for one in largest)]) if largest else ""


def _leftovers(surroundings: Surroundings) -> list[_Leftover]:
    """Return the leftover files of this user; as root, those of all users."""
    proc = surroundings.path("/proc")
    if not _sees_all_processes(proc):
        return []
    candidates = list(_candidates(surroundings.path(FOLDER), proc))
    if not candidates:
        return []
    in_use = _in_use(proc)
    return [
        _Leftover(path=f"{FOLDER}/{name}", size_bytes=status.st_blocks * 512, uid=status.st_uid)
        for name, status in candidates
        if f"{FOLDER}/{name}" not in in_use
    ]


def _sees_all_processes(proc: Path) -> bool:
    try:
        return os.readlink(proc / "self/ns/pid") == _ALL_PROCESSES  # noqa: PTH115
    except OSError:
        return False


def _maker(name: str) -> int | None:
    """Return the id of the process that created a file, from its name; None if it has none."""
    match = _LEFTOVER.fullmatch(name)
    if match is None:
        return None
    torch, openmp, cuda = match.groups()
    return int(torch or openmp) if torch or openmp else int(cuda, 16)


def _candidates(folder: Path, proc: Path) -> Iterator[tuple[str, os.stat_result]]:
    everybodys = os.geteuid() == 0
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208
    except OSError:
        return
    for name in names:
        try:
            status = (folder / name).lstat()
        except OSError:
            continue
        mine = everybodys or status.st_uid == os.geteuid()
        old = time.time() - status.st_mtime > _STALE_AFTER_S
        maker = _maker(name)
        ended = maker is not None and not (proc / str(maker)).exists()
        if mine and old and ended and stat.S_ISREG(status.st_mode):
            yield name, status


def _in_use(proc: Path) -> set[str]:
    """Return the files in /dev/shm that visible processes have mapped or open."""
    found: set[str] = set()
    for process in proc.glob("[0-9]*"):
        try:
            mapped = (process / "maps").read_text(encoding="utf-8", errors="replace")
            found.update(
                f"{FOLDER}{rest}" for rest in re.findall(rf" {FOLDER}(/.*)$", mapped, re.M)
            )
            found.update(_open(process / "fd"))
        except OSError:
            continue  # it has exited, or belongs to another user
    return found


def _open(folder: Path) -> Iterable[str]:
    for link in folder.iterdir():
        try:
            yield os.readlink(link)  # noqa: PTH115
        except OSError:
            continue


CHECKS = (
    Check(
        name="shared-memory",
        asks="Is there enough free space in /dev/shm?",
        run=check_shared_memory,
        systems=("linux",),
    ),
)
