"""Tickets: one file for each request that waits for devices, in a folder that all users of the host share.

The waiting process holds the ``flock`` of its ticket and refreshes its time; the kernel drops the lock when the
process exits. Only the owner can write a ticket, so the owner of the file is the owner of the request.
"""

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchmuster.devices import claims as locks
from torchmuster.devices.processes import user_of_this_process, user_with_uid
from torchmuster.devices.request import DeviceRequest
from torchmuster.devices.visibility import STAGES
from torchmuster.redaction import printable

# A waiter that has not polled for this long (for example stopped by Ctrl-Z) does not block others.
STALE_WAITER_S = 10.0
HIGHEST_PRIORITY = 1_000_000


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """What a waiting process states about its job; all of it may change while it waits, except ``since_unix_s``.

    ``lasts_s`` is the longest time that the job holds its devices: its time limit and the time to stop. ``after`` are
    the runs that must finish first. ``ready_unix_s``: since when it could have started (not held, no run to wait for).
    """

    run: str = ""
    name: str = ""
    since_unix_s: float = 0.0
    ready_unix_s: float = 0.0
    priority: int = 0
    held: bool = False
    after: tuple[str, ...] = ()
    lasts_s: float | None = None

    @property
    def may_start(self) -> bool:
        """Whether only devices are missing."""
        return not self.held and not self.after


@dataclass(frozen=True, kw_only=True)
class WaitingRequest:
    """A request that waits for devices, as its ticket states it. ``responds``: its process still polls."""

    ticket: str
    pid: int
    uid: int
    user: str
    request: DeviceRequest
    environment: Mapping[str, str] = field(default_factory=dict)
    job: QueuedJob
    responds: bool = True

    @property
    def arrival(self) -> tuple[float, str]:
        """The key that orders requests by the time since when they could have started."""
        return self.job.ready_unix_s, self.ticket


class Ticket:
    """This process's place in the queue."""

    def __init__(
        self,
        queue: Path,
        request: DeviceRequest,
        environment: Mapping[str, str],
        job: QueuedJob | None = None,
    ) -> None:
        self.path = queue / new_ticket_name()
        self._lock = locks.open_own(self.path)
        locks.try_lock(self._lock)
        self._request, self._environment = request, environment
        self._written: QueuedJob | None = None
        self.update(job or QueuedJob(since_unix_s=time.time(), ready_unix_s=time.time()))

    def update(self, job: QueuedJob) -> None:
        """Write the job for other processes to read, if it has changed."""
        if job == self._written:
            return
        self._written = job
        variables = {name for stages in STAGES.values() for stage in stages for name in stage}
        wish: dict[str, object] = {
            "pid": os.getpid(),
            "user": user_of_this_process(),
            "request": {k: value for k, value in vars(self._request).items() if value is not None},
            "environment": {
                key: self._environment[key] for key in variables & self._environment.keys()
            },
            "job": vars(job),
        }
        locks.write_json(self._lock, wish)

    def still_here(self) -> None:
        """Refresh the ticket, to show that the waiter still polls."""
        os.utime(self._lock)

    def place(self) -> int:
        """Return the number of older tickets."""
        return sum(path.name < self.path.name for path in self.path.parent.iterdir())

    def give_back(self) -> None:
        """Leave the queue."""
        self.path.unlink(missing_ok=True)
        os.close(self._lock)


def new_ticket_name() -> str:
    """Return the name of a new ticket; names sort by age."""
    return f"{time.time_ns():020d}-{os.getpid()}-{os.urandom(3).hex()}"


def read_tickets(queue: Path) -> list[WaitingRequest]:
    """Return the requests of living processes, the oldest ticket first; delete the tickets of dead ones."""
    try:
        paths = sorted(queue.iterdir())
    except OSError:
        return []
    found = (_read_ticket(path) for path in paths)
    return [request for request in found if request is not None]


def _read_ticket(path: Path) -> WaitingRequest | None:
    try:
        file = locks.open_to_look(path)
    except OSError:
        return None
    try:
        if locks.try_lock(file):
            with contextlib.suppress(OSError):  # in a sticky folder only its owner may delete it
                path.unlink(missing_ok=True)
            locks.drop_lock(file)
            return None
        status = os.fstat(file)
        responds = time.time() - status.st_mtime < STALE_WAITER_S
        return _waiting_request(path.name, locks.read_json(file), status.st_uid, responds=responds)
    finally:
        os.close(file)


def _waiting_request(
    name: str, wish: Mapping[str, Any], uid: int, *, responds: bool
) -> WaitingRequest | None:
    """Return what a ticket requests; None if it is malformed."""
    try:
        stored = dict(wish["request"])
        if "ids" in stored:
            stored["ids"] = tuple(stored["ids"])
        return WaitingRequest(
            ticket=name,
            pid=int(wish["pid"]),
            uid=uid,
            user=user_with_uid(uid),
            request=DeviceRequest(**stored),
            environment={str(key): str(value) for key, value in wish["environment"].items()},
            job=_queued_job(wish["job"]),
            responds=responds,
        )
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError):
        return None


def _queued_job(stored: Mapping[str, Any]) -> QueuedJob:
    since = locks.stored_time(stored["since_unix_s"]) or 0.0
    after = stored["after"]
    return QueuedJob(
        run=str(stored["run"]),
        name=printable([str(stored["name"])]),
        since_unix_s=since,
        ready_unix_s=max(locks.stored_time(stored["ready_unix_s"]) or 0.0, since),
        priority=max(-HIGHEST_PRIORITY, min(int(stored["priority"]), HIGHEST_PRIORITY)),
        held=bool(stored["held"]),
        after=tuple(printable([str(run)]) for run in after) if isinstance(after, list) else (),
        lasts_s=locks.stored_time(stored["lasts_s"]),
    )
