"""Claims: one user at a time per device, by a kernel lock that cannot be left behind.

Each device has a file in a folder that all users of the machine share; whoever holds its ``flock``
has the device. The kernel drops the lock when the last process that inherited it ends, however it
ends. Taking devices and looking who holds what happen under one more lock, the gate, held for a
moment only.

A claim has a token, which is handed to the program that runs under it. Inside, the claimed devices
can be had again, each by a further file of that token, so picks within a claim do not collide.

Claims bind those who use them. GPUs that others use without a claim show as in use.
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

from torchmuster.devices.processes import user_of_this_process
from torchmuster.devices.request import Claim
from torchmuster.errors import Impossible, MusterError, NotNow
from torchmuster.redaction import printable

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


def drop_lock(file: int) -> None:
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


# Holds the tokens of the claims that a program runs under, outermost first.
TOKEN_VARIABLE = "TORCHMUSTER_CLAIM"  # noqa: S105
_GATE_PATIENCE_S = 10.0
_GLANCE_PATIENCE_S = 1.0


def claims_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder that all users of this machine share for claims.

    It must be the same for everybody, so it depends on the machine and not on who asks.
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
    """Who holds which device, what of that is in this process's way, and what it could take.

    ``free`` has the time each was last taken (0: never), so that a change can be told.
    """

    claimed: dict[str, Claim]
    in_the_way: dict[str, Claim]
    free: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """The lock that decides about a device for us, and the claim on the device as others see it."""

    path: Path
    outermost: Claim | None
    claim: Claim | None
    last_taken: int


class Claims:
    """The claims of one machine, kept in one folder, as seen under these tokens."""

    def __init__(self, folder: Path, tokens: Sequence[str] = ()) -> None:
        self._folder = folder
        self.tokens = tuple(tokens)

    @classmethod
    def here(cls, environment: Mapping[str, str]) -> "Claims":
        """Return the claims of this machine, under the tokens that this process was handed."""
        tokens = environment.get(TOKEN_VARIABLE, "").split(",")
        return cls(claims_folder(environment), [one for one in tokens if one])

    @property
    def queue(self) -> Path:
        """The folder in which those who wait stand in line."""
        return self._folder / "queue"

    def glance(self, uuids: Iterable[str]) -> ClaimsTable:
        """Look without wanting to take anything: makes nothing, never waits long."""
        uuids = list(uuids)
        if not AVAILABLE or not self._folder.is_dir():
            return ClaimsTable(claimed={}, in_the_way={}, free=dict.fromkeys(uuids, 0))
        try:
            with self.gate(_GLANCE_PATIENCE_S):
                return self.look(uuids)
        except (
            MusterError
        ):  # the folder is read-only, or the gate is stuck: locks can still be seen
            return self.look(uuids)

    def look(self, uuids: Iterable[str]) -> ClaimsTable:
        """Look, under the gate. A lock that can be had is held by nobody."""
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

    def take(self, uuid: str, command: str, token: str) -> int:
        """Lock a device that is free, under the gate, and write down who we are for others to read.

        The claim is the file descriptor that is returned: it ends when all copies are closed.
        """
        place = self._place(uuid)
        lock = open_shared(place.path)
        if not try_lock(lock):
            os.close(lock)
            raise NotNow(
                f"the lock of {uuid} was taken without the gate",
                why=f"something other than muster holds {place.path}",
                fix=f"sudo lslocks | grep {uuid}  # shows who",
            )
        if place.outermost is None:
            self._clear_inner(uuid)
        claim: dict[str, object] = {
            "pid": os.getpid(),
            "user": user_of_this_process(),
            "command": command,
            "since_unix_s": time.time(),
            "token": token,
        }
        write_json(lock, claim)
        return lock

    def _place(self, uuid: str) -> _Place:
        """Follow our tokens inwards to the lock that decides for us."""
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
        """Remove the files that picks within earlier claims left behind, unless they are held."""
        for path in self._folder.glob(self._path(uuid, "*").name):
            if _look_at(path)[0] is None:
                with suppress(OSError):  # somebody else's in a sticky folder; it does no harm
                    path.unlink()

    @contextmanager
    def gate(self, patience_s: float | None = None) -> Iterator[None]:
        """Hold the lock under which claims are looked at and changed."""
        patience_s = _GATE_PATIENCE_S if patience_s is None else patience_s
        if not AVAILABLE:
            raise Impossible(
                "GPUs cannot be claimed on this operating system",
                why="claims rest on flock, which Windows does not have",
                fix="pick without a command and without --wait; nothing is claimed then",
            )
        self._make_folders()
        gate = open_shared(self._folder / "gate.lock")
        deadline = time.monotonic() + patience_s
        while not try_lock(gate):
            if time.monotonic() > deadline:
                os.close(gate)
                raise NotNow(
                    f"the claims in {self._folder} cannot be looked at",
                    why=f"another process has held its gate for {patience_s:.0f} s; it may be "
                    "stopped",
                    fix=f"sudo lslocks | grep {self._folder}  # shows who",
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
                path.chmod(0o1777)  # for all users; each may delete only what is their own
            except FileExistsError:
                continue
            except OSError as error:
                raise Impossible(
                    f"GPUs cannot be claimed: {path} cannot be made",
                    why=error.strerror or str(error),
                    fix="let every user of this machine set TORCHMUSTER_CLAIMS_DIR to the same "
                    "local folder, one that all of them can write",
                ) from error


def _look_at(path: Path) -> tuple[Claim | None, int]:
    """Return who holds a lock; or nobody, and when it was last taken."""
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
    """Read who holds a lock. The file is writable by all, so its words are checked and cleaned."""
    stored = read_json(lock)
    pid, since = stored.get("pid"), stored.get("since_unix_s")
    return Claim(
        pid=pid if isinstance(pid, int) else 0,
        user=printable([str(stored.get("user", "an unknown user"))]),
        command=printable([str(stored.get("command", "unknown command"))]),
        since_unix_s=since if isinstance(since, int | float) and 0 <= since < 1e12 else 0.0,
        token=re.sub(r"[^0-9a-f]", "", str(stored.get("token", ""))),
    )


def _unreadable(error: OSError) -> Claim:
    """A lock that cannot even be looked at (a link, another's permissions) must count as held."""
    words = f"a lock that cannot be opened: {error.strerror or error}"
    return Claim(pid=0, user="an unknown user", command=words, since_unix_s=0.0)
