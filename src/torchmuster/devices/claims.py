"""Claims: one user at a time per device, by a kernel lock that ends with its process.

A claim is a file in a folder that all users of the host share. The process that created the file
holds its ``flock``; the kernel drops the lock when the last copy of the descriptor is closed, for
any reason. A file without a lock is left over from a process that was killed, and counts for nothing.

- A file gets its name when it is already locked, so nobody sees a claim without its lock.
- A file belongs to who created it, and only that user may write it. Whose claim it is follows from
  the owner on disk, never from the text in the file.
- Claims are made under one more lock, the gate, on the folder itself, which is held only briefly. Reading takes neither
  the gate nor an exclusive lock, so it cannot make a claim fail.

The program that runs under a claim gets the id of the claim in ``TORCHMUSTER_CLAIM``. The claim does
not block that program, so a pick inside a claim can take the claimed devices again. The id is not a
secret: it counts only for processes of the user who owns the claim.

Claims bind only programs that use them. GPUs that are used without a claim show as in use. Whoever
creates the folder may delete files in it; on a host whose users do not trust each other, root
creates it: ``install -d -m 1777 /run/lock/torchmuster{,/claims,/queue}``.
"""

import errno
import json
import os
import random
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from torchmuster import untrusted
from torchmuster.devices.processes import user_with_uid
from torchmuster.devices.request import Claim
from torchmuster.errors import Impossible, NotNow
from torchmuster.redaction import printable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

AVAILABLE = fcntl is not None
# Holds the ids of the claims that a program runs under, outermost first.
CLAIM_VARIABLE = "TORCHMUSTER_CLAIM"
_GATE_WITHIN_S = 10.0
_LARGEST_FILE_BYTES = 64 * 1024
# Other users may have put anything there: do not follow links, do not block on a pipe.
_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


@dataclass(frozen=True, kw_only=True)
class LivingFile:
    """A file whose creator holds its lock. ``values`` is empty if the content cannot be read."""

    name: str
    uid: int
    modified_unix_s: float
    values: Mapping[str, object]


class OwnFile:
    """A file that this process has created and locked, for all users to read."""

    def __init__(self, path: Path, values: Mapping[str, object]) -> None:
        """Create the file; raise Impossible if it cannot be created or locked."""
        self.path = path
        try:
            self.descriptor = self._create(values)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def _create(self, values: Mapping[str, object]) -> int:
        unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY, 0o644)
        try:
            os.fchmod(descriptor, 0o644)  # whatever the umask says
            os.pwrite(descriptor, json.dumps(values).encode(), 0)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unfinished.rename(self.path)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            os.close(descriptor)
            raise
        return descriptor

    def release(self) -> None:
        """Delete the file and drop its lock; safe to call twice."""
        if self.descriptor < 0:
            return
        with suppress(OSError):
            self.path.unlink()
        # Closing alone would leave the lock with a child that was forked meanwhile.
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        os.close(self.descriptor)
        self.descriptor = -1


def living_files(folder: Path) -> list[LivingFile]:
    """Return the files of a folder whose creators hold their locks, by name.

    A lock is tested with a shared lock: that never hinders another reader, and no process ever
    locks a file that has its name already.
    """
    living = []
    for path in _paths_in(folder):
        if path.name.startswith("."):  # not finished yet
            continue
        file = _living_file(path)
        if file is not None:
            living.append(file)
    return living


def _paths_in(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _living_file(path: Path) -> LivingFile | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | _SAFELY)
    except OSError as error:
        if error.errno in (
            errno.ENOENT,
            errno.ELOOP,
            errno.ENXIO,
        ):  # already deleted, a link, a socket
            return None
        # Its owner hides it, or this process has no descriptor left: it counts as locked.
        return _unreadable_file(path)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_locked(descriptor):
            return None
        return LivingFile(
            name=path.name,
            uid=status.st_uid,
            modified_unix_s=status.st_mtime,
            values=_read_json(descriptor),
        )
    finally:
        os.close(descriptor)


def _unreadable_file(path: Path) -> LivingFile | None:
    """Return a file whose lock cannot be tested."""
    try:
        status = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return LivingFile(name=path.name, uid=status.st_uid, modified_unix_s=status.st_mtime, values={})


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _read_json(descriptor: int) -> dict[str, object]:
    try:
        stored = untrusted.parse_json(os.pread(descriptor, _LARGEST_FILE_BYTES, 0))
    except (untrusted.Unreadable, OSError):
        return {}
    return stored if isinstance(stored, dict) else {}


def claims_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder that all users of this host share for claims.

    It must be the same for all users, so it depends on the host and not on the user.
    """
    if chosen := environment.get("TORCHMUSTER_CLAIMS_DIR"):
        return Path(chosen)
    system = Path("/run/lock")
    try:
        open_to_all = bool(system.stat().st_mode & stat.S_IWOTH)
    except OSError:
        open_to_all = False
    shared = system if open_to_all else Path("/tmp")  # noqa: S108  # shared on purpose
    return shared / "torchmuster"


class _Content(msgspec.Struct, frozen=True, kw_only=True):
    """The text in the file of a claim."""

    pid: int = 0
    command: str = "unknown command"
    since_unix_s: Annotated[float, msgspec.Meta(ge=0, lt=1e12)] = 0.0


@dataclass(frozen=True, kw_only=True)
class ClaimsTable:
    """Who holds which device, and which of these claims block this process."""

    claimed: dict[str, Claim]
    blocking: dict[str, Claim]


class Claims:
    """The claims of one host, kept in one folder, as seen by a program under the claims ``ids``."""

    def __init__(self, folder: Path, ids: Sequence[str] = ()) -> None:
        self.folder = folder
        self.ids = tuple(ids)

    @classmethod
    def here(cls, environment: Mapping[str, str]) -> "Claims":
        """Return the claims of this host, under those that this process was started under."""
        ids = environment.get(CLAIM_VARIABLE, "").split(",")
        return cls(claims_folder(environment), [claim_id for claim_id in ids if claim_id])

    @property
    def queue(self) -> Path:
        """The folder with the tickets of waiting processes."""
        return self.folder / "queue"

    @property
    def _files(self) -> Path:
        return self.folder / "claims"

    def read(self, uuids: Iterable[str]) -> ClaimsTable:
        """Read the claims; creates nothing, takes no lock that others notice, never waits.

        A device that is claimed inside a claim again shows the first of its claims.
        """
        table = ClaimsTable(claimed={}, blocking={})
        if not AVAILABLE or not _is_folder(self.folder):
            return table
        devices = {_device_name(uuid): uuid for uuid in uuids}
        for file in living_files(self._files):
            device, _, claim_id = file.name.partition(".")
            uuid = devices.get(device)
            if uuid is None:
                continue
            claim = _claim_in(file)
            first = table.claimed.get(uuid)
            if first is None or claim.since_unix_s < first.since_unix_s:
                table.claimed[uuid] = claim
            if not self._runs_under(claim_id, file.uid):
                table.blocking[uuid] = claim
        return table

    def _runs_under(self, claim_id: str, uid: int) -> bool:
        return claim_id in self.ids and os.geteuid() in (uid, 0)

    def remove_left_over(self) -> None:
        """Delete the files of killed processes, under the gate; in a sticky folder only one's own."""
        for folder in (self._files, self.queue):
            for path in _paths_in(folder):
                if _living_file(path) is None:
                    with suppress(OSError):
                        path.unlink()

    def take(self, uuid: str, claim_id: str, command: str) -> OwnFile:
        """Claim a device that no claim blocks, under the gate. ``command`` is shown to all users."""
        path = self._files / f"{_device_name(uuid)}.{claim_id}"
        values = {"pid": os.getpid(), "command": command, "since_unix_s": time.time()}
        return OwnFile(path, values)

    @contextmanager
    def gate(self, *, deadline: float = 0.0) -> Iterator[None]:
        """Hold the lock under which claims are made.

        Raises :class:`NotNow` after 10 s. A caller that waits for devices until a ``deadline``
        (``time.monotonic()``) waits as long for the gate, which takes long on a busy host.
        """
        if not AVAILABLE:
            raise Impossible(
                "GPUs cannot be claimed on this operating system",
                why="claims need flock, which Windows does not have",
                fix="run muster gpus pick without a command and without --wait, which claims nothing",
            )
        self._make_folders()
        gate = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | _SAFELY)
        began = time.monotonic()
        deadline = max(began + _GATE_WITHIN_S, deadline)
        try:
            while not _lock_gate(gate):
                if time.monotonic() > deadline:
                    raise NotNow(
                        f"cannot read the claims in {self.folder}",
                        why=f"another process has held the lock on them for {deadline - began:.0f} s; "
                        "that process may be stopped",
                        fix=f"sudo lslocks | grep {self.folder}  # shows the process",
                    )
                time.sleep(random.uniform(0.001, 0.005))
            yield
        finally:
            fcntl.flock(gate, fcntl.LOCK_UN)
            os.close(gate)

    def _make_folders(self) -> None:
        for path in (self.folder, self._files, self.queue):
            try:
                path.mkdir(parents=True)
                path.chmod(0o1777)  # for all users; each may delete only their own files
            except FileExistsError as error:
                if not _is_folder(path):
                    raise _cannot_write(path, error) from error
            except OSError as error:
                raise _cannot_write(path, error) from error


def _lock_gate(gate: int) -> bool:
    try:
        fcntl.flock(gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _cannot_write(path: Path, error: OSError) -> Impossible:
    return Impossible(
        f"GPUs cannot be claimed: {path} cannot be created",
        why=error.strerror or str(error),
        fix="set TORCHMUSTER_CLAIMS_DIR, for every user of this host, to the same local folder, "
        "to which all users can write",
    )


def _is_folder(path: Path) -> bool:
    """Return whether a path is a folder, and no link: that may lead to a folder of someone else."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _device_name(uuid: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]", "_", uuid)


def _claim_in(file: LivingFile) -> Claim:
    """Return the claim in a file: another user has written it, so its text is checked and cleaned."""
    try:
        content = msgspec.convert(file.values, _Content)
    except msgspec.ValidationError:
        content = _Content()
    return Claim(
        pid=content.pid,
        user=user_with_uid(file.uid),
        command=printable([content.command]),
        since_unix_s=content.since_unix_s,
    )
