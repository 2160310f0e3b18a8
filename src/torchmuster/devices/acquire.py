"""Choose and lock devices as one step, and wait in a queue while they are in use.

The queue is ordered by age: a newer request never takes devices that an older one could get now.
Devices are not reserved for a request that cannot be met yet, so one request for all GPUs of a
host does not leave seven of them idle until the eighth is free.
"""

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmuster.decision import Decision
from torchmuster.devices import claims
from torchmuster.devices import claims as locks
from torchmuster.devices.choose import choose_devices
from torchmuster.devices.claims import TOKEN_VARIABLE, Claims
from torchmuster.devices.model import Device, Node
from torchmuster.devices.processes import command_of_this_process, user_of_this_process
from torchmuster.devices.request import Claim, DeviceRequest
from torchmuster.devices.visibility import STAGES
from torchmuster.errors import MusterError, NotNow
from torchmuster.redaction import printable

# A waiter that has not polled for this long (for example stopped by Ctrl-Z) does not block others.
STALE_WAITER_S = 10.0


class Ticket:
    """This process's place in the queue."""

    def __init__(self, queue: Path, request: DeviceRequest, environment: Mapping[str, str]) -> None:
        name = f"{time.time_ns():020d}-{os.getpid()}-{os.urandom(3).hex()}"
        self.path = queue / name
        self._lock = claims.open_own(self.path)
        claims.try_lock(self._lock)
        variables = {name for stages in STAGES.values() for stage in stages for name in stage}
        wish: dict[str, object] = {
            "pid": os.getpid(),
            "user": user_of_this_process(),
            "request": {key: value for key, value in vars(request).items() if value is not None},
            "environment": {key: environment[key] for key in variables & environment.keys()},
        }
        claims.write_json(self._lock, wish)

    def still_here(self) -> None:
        """Refresh the ticket, to show that the waiter still polls."""
        os.utime(self._lock)

    def place(self) -> int:
        """Return the number of tickets ahead of this one."""
        return sum(path.name < self.path.name for path in self.path.parent.iterdir())

    def give_back(self) -> None:
        """Leave the queue."""
        self.path.unlink(missing_ok=True)
        os.close(self._lock)


def promised_devices(
    queue: Path, node: Node, taken: Mapping[str, Claim], *, ahead_of: Ticket | None
) -> dict[str, Claim]:
    """Return the devices that earlier waiters would get now; they are not available."""
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
    """Yield a ticket's content if its owner still polls; delete the ticket if the owner is dead."""
    try:
        file = claims.open_to_look(path)
    except OSError:
        return
    try:
        if claims.try_lock(file):
            _unlink_if_allowed(path)
            claims.drop_lock(file)
        elif time.time() - os.fstat(file).st_mtime < STALE_WAITER_S:
            yield claims.read_json(file)
    finally:
        os.close(file)


def _would_take(
    wish: Mapping[str, Any], node: Node, taken: Mapping[str, Claim]
) -> dict[str, Claim]:
    """Return what a waiter would get now; empty if it cannot be served or is malformed."""
    try:
        stored = dict(wish["request"])
        if "ids" in stored:
            stored["ids"] = tuple(stored["ids"])
        environment = {str(key): str(value) for key, value in wish["environment"].items()}
        request = DeviceRequest(**stored)
        free = sum(one.uuid not in taken for one in node.accelerators)
        if free < (request.count or 1):
            return {}  # saves building an error that is not shown
        decision = choose_devices(node, request, environment=environment, claims=taken)
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
        return  # another user's file in a sticky folder; it does no harm


# A waiter takes a snapshot of the host this often, and reads the claims in between.
POLL_S = 1.0
_PEEK_S, _MAX_PEEK_S = 0.01, 0.25


@dataclass(kw_only=True)
class HeldDevices:
    """Devices that this process holds until :meth:`release` or until it exits."""

    decision: Decision[tuple[Device, ...]]
    locks: list[int]
    tokens: tuple[str, ...]

    def release(self) -> None:
        """Release the devices; safe to call twice."""
        while self.locks:
            lock = self.locks.pop()
            locks.drop_lock(lock)
            os.close(lock)

    def hand_over(self, environment: dict[str, str]) -> None:
        """Pass the claim to the program that this process execs with this environment."""
        environment[TOKEN_VARIABLE] = ",".join(self.tokens)
        for lock in self.locks:
            os.set_inheritable(lock, True)

    def __enter__(self) -> "HeldDevices":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def acquire_devices(
    claims: Claims,
    look: Callable[[], Node],
    request: DeviceRequest,
    *,
    environment: Mapping[str, str],
    wait_s: float = 0.0,
    on_wait: Callable[[MusterError], None] = lambda _: None,
    command: Sequence[str] | None = None,
) -> HeldDevices:
    """Choose devices and lock them as one step, waiting up to ``wait_s`` for them.

    ``look`` takes a fresh snapshot at each try. ``on_wait`` receives the obstacle after each failed
    try. ``command`` is what other users see; default: this process's own command.
    """
    shown = command_of_this_process() if command is None else printable(command)
    deadline = time.monotonic() + wait_s
    ticket: Ticket | None = None
    try:
        while True:
            node = look()
            uuids = [device.uuid for device in node.accelerators]
            with claims.gate(deadline=deadline):
                if ticket is not None:
                    ticket.still_here()
                table = claims.look(uuids)
                # Claimed devices are not promised to a waiter, even if the claim is our own.
                promised = promised_devices(claims.queue, node, table.claimed, ahead_of=ticket)
                taken = promised | table.in_the_way
                try:
                    decision = choose_devices(node, request, environment=environment, claims=taken)
                    return _lock(claims, decision, shown)
                except NotNow as error:
                    if time.monotonic() >= deadline:
                        raise
                    obstacle = error
                ticket = ticket or Ticket(claims.queue, request, environment)
            on_wait(obstacle)
            next_try = min(time.monotonic() + POLL_S, deadline)
            _await_release(claims, uuids, table.free, ticket, until=next_try)
    finally:
        if ticket is not None:
            ticket.give_back()


def _await_release(
    claims: Claims,
    uuids: Sequence[str],
    free: Mapping[str, int],
    ticket: Ticket,
    until: float,
) -> None:
    """Sleep until a device is freed that this waiter may get, or until the deadline.

    Each waiter ahead takes at least one device, so with as many ahead as there are free devices
    another try will most likely fail; the regular poll covers the rest.
    """
    while (left := until - time.monotonic()) > 0:
        place = ticket.place()
        # The first in the queue polls often, the others less; jitter spreads the polls.
        pause = min(_PEEK_S * (1 + place), _MAX_PEEK_S) * random.uniform(0.5, 1.5)
        time.sleep(min(left, pause))
        with claims.gate(deadline=until):
            now_free = claims.look(uuids).free
        if now_free.items() - free.items() and place < len(now_free):
            return


def _lock(claims: Claims, decision: Decision[tuple[Device, ...]], command: str) -> HeldDevices:
    """Lock the chosen devices, all or none."""
    token = os.urandom(8).hex()
    held = HeldDevices(decision=decision, locks=[], tokens=(*claims.tokens, token))
    try:
        for device in decision.value:
            held.locks.append(claims.take(device.uuid, command, token))
    except BaseException:
        held.release()
        raise
    return held
