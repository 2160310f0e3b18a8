"""Choose and lock devices as one step, and wait in a queue while they are in use.

Who gets which devices is decided by ``queue.py``; every waiting process computes the same answer.
"""

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torchmuster.decision import Decision
from torchmuster.devices import claims as locks
from torchmuster.devices.borrow import (
    devices_to_return,
    is_within_share,
)
from torchmuster.devices.choose import choose_devices
from torchmuster.devices.claims import TOKEN_VARIABLE, Claims
from torchmuster.devices.model import Device, Node
from torchmuster.devices.processes import command_of_this_process, user_of_this_process
from torchmuster.devices.queue import plan_queue
from torchmuster.devices.request import GIVEN_BACK_WITHIN_S, Claim, DeviceRequest
from torchmuster.devices.shares import Shares, most_within_share, read_shares
from torchmuster.devices.tickets import (
    QueuedJob,
    Ticket,
    WaitingRequest,
    new_ticket_name,
    read_tickets,
)
from torchmuster.errors import MusterError, NotNow
from torchmuster.redaction import printable

# A waiter takes a snapshot of the host this often, and reads the claims in between.
POLL_S = 1.0
# A request that borrowed devices can meet waits for them, even without ``wait_s``: borrowers see it within a second.
_BORROWED_PATIENCE_S = GIVEN_BACK_WITHIN_S + 15.0
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
    job: Callable[[], QueuedJob] | None = None,
) -> HeldDevices:
    """Choose devices and lock them as one step, waiting up to ``wait_s`` for them.

    ``look`` takes a fresh snapshot at each try. ``on_wait`` receives the obstacle after each failed
    try. ``command`` is what other users see; default: this process's own command. ``job`` returns the current state of
    a queued job at each try; an error that it raises ends the wait.
    """
    shown = command_of_this_process() if command is None else printable(command)
    began_unix_s = time.time()
    state_of_job = job or (lambda: QueuedJob(since_unix_s=began_unix_s, ready_unix_s=began_unix_s))
    deadline = time.monotonic() + wait_s
    shares = None if claims.tokens else read_shares(environment).value  # a claim was in the share
    asked_back = False
    ticket: Ticket | None = None
    try:
        while True:
            node = look()
            uuids = [device.uuid for device in node.accelerators]
            state = state_of_job()
            with claims.gate(deadline=deadline):
                if ticket is not None:
                    ticket.update(state)
                    ticket.still_here()
                table = claims.look(uuids)
                own = _own_request(ticket, request, environment, state)
                others = [
                    one
                    for one in read_tickets(claims.queue)
                    if one.ticket != own.ticket and is_within_share(one, table.claimed, shares)
                ]
                requests = [*others, own]
                plan = plan_queue(
                    node,
                    requests,
                    table.claimed,
                    now_unix_s=time.time(),
                    shares=shares.weights(one.user for one in requests) if shares else None,
                    seen={own.ticket: table.in_the_way},
                )
                try:
                    _refuse_before_its_turn(state)
                    taken = plan.unavailable[own.ticket]
                    most = most_within_share(request, own.user, table.claimed, shares)
                    decision = choose_devices(node, request, environment=environment, claims=taken)
                    if most is not None and len(decision.value) > most:  # all GPUs were requested
                        fewer = replace(request, count=most)
                        decision = choose_devices(
                            node, fewer, environment=environment, claims=taken
                        )
                    return _lock(claims, decision, shown, state)
                except NotNow as error:
                    if not asked_back and _is_borrowed(own, others, node, table.claimed, shares):
                        asked_back = True
                        deadline = max(deadline, time.monotonic() + _BORROWED_PATIENCE_S)
                    if asked_back:
                        error.why += (
                            f"; borrowed GPUs are given back within {GIVEN_BACK_WITHIN_S:.0f} s"
                        )
                    if time.monotonic() >= deadline:
                        raise
                    obstacle = error
                ticket = ticket or Ticket(claims.queue, request, environment, state)
            on_wait(obstacle)
            next_try = min(time.monotonic() + POLL_S, deadline)
            ahead = [one.ticket for one in plan.order].index(own.ticket)
            _await_release(
                claims, uuids, table.free, ticket, ahead, until=next_try, deadline=deadline
            )
    finally:
        if ticket is not None:
            ticket.give_back()


def _is_borrowed(
    own: WaitingRequest,
    others: Sequence[WaitingRequest],
    node: Node,
    claimed: Mapping[str, Claim],
    shares: Shares | None,
) -> bool:
    """Return whether borrowers give back what this request needs."""
    returned = devices_to_return(
        node, [*others, own], claimed, now_unix_s=time.time(), shares=shares
    )
    return any(one.ticket == own.ticket for one in returned.values())


def _own_request(
    ticket: Ticket | None,
    request: DeviceRequest,
    environment: Mapping[str, str],
    job: QueuedJob,
) -> WaitingRequest:
    """Return this process's request as others see it, or would see it if it had a ticket."""
    return WaitingRequest(
        ticket=new_ticket_name() if ticket is None else ticket.path.name,
        pid=os.getpid(),
        uid=os.geteuid() if hasattr(os, "geteuid") else 0,
        user=user_of_this_process(),
        request=request,
        environment=environment,
        job=job,
    )


def _refuse_before_its_turn(job: QueuedJob) -> None:
    if job.held:
        raise NotNow(
            "the job is held", why="its owner holds it; muster queue release lets it start"
        )
    if job.after:
        raise NotNow(
            "the job waits for other runs",
            why=f"it starts when {', '.join(job.after)} has finished",
        )


def _await_release(
    claims: Claims,
    uuids: Sequence[str],
    free: Mapping[str, int],
    ticket: Ticket,
    ahead: int,
    *,
    until: float,
    deadline: float,
) -> None:
    """Sleep until a device is freed that this waiter may get, or until the deadline.

    Each waiter ahead takes at least one device, so with as many ahead as there are free devices
    another try will most likely fail; the regular poll covers the rest.
    """
    while (left := until - time.monotonic()) > 0:
        place = min(ahead, ticket.place())
        # The first in the queue polls often, the others less; jitter spreads the polls.
        pause = min(_PEEK_S * (1 + place), _MAX_PEEK_S) * random.uniform(0.5, 1.5)
        time.sleep(min(left, pause))
        with claims.gate(deadline=deadline):  # a busy host may keep it for long
            now_free = claims.look(uuids).free
        if now_free.items() - free.items() and place < len(now_free):
            return


def _lock(
    claims: Claims, decision: Decision[tuple[Device, ...]], command: str, job: QueuedJob
) -> HeldDevices:
    """Lock the chosen devices, all or none."""
    token = os.urandom(8).hex()
    held = HeldDevices(decision=decision, locks=[], tokens=(*claims.tokens, token))
    ends_unix_s = None if job.lasts_s is None else time.time() + job.lasts_s
    try:
        for device in decision.value:
            lock = claims.take(device.uuid, command, token, ends_unix_s=ends_unix_s, run=job.run)
            held.locks.append(lock)
    except BaseException:
        held.release()
        raise
    return held
