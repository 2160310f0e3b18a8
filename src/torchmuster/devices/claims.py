"""Claims: one user at a time per device, by a kernel lock that cannot be left behind.

Each device has a file in a folder that all users of the machine share; whoever holds its ``flock``
has the device. The kernel drops the lock when the last process that inherited it ends, however it
ends. Taking devices and looking who holds what happen under one more lock, the gate, held for a
moment only.

Claims bind those who use them. GPUs that others use without a claim show as in use.
"""

import getpass
import os
import random
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from torchmuster.devices import locks
from torchmuster.devices.processes import printable
from torchmuster.devices.request import Claim
from torchmuster.errors import Impossible, NotNow

_GATE_PATIENCE_S = 10.0


def folder(environment: Mapping[str, str]) -> Path:
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
class Table:
    """Who holds which device; and for the free ones when they were last taken, 0 if never."""

    held: dict[str, Claim]
    free: dict[str, int]


class Claims:
    """The claims of one machine, kept in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def queue(self) -> Path:
        """The folder in which those who wait stand in line."""
        return self._folder / "queue"

    def held(self, uuids: Iterable[str]) -> dict[str, Claim]:
        """Return who holds which of these devices now."""
        if not locks.AVAILABLE or not self._folder.is_dir():
            return {}
        with self.gate():
            return self.look(uuids).held

    def held_by_others(self, uuids: Iterable[str]) -> dict[str, Claim]:
        """Return the claims that stand in this process's way: not its own or its ancestors'."""
        ours = lineage()
        return {uuid: one for uuid, one in self.held(uuids).items() if one.pid not in ours}

    def look(self, uuids: Iterable[str]) -> Table:
        """Look, under the gate. A lock that can be had is held by nobody."""
        held: dict[str, Claim] = {}
        free: dict[str, int] = {}
        for uuid in uuids:
            try:
                lock = locks.open_to_look(self._path(uuid))
            except FileNotFoundError:
                free[uuid] = 0
                continue
            except OSError as error:
                held[uuid] = _unreadable(error)
                continue
            try:
                if locks.try_lock(lock):
                    free[uuid] = os.fstat(lock).st_mtime_ns
                else:
                    held[uuid] = _read_claim(lock)
            finally:
                os.close(lock)
        return Table(held=held, free=free)

    def take(self, uuid: str, command: str) -> int:
        """Lock a device that is free, under the gate, and write down who we are for others to read.

        The claim is the file descriptor that is returned: it ends when all copies are closed.
        """
        lock = locks.open_shared(self._path(uuid))
        if not locks.try_lock(lock):
            os.close(lock)
            raise NotNow(
                f"the lock of {uuid} was taken without the gate",
                why=f"something other than muster holds {self._path(uuid)}",
                fix=f"lslocks | grep {uuid}  # shows who",
            )
        claim: dict[str, object] = {
            "pid": os.getpid(),
            "user": getpass.getuser(),
            "command": command,
            "since_unix_s": time.time(),
        }
        locks.write_json(lock, claim)
        return lock

    def _path(self, uuid: str) -> Path:
        return self._folder / (re.sub(r"[^A-Za-z0-9-]", "_", uuid) + ".lock")

    @contextmanager
    def gate(self) -> Iterator[None]:
        """Hold the lock under which claims are looked at and changed."""
        if not locks.AVAILABLE:
            raise Impossible(
                "GPUs cannot be claimed on this operating system",
                why="claims rest on flock, which Windows does not have",
                fix="pick without a command; nobody else should then start on these GPUs",
            )
        self._make_folders()
        gate = locks.open_shared(self._folder / "gate.lock")
        try:
            deadline = time.monotonic() + _GATE_PATIENCE_S
            while not locks.try_lock(gate):
                if time.monotonic() > deadline:
                    raise NotNow(
                        f"the claims in {self._folder} cannot be looked at",
                        why=f"another process has held its gate for {_GATE_PATIENCE_S:.0f} s; "
                        "it may be stopped",
                        fix=f"lslocks | grep {self._folder}  # shows who",
                    )
                time.sleep(random.uniform(0.001, 0.005))
            yield
        finally:
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
                    why=str(error),
                    fix="export TORCHMUSTER_CLAIMS_DIR=<a local folder that all users can write>",
                ) from error


def _read_claim(lock: int) -> Claim:
    """Read who holds a lock. The file is writable by all, so its words are checked and cleaned."""
    stored = locks.read_json(lock)
    pid, since = stored.get("pid"), stored.get("since_unix_s")
    return Claim(
        pid=pid if isinstance(pid, int) else 0,
        user=printable([str(stored.get("user", "an unknown user"))]),
        command=printable([str(stored.get("command", "unknown command"))]),
        since_unix_s=float(since) if isinstance(since, int | float) else 0.0,
    )


def _unreadable(error: OSError) -> Claim:
    """A lock that cannot even be looked at (a link, another's permissions) must count as held."""
    words = f"a lock that cannot be opened: {error.strerror}"
    return Claim(pid=0, user="an unknown user", command=words, since_unix_s=0.0)


def lineage() -> set[int]:
    """This process and its ancestors: what they claimed, this one may use."""
    this = psutil.Process()
    return {this.pid, *(parent.pid for parent in this.parents())}
