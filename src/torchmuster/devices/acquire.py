"""Choose and claim devices as one step, and wait in line while they are in use.

Who gets which devices is decided by ``tickets.devices_of_those_ahead``; every waiting process
computes the same answer.
"""

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from torchmuster.decision import Decision
from torchmuster.devices.choose import choose_devices
from torchmuster.devices.claims import CLAIM_VARIABLE, Claims, OwnFile
from torchmuster.devices.model import Device, Node
from torchmuster.devices.processes import command_of_this_process
from torchmuster.devices.request import DeviceRequest
from torchmuster.devices.tickets import Ticket, devices_of_those_ahead, read_tickets
from torchmuster.errors import MusterError, NotNow
from torchmuster.redaction import printable

# A waiter takes a snapshot of the host this often, and reads the claims in between.
POLL_S = 1.0
# The first in line reads the claims this often, those behind it less often.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


@dataclass(kw_only=True)
class HeldDevices:
    """Devices that this process holds until :meth:`release` or until it exits.

    ``claim_ids`` are the claims that a program on these devices runs under, outermost first.
    """

    decision: Decision[tuple[Device, ...]]
    files: list[OwnFile]
    claim_ids: tuple[str, ...]

    def release(self) -> None:
        """Release the devices; safe to call twice."""
        for file in self.files:
            file.release()

    def hand_over(self, environment: dict[str, str]) -> None:
        """Pass the claim to the program that this process execs with this environment."""
        environment[CLAIM_VARIABLE] = ",".join(self.claim_ids)
        for file in self.files:
            os.set_inheritable(file.descriptor, True)

    def __enter__(self) -> "HeldDevices":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def acquire_devices(
    claims: Claims,
    take_snapshot: Callable[[], Node],
    request: DeviceRequest,
    *,
    environment: Mapping[str, str],
    wait_s: float = 0.0,
    on_wait: Callable[[MusterError], None] = lambda _: None,
    command: Sequence[str] | None = None,
    run: str = "",
) -> HeldDevices:
    """Choose devices and claim them as one step, waiting up to ``wait_s`` for them.

    ``take_snapshot`` is called at each try. ``on_wait`` receives the obstacle after each failed
    try. ``command`` is what other users see; default: this process's own command. ``run`` is the
    folder of the run that waits. Raises DevicesBusy if the devices are in use, TooFewDevices if
    this host cannot meet the request.
    """
    shown = command_of_this_process() if command is None else printable(command)
    deadline = time.monotonic() + wait_s
    ticket: Ticket | None = None
    try:
        while True:
            node = take_snapshot()
            uuids = [device.uuid for device in node.accelerators]
            with claims.gate(deadline=deadline):
                table = claims.read(uuids)
                ahead = [
                    waiting
                    for waiting in read_tickets(claims.queue)
                    if ticket is None or waiting.number < ticket.number
                ]
                promised = devices_of_those_ahead(
                    node, ahead, table.claimed, now_unix_s=time.time()
                )
                try:
                    decision = choose_devices(
                        node,
                        request,
                        environment=environment,
                        claims={**promised, **table.blocking},
                    )
                    held = _claim(claims, decision, shown)
                except NotNow as error:
                    if time.monotonic() >= deadline:
                        raise
                    obstacle = error
                else:
                    if ticket is not None:
                        ticket.release()  # before others can see the claim beside the ticket
                    return held
                if ticket is None:
                    ticket = Ticket(claims.queue, request, environment, run=run)
                ticket.refresh()
            on_wait(obstacle)
            next_try = min(time.monotonic() + POLL_S, deadline)
            _await_release(claims, uuids, table.blocking.keys(), ticket, len(ahead), next_try)
    finally:
        if ticket is not None:
            ticket.release()


def _await_release(
    claims: Claims,
    uuids: Sequence[str],
    blocked: Set[str],
    ticket: Ticket,
    ahead: int,
    until: float,
) -> None:
    """Sleep until a claim on a device ends that this waiter may get, or until the next try.

    Each waiter ahead takes at least one device, so with as many ahead as there are free devices
    another try will most likely fail.
    """
    pause_s = min(_SHORTEST_PAUSE_S * (1 + ahead), _LONGEST_PAUSE_S)
    while True:
        left_s = until - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(left_s, pause_s * random.uniform(0.5, 1.5)))
        ticket.refresh()
        still_blocked = claims.read(uuids).blocking.keys()
        if blocked - still_blocked and ahead < len(uuids) - len(still_blocked):
            return


def _claim(claims: Claims, decision: Decision[tuple[Device, ...]], command: str) -> HeldDevices:
    """Claim the chosen devices, all or none."""
    claim_id = os.urandom(8).hex()
    held = HeldDevices(decision=decision, files=[], claim_ids=(*claims.ids, claim_id))
    claims.remove_left_over()
    try:
        for device in decision.value:
            held.files.append(claims.take(device.uuid, claim_id, command))
    except BaseException:
        held.release()
        raise
    return held
