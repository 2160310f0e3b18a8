"""The queue of those who wait for devices: oldest first, crash-safe, nobody held up by the dead.

A place in the queue is a file named by the time it was made, locked while its owner lives, that says
what its owner wants. All of it happens under the gate of ``claims.py``.
"""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchmuster.devices import locks
from torchmuster.devices.choose import choose
from torchmuster.devices.model import Node
from torchmuster.devices.processes import user_of_this_process
from torchmuster.devices.request import Claim, Request
from torchmuster.devices.visibility import STAGES
from torchmuster.errors import MusterError
from torchmuster.redaction import printable

# A waiter that has not looked for this long (stopped by Ctrl-Z, say) holds nobody up.
STALE_WAITER_S = 10.0


class Ticket:
    """This process's place in the queue."""

    def __init__(self, queue: Path, request: Request, environment: Mapping[str, str]) -> None:
        name = f"{time.time_ns():020d}-{os.getpid()}-{os.urandom(3).hex()}"
        self.path = queue / name
        self._lock = locks.open_own(self.path)
        locks.try_lock(self._lock)
        variables = {name for stages in STAGES.values() for stage in stages for name in stage}
        wish: dict[str, object] = {
            "pid": os.getpid(),
            "user": user_of_this_process(),
            "request": {key: value for key, value in vars(request).items() if value is not None},
            "environment": {key: environment[key] for key in variables & environment.keys()},
        }
        locks.write_json(self._lock, wish)

    def still_here(self) -> None:
        """Show that the waiter is awake."""
        os.utime(self._lock)

    def place(self) -> int:
        """Return how many stand before this one."""
        return sum(path.name < self.path.name for path in self.path.parent.iterdir())

    def give_back(self) -> None:
        """Leave the queue."""
        self.path.unlink(missing_ok=True)
        os.close(self._lock)


def promised(
    queue: Path, node: Node, taken: Mapping[str, Claim], *, ahead_of: Ticket | None
) -> dict[str, Claim]:
    """Return the devices that earlier waiters would be given now: they are not to be had."""
    promises: dict[str, Claim] = {}
    for path in sorted(queue.iterdir()):
        if ahead_of is not None and path.name >= ahead_of.path.name:
            break
        if all(one.uuid in taken or one.uuid in promises for one in node.accelerators):
            break  # nothing is left to promise
        for wish in _read_living(path):
            promises |= _would_take(wish, node, {**taken, **promises})
    return promises


def _read_living(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield what a ticket says, if its owner lives and is awake; clear it away if it is dead."""
    try:
        file = locks.open_to_look(path)
    except OSError:
        return
    try:
        if locks.try_lock(file):
            _unlink_if_allowed(path)
            locks.drop(file)
        elif time.time() - os.fstat(file).st_mtime < STALE_WAITER_S:
            yield locks.read_json(file)
    finally:
        os.close(file)


def _would_take(
    wish: Mapping[str, Any], node: Node, taken: Mapping[str, Claim]
) -> dict[str, Claim]:
    """Return what a waiter would be given now; nothing if it cannot be served or makes no sense."""
    try:
        stored = dict(wish["request"])
        if "ids" in stored:
            stored["ids"] = tuple(stored["ids"])
        environment = {str(key): str(value) for key, value in wish["environment"].items()}
        request = Request(**stored)
        free = sum(one.uuid not in taken for one in node.accelerators)
        if free < (request.count or 1):
            return {}  # spares the work of a refusal that nobody reads
        decision = choose(node, request, environment=environment, claims=taken)
        waiter = Claim(
            pid=int(wish["pid"]),
            user=printable([str(wish["user"])]),
            command="first in the queue",
            since_unix_s=node.taken_unix_s,
        )
    except (MusterError, TypeError, KeyError, AttributeError, ValueError):
        return {}
    return {device.uuid: waiter for device in decision.value}


def _unlink_if_allowed(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # somebody else's in a sticky folder; it does no harm
