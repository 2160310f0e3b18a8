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
from torchmuster.devices import waiting
from torchmuster.devices.choose import choose
from torchmuster.devices.claims import Claims, lineage
from torchmuster.devices.model import Device, Node
from torchmuster.devices.processes import command_of_this_process, printable
from torchmuster.devices.request import Request
from torchmuster.errors import MusterError, NotNow

# A waiter looks at the machine this often, and at the claims in between.
POLL_S = 1.0
_PEEK_S, _MAX_PEEK_S = 0.01, 0.25


@dataclass(kw_only=True)
class Held:
    """Devices that this process holds, until :meth:`release` or its end."""

    decision: Decision[tuple[Device, ...]]
    locks: list[int]

    def release(self) -> None:
        """Give the devices back; safe to call twice."""
        while self.locks:
            os.close(self.locks.pop())

    def keep_across_exec(self) -> None:
        """Let the claim pass to the program that this process becomes, and to its children."""
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
    ours = lineage()
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
                own = {uuid for uuid, claim in table.held.items() if claim.pid in ours}
                taken = {uuid: one for uuid, one in table.held.items() if uuid not in own}
                taken |= waiting.promised(claims.queue, node, taken, ahead_of=ticket)
                try:
                    decision = choose(node, request, environment=environment, claims=taken)
                    return _lock(claims, decision, own, shown)
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


def _lock(
    claims: Claims, decision: Decision[tuple[Device, ...]], own: set[str], command: str
) -> Held:
    """Lock what was chosen, all or nothing; what an ancestor holds is ours already."""
    held = Held(decision=decision, locks=[])
    try:
        for device in decision.value:
            if device.uuid not in own:
                held.locks.append(claims.take(device.uuid, command))
    except BaseException:
        held.release()
        raise
    return held
