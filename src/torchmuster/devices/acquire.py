"""Choose and claim devices as one step, and wait in line while they are in use.

Who gets which devices is decided by ``tickets.devices_of_those_ahead``; every waiting process
computes the same answer.
"""

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torchmuster.decision import Decision
from torchmuster.devices.choose import choose_devices
from torchmuster.devices.claims import CLAIM_VARIABLE, Claims, OwnFile
from torchmuster.devices.identify import device_candidates
from torchmuster.devices.model import Device, Node
from torchmuster.devices.processes import command_of_this_process
from torchmuster.devices.request import Claim, DeviceRequest, in_use_by, obstacle
from torchmuster.devices.tickets import Ticket, devices_of_those_ahead, read_tickets
from torchmuster.errors import MusterError, NotNow
from torchmuster.redaction import printable

# How long a waiter sleeps between two tries; at random, so that waiters do not meet at the gate.
_PAUSE_S = (0.5, 1.0)


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
) -> HeldDevices:
    """Choose devices and claim them as one step, waiting up to ``wait_s`` for them.

    ``take_snapshot`` is called at each try. ``on_wait`` receives the obstacle after each failed
    try. ``command`` is what other users see; default: this process's own command. Raises DevicesBusy if the
    devices are in use, TooFewDevices if this host cannot meet the request.
    """
    shown = command_of_this_process() if command is None else printable(command)
    deadline = time.monotonic() + wait_s
    ticket: Ticket | None = None
    with ExitStack() as line:
        while True:
            node = take_snapshot()
            with claims.gate(deadline=deadline):
                unavailable = _unavailable(claims, node, ticket)
                try:
                    decision = choose_devices(
                        node, request, environment=environment, claims=unavailable
                    )
                    held = _claim(claims, decision, shown)
                except NotNow as error:
                    if time.monotonic() >= deadline:
                        raise
                    refusal = error
                else:
                    line.close()  # before others can see the claim beside the ticket
                    return held
                if ticket is None:
                    devices = _usable_devices(node, request, environment)
                    ticket = Ticket(claims.queue, request.wanted, devices, str(request))
                    line.callback(ticket.release)
                ticket.refresh()
            on_wait(refusal)
            time.sleep(min(random.uniform(*_PAUSE_S), max(0.0, deadline - time.monotonic())))


def _unavailable(claims: Claims, node: Node, ticket: Ticket | None) -> dict[str, Claim]:
    """Return the devices that are claimed, or kept for those ahead in the line."""
    table = claims.read([device.uuid for device in node.accelerators])
    free = []
    for device in node.accelerators:
        if device.uuid not in table.claimed and not in_use_by(device):
            free.append(device.uuid)
    ahead = read_tickets(claims.queue)
    if ticket is not None:
        ahead = [waiting for waiting in ahead if waiting.number < ticket.number]
    promised = devices_of_those_ahead(ahead, free, now_unix_s=time.time())
    return {**promised, **table.blocking}


def _usable_devices(
    node: Node, request: DeviceRequest, environment: Mapping[str, str]
) -> list[str]:
    """Return the devices that a request could get when they are free."""
    usable = []
    for device in device_candidates(node, request, environment):
        problem = obstacle(device, request, {})
        if problem is None or problem.passing:
            usable.append(device.uuid)
    return usable


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
