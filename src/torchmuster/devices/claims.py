"""Claims: one user at a time per device, by a kernel lock that cannot become stale.

Each device has a file in a folder that all users of the host share; the process that holds its
``flock`` has the device. The kernel drops the lock when the last process that inherited it exits,
for any reason. Taking devices and reading the claims happen under one more lock, the gate, which is
held only briefly.

A claim has a token, which is passed to the program that runs under it. Inside that program the
claimed devices can be claimed again, each by a further file of that token, so picks within a claim
do not collide.

Claims bind only programs that use them. GPUs that are used without a claim show as in use.
"""

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

from torchmuster import untrusted
from torchmuster.devices.processes import user_of_this_process
from torchmuster.devices.request import Claim
from torchmuster.errors import Impossible, MusterError, NotNow
from torchmuster.redaction import printable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

AVAILABLE = fcntl is not None
# Other users may have put anything there: do not follow links, do not block on a pipe.
_SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_READ_ONLY = os.O_RDONLY | _SAFELY
_READ_WRITE = os.O_RDWR | _SAFELY


def try_lock(file: int) -> bool:
    """Take the lock if it is free. It is dropped when the last copy of ``file`` is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def drop_lock(file: int) -> None:
    """Drop the lock. Closing the file alone would leave it with a child forked meanwhile."""
    fcntl.flock(file, fcntl.LOCK_UN)


def open_to_look(path: Path) -> int:
    """Open a file read-only, to see whether it is locked and what it contains."""
    file = os.open(path, _READ_ONLY)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is not a regular file")
    return file


def open_own(path: Path) -> int:
    """Create a file that only this user may write and all users may read."""
    made = os.open(path, _READ_WRITE | os.O_CREAT | os.O_EXCL, 0o644)
    os.fchmod(made, 0o644)  # whatever the umask says
    return made


def open_shared(path: Path) -> int:
    """Open a file that all users may lock and write; create it if it is missing.

    Opening and creating are two steps: in a folder like /tmp the kernel refuses O_CREAT on a file
    that belongs to another user (fs.protected_regular).
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
                fix="make it a regular file that all users may write, or set "
                "TORCHMUSTER_CLAIMS_DIR, for every user of this host, to another local folder",
            ) from error


def read_json(file: int) -> dict[str, object]:
    """Read a JSON object from a file that any user may have written; else return an empty one."""
    try:
        stored = untrusted.parse_json(os.pread(file, 64 * 1024, 0))
    except (untrusted.Unreadable, OSError):
        return {}
    return stored if isinstance(stored, dict) else {}


def write_json(file: int, values: dict[str, object]) -> None:
    """Replace a file's content."""
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(values).encode(), 0)


# Holds the tokens of the claims that a program runs under, outermost first.
TOKEN_VARIABLE = "TORCHMUSTER_CLAIM"  # noqa: S105
_GATE_PATIENCE_S = 10.0
_GLANCE_PATIENCE_S = 1.0


def claims_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder that all users of this host share for claims.

    It must be the same for all users, so it depends on the host and not on the user.
    """
    if given := environment.get("TORCHMUSTER_CLAIMS_DIR"):
        return Path(given)
    system = Path("/run/lock")
    try:
        open_to_all = bool(system.stat().st_mode & stat.S_IWOTH)
    except OSError:
        open_to_all = False
    shared = system if open_to_all else Path("/tmp")  # noqa: S108  # shared on purpose
    return shared / "torchmuster"


@dataclass(frozen=True, kw_only=True)
class ClaimsTable:
    """Who holds which device, which of these claims block this process, and what it could take.

    ``free`` maps each free device to the time it was last taken (0: never), to detect changes.
    """

    claimed: dict[str, Claim]
    in_the_way: dict[str, Claim]
    free: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The lock of a device that applies to us, and the claim on the device as others see it."""

    path: Path
    outermost: Claim | None
    claim: Claim | None
    last_taken: int


class Claims:
    """The claims of one host, kept in one folder, as seen under these tokens."""

    def __init__(self, folder: Path, tokens: Sequence[str] = ()) -> None:
        self._folder = folder
        self.tokens = tuple(tokens)

    @classmethod
    def here(cls, environment: Mapping[str, str]) -> "Claims":
        """Return the claims of this host, under the tokens that this process was given."""
        tokens = environment.get(TOKEN_VARIABLE, "").split(",")
        return cls(claims_folder(environment), [one for one in tokens if one])

    @property
    def queue(self) -> Path:
        """The folder with the tickets of waiting processes."""
        return self._folder / "queue"

    def glance(self, uuids: Iterable[str]) -> ClaimsTable:
        """Read the claims without taking any: creates nothing, never waits long."""
        uuids = list(uuids)
        if not AVAILABLE or not self._folder.is_dir() or _is_foreign_link(self._folder):
            return ClaimsTable(claimed={}, in_the_way={}, free=dict.fromkeys(uuids, 0))
        try:
            with self.gate(_GLANCE_PATIENCE_S):
                return self.look(uuids)
        except (
            MusterError
        ):  # the folder is read-only, or the gate is stuck: locks can still be read
            return self.look(uuids)

    def look(self, uuids: Iterable[str]) -> ClaimsTable:
        """Read the claims, under the gate. A lock that can be taken is free."""
        table = ClaimsTable(claimed={}, in_the_way={}, free={})
        for uuid in uuids:
            place = self._place(uuid)
            if place.outermost is not None:
                table.claimed[uuid] = place.outermost
            if place.claim is not None:
                table.in_the_way[uuid] = place.claim
            else:
                table.free[uuid] = place.last_taken
        return table

    def take(
        self,
        uuid: str,
        command: str,
        token: str,
        *,
        ends_unix_s: float | None = None,
        run: str = "",
        borrowed: bool = False,
    ) -> int:
        """Lock a free device, under the gate, and record the owner for other users to read.

        ``ends_unix_s``, ``run`` and ``borrowed`` are as in :class:`Claim`. The claim is the returned file descriptor: it is released when all copies are closed.
        """
        place = self._place(uuid)
        lock = open_shared(place.path)
        if not try_lock(lock):
            os.close(lock)
            raise NotNow(
                f"GPU {uuid} cannot be claimed: its lock is in use",
                why=f"a program other than Muster holds {place.path}",
                fix=f"sudo lslocks | grep {uuid}  # shows the process",
            )
        if place.outermost is None:
            self._clear_inner(uuid)
        claim: dict[str, object] = {
            "pid": os.getpid(),
            "user": user_of_this_process(),
            "command": command,
            "since_unix_s": time.time(),
            "token": token,
            "ends_unix_s": ends_unix_s,
            "run": run,
            "borrowed": borrowed,
        }
        write_json(lock, claim)
        return lock

    def _place(self, uuid: str) -> _Place:
        """Follow our tokens inwards to the lock that applies to us."""
        path = self._path(uuid)
        claim, last_taken = _look_at(path)
        outermost = claim
        for _ in self.tokens:
            if claim is None or claim.token not in self.tokens:
                break
            path = self._path(uuid, claim.token)
            claim, last_taken = _look_at(path)
        return _Place(path=path, outermost=outermost, claim=claim, last_taken=last_taken)

    def _path(self, uuid: str, token: str = "") -> Path:
        name = re.sub(r"[^A-Za-z0-9-]", "_", uuid)
        return self._folder / (f"{name}.{token}.lock" if token else f"{name}.lock")

    def _clear_inner(self, uuid: str) -> None:
        """Remove the files that picks within earlier claims left, unless they are locked."""
        for path in self._folder.glob(self._path(uuid, "*").name):
            if _look_at(path)[0] is None:
                with suppress(OSError):  # another user's file in a sticky folder; it does no harm
                    path.unlink()

    @contextmanager
    def gate(self, patience_s: float | None = None, *, deadline: float = 0.0) -> Iterator[None]:
        """Hold the lock under which claims are read and changed.

        A caller that waits for devices until a ``deadline`` waits as long for the lock, which takes long on a busy host.
        """
        if patience_s is None:
            patience_s = max(_GATE_PATIENCE_S, deadline - time.monotonic())
        if not AVAILABLE:
            raise Impossible(
                "GPUs cannot be claimed on this operating system",
                why="claims need flock, which Windows does not have",
                fix="run muster gpus pick without a command and without --wait, which claims nothing",
            )
        self._make_folders()
        gate = open_shared(self._folder / "gate.lock")
        deadline = time.monotonic() + patience_s
        while not try_lock(gate):
            if time.monotonic() > deadline:
                os.close(gate)
                raise NotNow(
                    f"cannot read the claims in {self._folder}",
                    why=f"another process has held the lock on them for {patience_s:.0f} s; that "
                    f"process may be stopped",
                    fix=f"sudo lslocks | grep {self._folder}  # shows the process",
                )
            time.sleep(random.uniform(0.001, 0.005))
        try:
            yield
        finally:
            drop_lock(gate)
            os.close(gate)

    def _make_folders(self) -> None:
        for path in (self._folder, self.queue):
            try:
                path.mkdir(parents=True)
                path.chmod(0o1777)  # for all users; each may delete only their own files
            except FileExistsError:
                _refuse_foreign_link(path)
            except OSError as error:
                raise Impossible(
                    f"GPUs cannot be claimed: {path} cannot be created",
                    why=error.strerror or str(error),
                    fix="set TORCHMUSTER_CLAIMS_DIR, for every user of this host, to the same "
                    "local folder, to which all users can write",
                ) from error


def _is_foreign_link(path: Path) -> bool:
    """Return whether a path is a link of another user: it may lead to any folder."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid())


def _refuse_foreign_link(path: Path) -> None:
    if _is_foreign_link(path):
        raise Impossible(
            f"GPUs cannot be claimed: {path} is a link of another user",
            why="it may lead to a folder of someone else, and Muster would write there",
            fix="have its owner or an administrator remove it, or set TORCHMUSTER_CLAIMS_DIR, for every user "
            "of this host, to another local folder",
        )


def _look_at(path: Path) -> tuple[Claim | None, int]:
    """Return the holder of a lock; or None, and when it was last taken."""
    try:
        lock = open_to_look(path)
    except FileNotFoundError:
        return None, 0
    except OSError as error:
        return _unreadable(error), 0
    if try_lock(lock):
        last_taken = os.fstat(lock).st_mtime_ns
        drop_lock(lock)
        os.close(lock)
        return None, last_taken
    claim = _read_claim(lock)
    os.close(lock)
    return claim, 0


def _read_claim(lock: int) -> Claim:
    """Read who holds a lock. All users may write the file, so its text is checked and cleaned."""
    stored = read_json(lock)
    pid, run = stored.get("pid"), stored.get("run")
    return Claim(
        pid=pid if isinstance(pid, int) else 0,
        user=printable([str(stored.get("user", "an unknown user"))]),
        command=printable([str(stored.get("command", "unknown command"))]),
        since_unix_s=stored_time(stored.get("since_unix_s")) or 0.0,
        token=re.sub(r"[^0-9a-f]", "", str(stored.get("token", ""))),
        ends_unix_s=stored_time(stored.get("ends_unix_s")),
        run=run if isinstance(run, str) else "",
        borrowed=stored.get("borrowed") is True,
    )


def stored_time(value: object) -> float | None:
    """Return a number that another user stored, if it can be a time in seconds."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12
    return float(value) if usable and isinstance(value, int | float) else None


def _unreadable(error: OSError) -> Claim:
    """Return a claim for a lock that cannot be opened (a link, permissions): it counts as held."""
    words = f"a lock that cannot be opened: {error.strerror or error}"
    return Claim(pid=0, user="an unknown user", command=words, since_unix_s=0.0)
