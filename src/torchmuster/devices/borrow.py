"""Borrowed devices: a run claims idle devices beyond those it asked for, and gives them back on request.

A claim that is marked as borrowed is given back when a request in the queue could be met with it. ``devices_to_return``
is a pure function of snapshot, tickets and claims, so that all borrowers and requesters of a host compute the same answer.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torchmuster.decision import Decision
from torchmuster.devices import claims as locks
from torchmuster.devices.choose import choose_devices
from torchmuster.devices.claims import Claims, ClaimsTable
from torchmuster.devices.model import Device, Node
from torchmuster.devices.queue import as_idle, plan_queue
from torchmuster.devices.request import Claim, DeviceRequest
from torchmuster.devices.shares import Shares, read_shares, share_left
from torchmuster.devices.tickets import WaitingRequest, read_tickets
from torchmuster.errors import NotNow
from torchmuster.units import plural


def is_within_share(
    request: WaitingRequest, claims: Mapping[str, Claim], shares: Shares | None
) -> bool:
    """Return whether a user may claim what they request without borrowing."""
    left = share_left(request.user, claims, shares)
    return left is None or request.request.wanted <= left


def devices_to_return(
    node: Node,
    requests: Sequence[WaitingRequest],
    claims: Mapping[str, Claim],
    *,
    now_unix_s: float,
    shares: Shares | None = None,
) -> dict[str, WaitingRequest]:
    """Return the borrowed devices to give back, each with the request that gets it.

    No more of them than the requests need, the last borrowed ones first. Requests beyond the share of their user get none.
    """
    borrowed = sorted(
        (uuid for uuid, claim in claims.items() if claim.borrowed),
        key=lambda uuid: (-claims[uuid].since_unix_s, uuid),
    )
    entitled = [one for one in requests if is_within_share(one, claims, shares)]
    if not borrowed or not entitled:
        return {}

    def grants_without(returned: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
        devices = tuple(
            as_idle(device) if device.uuid in returned else device for device in node.accelerators
        )
        plan = plan_queue(
            replace(node, accelerators=devices),
            entitled,
            {uuid: claim for uuid, claim in claims.items() if uuid not in returned},
            now_unix_s=now_unix_s,
            shares=shares.weights(one.user for one in entitled) if shares else None,
        )
        return plan.grants

    most = grants_without(borrowed).keys()
    if most <= grants_without(()).keys():
        return {}
    returned = list(borrowed)
    for uuid in reversed(borrowed):
        fewer = [one for one in returned if one != uuid]
        if most <= grants_without(fewer).keys():
            returned = fewer
    by_ticket = {one.ticket: one for one in entitled}
    return {
        uuid: by_ticket[ticket]
        for ticket, uuids in grants_without(returned).items()
        for uuid in uuids
        if uuid in returned
    }


def give_back(
    node: Node,
    requests: Sequence[WaitingRequest],
    claims: Mapping[str, Claim],
    *,
    own: Sequence[str],
    counts: Sequence[int],
    now_unix_s: float,
    shares: Shares | None = None,
) -> Decision[tuple[str, ...]]:
    """Return which devices of this run to give back, and the reason.

    ``own`` are all devices of the run, the borrowed ones last. ``counts`` are the numbers of devices that the run can use:
    devices that it cannot use without the returned ones are given back with them.
    """
    returned = devices_to_return(node, requests, claims, now_unix_s=now_unix_s, shares=shares)
    asked = {uuid: one for uuid, one in returned.items() if uuid in own}
    if not asked:
        return Decision(value=(), reason="")
    by_ticket = {one.ticket: one for one in asked.values()}
    reason = " and ".join(f"{one.user} requested {one.request}" for one in by_ticket.values())
    left = [uuid for uuid in own if uuid not in asked]
    usable = usable_count(counts, len(left))
    return Decision(value=(*asked, *left[usable:]), reason=reason)


def usable_count(counts: Sequence[int], available: int) -> int:
    """Return the largest number of devices that a run can use."""
    return max((count for count in counts if count <= available), default=min(counts))


def idle_devices(
    node: Node,
    requests: Sequence[WaitingRequest],
    claims: Mapping[str, Claim],
    in_the_way: Mapping[str, Claim],
    *,
    environment: Mapping[str, str],
    now_unix_s: float,
    count: int | None = None,
) -> tuple[Device, ...]:
    """Return devices that nobody uses or gets next: all of them, or the best ``count``."""
    plan = plan_queue(node, requests, claims, now_unix_s=now_unix_s)
    taken = dict(in_the_way)
    promised = {uuid for uuids in plan.grants.values() for uuid in uuids}
    promised |= set(plan.reservation.uuids) if plan.reservation is not None else set()
    for uuid in promised:
        taken.setdefault(uuid, Claim(pid=0, user="", command="", since_unix_s=now_unix_s))
    request = DeviceRequest(count=count)
    try:
        return choose_devices(node, request, environment=environment, claims=taken).value
    except NotNow:
        return ()


class DeviceRange:
    """The devices of a run that uses between a minimum and a maximum of them.

    The first ones were acquired as usual. The others are idle devices that it takes with ``extend``: ``borrowed`` ones,
    of which ``find_returns`` says when to give them back, or ones that it keeps.
    """

    def __init__(
        self,
        claims: Claims,
        first: Sequence[Device],
        *,
        counts: Sequence[int],
        token: str,
        command: str,
        environment: Mapping[str, str],
        borrowed: bool,
    ) -> None:
        self._claims = claims
        self._counts = sorted(counts)
        self._token = token
        self._command = command
        self._environment = environment
        self._borrowed = borrowed
        self._first = tuple(first)
        self._extra: dict[str, tuple[Device, int]] = {}
        self._idle_since: dict[str, float] = {}

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices of the run, the borrowed ones last."""
        return (*self._first, *self.extra)

    @property
    def extra(self) -> tuple[Device, ...]:
        """The devices beyond the first ones, in the order in which they were taken."""
        return tuple(device for device, _ in self._extra.values())

    @property
    def has_all(self) -> bool:
        """Whether the run has as many devices as it can use."""
        return len(self.devices) >= self._counts[-1]

    def extend(
        self, look: Callable[[], Node], *, idle_for_s: float = 0.0
    ) -> Decision[tuple[Device, ...]]:
        """Claim idle devices, as many as the run can use; return those that are new.

        With ``idle_for_s``, only devices that this object has seen idle for that long count.
        """
        if self.has_all:
            return Decision(value=(), reason="")
        node = look()
        with self._claims.gate():
            table, requests = self._look(node)
            now_s = time.monotonic()
            idle = idle_devices(
                node,
                requests,
                table.claimed,
                table.in_the_way,
                environment=self._environment,
                now_unix_s=time.time(),
            )
            self._idle_since = {
                device.uuid: self._idle_since.get(device.uuid, now_s) for device in idle
            }
            ready = [one for one in idle if now_s - self._idle_since[one.uuid] >= idle_for_s]
            most = len(self.devices) + len(ready)
            if not self._borrowed and (left := self._share_left(table)) is not None:
                most = min(most, len(self.devices) + left)
            wanted = usable_count(self._counts, most) - len(self.devices)
            if wanted <= 0:
                return Decision(value=(), reason="")
            others = {
                one.uuid: Claim(pid=0, user="", command="", since_unix_s=0.0)
                for one in node.accelerators
                if one not in ready
            }
            chosen = choose_devices(
                node,
                DeviceRequest(count=wanted),
                environment=self._environment,
                claims={**others, **table.in_the_way},
            ).value
            for device in chosen:
                lock = self._claims.take(
                    device.uuid, self._command, self._token, borrowed=self._borrowed
                )
                self._extra[device.uuid] = (device, lock)
        since = min(self._idle_since.get(one.uuid, now_s) for one in chosen)
        idle_text = f"idle for {now_s - since:.0f} s" if idle_for_s else "idle"
        return Decision(value=chosen, reason=f"{plural(len(chosen), 'GPU')} {idle_text}")

    def find_returns(self, look: Callable[[], Node]) -> Decision[tuple[Device, ...]]:
        """Return the borrowed devices that somebody with a claim to them requests, and the reason."""
        if not self._borrowed or not self._extra or not _has_tickets(self._claims):
            return Decision(value=(), reason="")
        node = look()
        with self._claims.gate():
            table, requests = self._look(node)
        decision = give_back(
            node,
            requests,
            table.claimed,
            own=[one.uuid for one in self.devices],
            counts=self._counts,
            now_unix_s=time.time(),
            shares=read_shares(self._environment).value,
        )
        devices = tuple(one for one in self.extra if one.uuid in decision.value)
        return Decision(value=devices, reason=decision.reason if devices else "")

    def release(self, devices: Sequence[Device] | None = None) -> None:
        """Release these devices, or all that were taken beyond the first ones; safe to call twice."""
        for device in self.extra if devices is None else devices:
            if (held := self._extra.pop(device.uuid, None)) is not None:
                locks.drop_lock(held[1])
                os.close(held[1])
        self._idle_since.clear()

    def _look(self, node: Node) -> tuple[ClaimsTable, list[WaitingRequest]]:
        table = self._claims.look(one.uuid for one in node.accelerators)
        return table, read_tickets(self._claims.queue)

    def _share_left(self, table: ClaimsTable) -> int | None:
        from torchmuster.devices.processes import user_of_this_process

        shares = read_shares(self._environment).value
        return share_left(user_of_this_process(), table.claimed, shares)


def _has_tickets(claims: Claims) -> bool:
    try:
        return next(claims.queue.iterdir(), None) is not None
    except OSError:
        return False
