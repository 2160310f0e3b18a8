"""Storage: the folder for runs, the folder for temporary files, and the folders of caches."""

import errno
import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torchmuster.diagnose.check import Check, Cost, Surroundings
from torchmuster.diagnose.machine import disk_speed
from torchmuster.diagnose.machine.mounts import Mount, mount_of
from torchmuster.finding import Finding, Status
from torchmuster.units import GiB, MiB, format_bytes

_BARELY_ANY_BYTES = 16 * MiB
_LITTLE_BYTES = GiB
_LITTLE_TEMPORARY_BYTES = 64 * MiB
_FEW_FILES = 1000
# Over these every small write goes through a network or through another system.
_FAR_AWAY = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "drvfs",
    "fuse.sshfs",
    "fuse.s3fs",
    "fuse.gcsfuse",
)
# A socket's path has at most 107 characters, and multiprocessing adds /pymp-12345678/listener-12345678.
_LONGEST_TEMPORARY = 107 - 33
_EVERYBODYS = ("/tmp", "/var/tmp")  # noqa: S108
_LOG = "sudo dmesg | tail  # whether the kernel met an error of the disk"
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME")


def run_folder(surroundings: Surroundings) -> Iterator[Finding]:
    """Look at the folder below which runs are written."""
    folder = surroundings.folder
    mount = mount_of(folder, surroundings)
    findings = list(_no_room(folder, "run-folder", _LITTLE_BYTES))
    if not findings and mount and mount.kind in _FAR_AWAY:
        findings.append(_far_away(folder, mount))
    yield from findings or [_fine("run-folder", folder, mount)]


def temporary_folder(surroundings: Surroundings) -> Iterator[Finding]:
    """Look at the folder that torchrun, multiprocessing and torch.compile write to."""
    folder = Path(surroundings.environment.get("TMPDIR") or surroundings.path("/tmp"))  # noqa: S108
    mount = mount_of(folder, surroundings)
    findings = list(_no_room(folder, "temporary-folder", _LITTLE_TEMPORARY_BYTES))
    if mount and "noexec" in mount.options and not _compiles_elsewhere(surroundings):
        findings.append(_no_programs(folder, mount))
    if len(str(folder)) > _LONGEST_TEMPORARY:
        findings.append(_long_name(folder))
    yield from findings or [_fine("temporary-folder", folder, mount)]


def cache_folders(surroundings: Surroundings) -> Iterator[Finding]:
    """Look at the folders in which compiled kernels and downloaded models are kept."""
    chosen = {
        name: Path(value).expanduser()
        for name in CACHES
        if (value := surroundings.environment.get(name))
    }
    home = surroundings.environment.get("HOME")
    if home and not {"TRITON_CACHE_DIR", "HF_HOME"} <= chosen.keys():
        chosen["HOME"] = Path(home)
    findings = [
        _unwritable_cache(name, folder, trouble)
        for name, folder in chosen.items()
        if (trouble := _trouble(folder)) is not None
    ]
    seen = ", ".join(f"{name} {folder}" for name, folder in chosen.items()) or "the usual ones"
    yield from findings or [Finding(name="cache-folders", status=Status.OK, what=seen)]


def _fine(name: str, folder: Path, mount: Mount | None) -> Finding:
    _, free, _ = _room(_existing(folder))
    kind = f", {mount.kind}" if mount else ""
    return Finding(
        name=name, status=Status.OK, what=f"{folder}: {format_bytes(free)} free{kind}, writable"
    )


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest above it that exists: the others will be made."""
    return next((one for one in (folder, *folder.parents) if one.exists()), folder)


def _trouble(folder: Path) -> OSError | None:
    """Try to write a little there: permissions alone do not tell (root, NFS, quotas)."""
    try:
        with tempfile.TemporaryFile(dir=_existing(folder)) as stream:
            stream.write(b"\0" * 4096)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        return error
    return None


def _room(folder: Path) -> tuple[int, int, int | None]:
    """Return size, free bytes and free files; None where the filesystem does not count files."""
    if not hasattr(os, "statvfs"):
        import shutil

        usage = shutil.disk_usage(folder)
        return usage.total, usage.free, None
    found = os.statvfs(folder)
    files = found.f_favail if found.f_files else None
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail, files


def _no_room(folder: Path, name: str, little_bytes: int) -> Iterator[Finding]:
    existing = _existing(folder)
    trouble = _trouble(existing)
    total, free, files = _room(existing)
    quoted = shlex.quote(str(existing))
    full = trouble is not None and trouble.errno == errno.ENOSPC
    if trouble is not None and not full:
        yield _cannot_write(folder, name, trouble)
    elif files == 0 or (files is not None and files < _FEW_FILES and free >= _BARELY_ANY_BYTES):
        yield Finding(
            name=f"{name}-no-inodes",
            status=Status.FAILURE if full or files == 0 else Status.WARNING,
            what=f"the filesystem of {folder} can hold only {files or 0:,} more files",
            why="it has room for bytes but not for files: every new one ends with “No space left on device”",
            fix=f"sudo du --inodes -xS {quoted} | sort -n | tail  # where the many files are",
            evidence=f"df -i {quoted}",
        )
    elif full or free < little_bytes:
        yield Finding(
            name=f"{name}-full",
            status=Status.FAILURE if full or free < _BARELY_ANY_BYTES else Status.WARNING,
            what=f"the disk of {folder} is {'full' if full else 'nearly full'}: "
            f"{format_bytes(free)} of {format_bytes(total)} are free",
            why="logs and checkpoints end with “No space left on device”, and a checkpoint that was "
            "written half is lost",
            fix=f"du -xh --max-depth=2 {quoted} | sort -h | tail  # what takes the room",
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
        what=f"nothing can be written to {folder}",
        why=f"{why}; logs and checkpoints have no place" if name == "run-folder" else why,
        fix="\n".join(_ways_to_write(_existing(folder), name, trouble.errno)),
        evidence=str(trouble),
    )


def _ways_to_write(folder: Path, name: str, number: int | None) -> Iterator[str]:
    """Give the steps in the order in which they do least harm: whose folder it is stays as it is."""
    quoted = shlex.quote(str(folder))
    everybodys = str(folder) in _EVERYBODYS
    if number in (errno.EROFS, errno.EIO, errno.ESTALE):
        yield _LOG
    elif number == errno.EDQUOT:
        yield "quota -s  # how much you may use"
        yield f"du -xh --max-depth=2 {quoted} | sort -h | tail"
    elif number in (errno.EACCES, errno.EPERM) and everybodys:
        yield f"sudo chmod 1777 {quoted}  # as it is meant to be"
    if name == "run-folder":
        yield "mkdir -p ~/runs  # or wherever you may write"
        yield "muster run --runs ~/runs …"
    else:
        yield f"export TMPDIR={'/tmp' if str(folder) == '/var/tmp' else '/var/tmp'}"  # noqa: S108
    if number == errno.EROFS:
        # What the kernel made read-only after an error is damaged further by writing.
        yield f'sudo mount -o remount,rw "$(stat -c %m {quoted})"  # only if the log shows no error'


def _far_away(folder: Path, mount: Mount) -> Finding:
    return Finding(
        name="run-folder-far",
        status=Status.NOTE,
        what=f"{folder} is on {mount.kind} ({mount.source})",
        why="every rank's log and checkpoint goes over it; if it stalls, so does training",
        fix="muster doctor --deep  # measures how fast it is",
    )


def _compiles_elsewhere(surroundings: Surroundings) -> bool:
    return bool(surroundings.environment.get("TORCHINDUCTOR_CACHE_DIR"))


def _no_programs(folder: Path, mount: Mount) -> Finding:
    return Finding(
        name="temporary-folder-noexec",
        status=Status.WARNING,
        what=f"programs in {folder} may not be run (noexec)",
        why="torch.compile and Triton put compiled code there and load it, and end with “failed to map "
        "segment from shared object”",
        fix="export TORCHINDUCTOR_CACHE_DIR=$HOME/.cache/torchinductor\n"
        f"sudo mount -o remount,exec {shlex.quote(mount.folder)}  # or allow it",
        evidence=f"{mount.folder}: {','.join(mount.options)}",
    )


def _long_name(folder: Path) -> Finding:
    return Finding(
        name="temporary-folder-long",
        status=Status.WARNING,
        what=f"the path of the temporary folder has {len(str(folder))} characters",
        why="DataLoader workers make sockets below it, whose paths may have 107; they end with “AF_UNIX "
        "path too long”",
        fix="export TMPDIR=/tmp",
        evidence=f"TMPDIR={folder}",
    )


def _unwritable_cache(name: str, folder: Path, trouble: OSError) -> Finding:
    kept = "Triton, Hugging Face and others keep" if name == "HOME" else "it keeps"
    return Finding(
        name="cache-not-writable",
        status=Status.WARNING,
        what=f"nothing can be written to {folder} ({name})",
        why=f"{kept} compiled kernels or downloaded models there and would end with "
        f"“{trouble.strerror or trouble}”",
        fix=f"export {name}=/tmp/{name.lower()} && mkdir -p /tmp/{name.lower()}  # or another of yours",
        evidence=str(trouble),
    )


CHECKS = (
    Check(
        name="run-folder",
        asks="Is there room for runs, and may they be written?",
        run=run_folder,
    ),
    Check(
        name="temporary-folder",
        asks="Can temporary files, sockets and compiled code be written?",
        run=temporary_folder,
        systems=("linux", "darwin"),
    ),
    Check(
        name="cache-folders",
        asks="Can compiled kernels and downloaded models be kept?",
        run=cache_folders,
    ),
    Check(
        name="disk-speed",
        asks="Is the disk below the run folder fast enough for logs and checkpoints?",
        run=disk_speed.run,
        cost=Cost.SECONDS,
        deadline_s=30.0,
    ),
)
