"""Taking devices: choose and lock as one step, and wait in line where they are in use.

Those who wait stand in a queue, oldest first: a younger request never takes what an older one could
be given now. Devices are not held back for a request that cannot be met yet, so one wish for the
whole machine does not leave seven idle GPUs waiting for the eighth.
"""

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torchmuster.decision import Decision
from torchmuster.devices import locks, waiting
from torchmuster.devices.choose import choose
from torchmuster.devices.claims import TOKEN_VARIABLE, Claims
from torchmuster.devices.model import Device, Node
from torchmuster.devices.processes import command_of_this_process
from torchmuster.devices.request import Request
from torchmuster.errors import MusterError, NotNow
from torchmuster.redaction import printable

# A waiter looks at the machine this often, and at the claims in between.
POLL_S = 1.0
_PEEK_S, _MAX_PEEK_S = 0.01, 0.25


@dataclass(kw_only=True)
class Held:
    """Devices that this process holds, until :meth:`release` or its end."""

    decision: Decision[tuple[Device, ...]]
    locks: list[int]
    tokens: tuple[str, ...]

    def release(self) -> None:
        """Give the devices back; safe to call twice."""
        while self.locks:
            lock = self.locks.pop()
            locks.drop(lock)
            os.close(lock)

    def hand_over(self, environment: dict[str, str]) -> None:
        """Let the claim pass to the program that this process becomes with this environment."""
        environment[TOKEN_VARIABLE] = ",".join(self.tokens)
        for lock in self.locks:
            os.set_inheritable(lock, True)

    def __enter__(self) -> "Held":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def acquire(
    claims: Claims,
    look: Callable[[], Node],
    request: Request,
    *,
    environment: Mapping[str, str],
    wait_s: float = 0.0,
    on_wait: Callable[[MusterError], None] = lambda _: None,
    command: Sequence[str] | None = None,
) -> Held:
    """Choose devices and lock them as one step, waiting up to ``wait_s`` for them.

    ``look`` takes a fresh snapshot at each try. ``on_wait`` is told, at each try that fails, what
    stands in the way. ``command`` is what others are shown; this process's own if left out.
    """
    shown = command_of_this_process() if command is None else printable(command)
    deadline = time.monotonic() + wait_s
    ticket: waiting.Ticket | None = None
    try:
        while True:
            node = look()
            uuids = [device.uuid for device in node.accelerators]
            with claims.gate():
                if ticket is not None:
                    ticket.still_here()
                table = claims.look(uuids)
                # What is claimed is promised to nobody, also where the claim is our own.
                promised = waiting.promised(claims.queue, node, table.claimed, ahead_of=ticket)
                taken = promised | table.in_the_way
                try:
                    decision = choose(node, request, environment=environment, claims=taken)
                    return _lock(claims, decision, shown)
                except NotNow as error:
                    if time.monotonic() >= deadline:
                        raise
                    obstacle = error
                ticket = ticket or waiting.Ticket(claims.queue, request, environment)
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
    ticket: waiting.Ticket,
    until: float,
) -> None:
    """Sleep until a device has come free that may be for this waiter, or until it is time.

    Each waiter before us takes at least one device, so with as many before us as there are free
    devices another try is most likely vain; the regular one covers the rest.
    """
    while (left := until - time.monotonic()) > 0:
        place = ticket.place()
        # The first look often, those behind seldom; jitter keeps them from doing it together.
        pause = min(_PEEK_S * (1 + place), _MAX_PEEK_S) * random.uniform(0.5, 1.5)
        time.sleep(min(left, pause))
        with claims.gate():
            now_free = claims.look(uuids).free
        if now_free.items() - free.items() and place < len(now_free):
            return


def _lock(claims: Claims, decision: Decision[tuple[Device, ...]], command: str) -> Held:
    """Lock what was chosen, all or nothing."""
    token = os.urandom(8).hex()
    held = Held(decision=decision, locks=[], tokens=(*claims.tokens, token))
    try:
        for device in decision.value:
            held.locks.append(claims.take(device.uuid, command, token))
    except BaseException:
        held.release()
        raise
    return held
