"""The line of waiting requests: one file (a ticket) for each request, in a folder that all users share.

The waiting process holds the lock of its ticket and refreshes its time. Tickets are made under the
gate of the claims; each gets the next number, which is its place in the order of arrival.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchmuster.devices import claims as locks
from torchmuster.devices.choose import choose_devices
from torchmuster.devices.claims import LivingFile, OwnFile
from torchmuster.devices.identify import device_candidates
from torchmuster.devices.model import Node
from torchmuster.devices.processes import user_with_uid
from torchmuster.devices.request import Claim, DeviceRequest, obstacle
from torchmuster.devices.visibility import STAGES
from torchmuster.errors import Impossible, MusterError

# A waiter that has not polled for this long (for example stopped by Ctrl-Z) does not block others.
STALE_WAITER_S = 10.0
# From this waiting time on, all devices that a request could use are kept for it.
LONG_WAIT_S = 24 * 3600.0
_AHEAD = "waits longer"


@dataclass(frozen=True, kw_only=True)
class WaitingRequest:
    """A request that waits for devices, as its ticket states it.

    ``run`` is the folder of the run that waits, "" for other commands. ``responds``: its process
    still polls.
    """

    number: int
    pid: int
    user: str
    request: DeviceRequest
    environment: Mapping[str, str] = field(default_factory=dict)
    since_unix_s: float
    run: str = ""
    responds: bool = True


class Ticket:
    """This process's place in the line."""

    def __init__(
        self, queue: Path, request: DeviceRequest, environment: Mapping[str, str], *, run: str = ""
    ) -> None:
        """Join the end of the line, under the gate."""
        numbers = [_number_of(path.name) or 0 for path in queue.iterdir()]
        self.number = max(numbers, default=0) + 1
        visibility = {name for stages in STAGES.values() for stage in stages for name in stage}
        values = {
            "pid": os.getpid(),
            "request": {key: value for key, value in vars(request).items() if value is not None},
            "environment": {name: environment[name] for name in visibility & environment.keys()},
            "since_unix_s": time.time(),
            "run": run,
        }
        path = queue / f"{self.number:08d}"
        try:
            self._file = OwnFile(path, values)
        except OSError as error:
            raise Impossible(
                f"cannot wait for GPUs: {path} cannot be created",
                why=error.strerror or str(error),
                fix="set TORCHMUSTER_CLAIMS_DIR, for every user of this host, to the same local folder, "
                "to which all users can write",
            ) from error

    def refresh(self) -> None:
        """Show that the waiter still polls."""
        os.utime(self._file.descriptor)

    def release(self) -> None:
        """Leave the line; safe to call twice."""
        self._file.release()


def read_tickets(queue: Path) -> list[WaitingRequest]:
    """Return the requests of living processes, in the order of their arrival."""
    if not locks.AVAILABLE:
        return []
    tickets = [_waiting_request(file) for file in locks.living_files(queue)]
    waiting = [ticket for ticket in tickets if ticket is not None]
    return sorted(waiting, key=lambda ticket: ticket.number)


def _number_of(name: str) -> int | None:
    return int(name) if name.isascii() and name.isdecimal() and len(name) < 20 else None


def _waiting_request(file: LivingFile) -> WaitingRequest | None:
    """Return what a ticket requests; None if it is malformed: any user may have written it."""
    number = _number_of(file.name)
    request, environment = file.values.get("request"), file.values.get("environment")
    pid = file.values.get("pid")
    if number is None or not isinstance(pid, int):
        return None
    if not isinstance(request, dict) or not isinstance(environment, dict):
        return None
    try:
        return WaitingRequest(
            number=number,
            pid=pid,
            user=user_with_uid(file.uid),
            request=DeviceRequest.from_json(request),
            environment={str(key): str(value) for key, value in environment.items()},
            since_unix_s=locks.stored_time(file.values.get("since_unix_s")),
            run=str(file.values.get("run", "")),
            responds=time.time() - file.modified_unix_s < STALE_WAITER_S,
        )
    except (TypeError, ValueError):
        return None


def devices_of_those_ahead(
    node: Node,
    ahead: Sequence[WaitingRequest],
    claimed: Mapping[str, Claim],
    *,
    now_unix_s: float,
) -> dict[str, Claim]:
    """Return the devices that a request cannot have because of the requests ahead of it.

    The rule of the line. Requests are met in the order of their arrival: each gets devices as soon
    as enough of those that are left to it meet its conditions. A request that cannot be met now
    keeps nothing, so a later request that needs less may start before it. One guard keeps a large
    request from waiting forever: when it has waited for 24 hours, it goes first, and all
    devices that it could use are kept for it. A request whose process has not polled for 10 s is
    passed over, and so is one that this host cannot meet at any time.

    ``ahead`` is in the order of arrival, ``claimed`` are all claims of the host.
    """
    promised: dict[str, Claim] = {}
    for waiting in ahead:
        if not waiting.responds:
            continue
        devices = _devices_for(waiting, node, {**claimed, **promised})
        if not devices and now_unix_s - waiting.since_unix_s >= LONG_WAIT_S:
            devices = _usable(waiting, node)
        claim = Claim(
            pid=waiting.pid, user=waiting.user, command=_AHEAD, since_unix_s=waiting.since_unix_s
        )
        for uuid in devices:
            promised.setdefault(uuid, claim)
    return promised


def _devices_for(
    waiting: WaitingRequest, node: Node, unavailable: Mapping[str, Claim]
) -> tuple[str, ...]:
    """Return what a request gets now; empty if it cannot be met."""
    free = sum(device.uuid not in unavailable for device in node.accelerators)
    if free < waiting.request.wanted:
        return ()  # saves building an error that is not shown
    try:
        chosen = choose_devices(
            node, waiting.request, environment=waiting.environment, claims=unavailable
        )
    except MusterError:
        return ()
    return tuple(device.uuid for device in chosen.value)


def _usable(waiting: WaitingRequest, node: Node) -> tuple[str, ...]:
    """Return the devices that a request could get when they are free; empty if they are too few."""
    try:
        candidates = device_candidates(node, waiting.request, waiting.environment)
    except MusterError:
        return ()
    usable = []
    for device in candidates:
        problem = obstacle(device, waiting.request, {})
        if problem is None or problem.passing:
            usable.append(device.uuid)
    return tuple(usable) if len(usable) >= waiting.request.wanted else ()
