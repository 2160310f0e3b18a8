"""The line of waiting requests: one file (a ticket) for each request, in a folder that all users share.

The waiting process holds the lock of its ticket and refreshes its time. Tickets are made under the
gate of the claims; each gets the next number, which is its place in the order of arrival.
"""

import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from torchmuster.devices import claims as locks
from torchmuster.devices.claims import OwnFile
from torchmuster.devices.processes import user_with_uid
from torchmuster.devices.request import Claim
from torchmuster.redaction import printable

# A waiter that has not polled for this long (for example stopped by Ctrl-Z) does not block others.
STALE_WAITER_S = 10.0
# From this waiting time on, all devices that a request could use are kept for it.
LONG_WAIT_S = 24 * 3600.0
_AHEAD = "waits longer"


class WaitingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that waits for devices, as its ticket states it.

    ``devices`` are the UUIDs that it could use when they are free. ``request`` is its text.
    ``responds``: its process still polls.
    """

    pid: int
    wanted: int
    devices: tuple[str, ...]
    since_unix_s: float
    request: str = ""
    number: int = 0
    user: str = ""
    responds: bool = True


class Ticket:
    """This process's place in the line."""

    def __init__(self, queue: Path, wanted: int, devices: Sequence[str], request: str = "") -> None:
        """Join the end of the line, under the gate."""
        numbers = [_number_of(path.name) for path in queue.iterdir()]
        self.number = max(numbers, default=0) + 1
        values = {
            "pid": os.getpid(),
            "wanted": wanted,
            "devices": list(devices),
            "since_unix_s": time.time(),
            "request": request,
        }
        self._file = OwnFile(queue / f"{self.number:08d}", values)

    def refresh(self) -> None:
        """Show that the waiter still polls."""
        os.utime(self._file.descriptor)

    def release(self) -> None:
        """Leave the line; safe to call twice."""
        self._file.release()


def read_tickets(queue: Path) -> list[WaitingRequest]:
    """Return the requests of living processes, in the order of their arrival.

    Any user may have written a ticket: malformed ones do not count, and an impossible time means that it
    has just arrived.
    """
    if not locks.AVAILABLE:
        return []
    now = time.time()
    tickets = []
    for file in locks.living_files(queue):
        try:
            ticket = msgspec.convert(file.values, WaitingRequest)
        except msgspec.ValidationError:
            continue
        number = _number_of(file.name)
        if number and ticket.wanted > 0:
            since = ticket.since_unix_s
            tickets.append(
                msgspec.structs.replace(
                    ticket,
                    number=number,
                    user=user_with_uid(file.uid),
                    request=printable([ticket.request]),
                    since_unix_s=since if 0 < since <= now else now,
                    responds=now - file.modified_unix_s < STALE_WAITER_S,
                )
            )
    return sorted(tickets, key=lambda ticket: ticket.number)


def _number_of(name: str) -> int:
    """Return the number of a ticket; 0 for other files."""
    return int(name) if name.isascii() and name.isdecimal() and len(name) < 20 else 0


def devices_of_those_ahead(
    ahead: Sequence[WaitingRequest], free: Collection[str], *, now_unix_s: float
) -> dict[str, Claim]:
    """Return the devices that a request cannot have because of the requests ahead of it.

    The rule of the line. Requests are met in the order of their arrival: each gets devices as soon
    as enough of the free ones that are left to it can be used by it. A request that cannot be met now
    keeps nothing, so a later request that needs less may start before it. One guard keeps a large
    request from waiting forever: when it has waited for 24 hours, it goes first, and all
    devices that it could use are kept for it. A request whose process has not polled for 10 s is
    passed over.

    ``ahead`` is in the order of arrival, ``free`` are the UUIDs of devices that nobody uses or has claimed.
    """
    promised: dict[str, Claim] = {}
    for waiting in ahead:
        devices = [uuid for uuid in waiting.devices if uuid in free and uuid not in promised]
        if len(devices) >= waiting.wanted:
            devices = devices[: waiting.wanted]
        elif now_unix_s - waiting.since_unix_s >= LONG_WAIT_S:
            devices = list(waiting.devices)
        else:
            continue
        if waiting.responds:
            claim = Claim(
                pid=waiting.pid,
                user=waiting.user,
                command=_AHEAD,
                since_unix_s=waiting.since_unix_s,
            )
            for uuid in devices:
                promised.setdefault(uuid, claim)
    return promised
