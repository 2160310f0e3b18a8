"""The order of the queue, and who gets which devices now: pure functions of tickets, claims and a snapshot.

The rule, also in ``docs/shared-server.md``:

1. A request that has waited for longer than ``LONG_WAIT_S`` comes first; of several, the oldest.
2. Then come the users with the fewest claimed GPUs relative to their share; with equal numbers, the oldest request. A
   request in the queue counts as claimed GPUs for the later requests of its user.
3. Priorities order only the requests of one user.
4. The first request that cannot be met gets a reservation: the GPUs that are free at the earliest time at which the
   time limits of the running jobs free enough of them. Later requests may use these GPUs only if their own time limit
   ends before that. Without such a time nothing is reserved, unless the request has waited for ``LONG_WAIT_S``: then all
   GPUs that it can use are kept for it as they become free.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchmuster.devices.choose import choose_devices
from torchmuster.devices.identify import device_candidates
from torchmuster.devices.model import Device, Node
from torchmuster.devices.request import GIVEN_BACK_WITHIN_S, Claim, obstacle
from torchmuster.devices.tickets import WaitingRequest
from torchmuster.errors import MusterError

LONG_WAIT_S = 24 * 3600.0
# A job that holds its GPUs for longer than this after its time limit may hold them for any time.
_OVERDUE_S = 600.0
FIRST_IN_QUEUE = "first in the queue"
RESERVED = "reserved for the first in the queue"


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """The devices kept for a request until it can start; ``at_unix_s`` is None if that time is unknown."""

    ticket: str
    uuids: tuple[str, ...]
    at_unix_s: float | None


@dataclass(frozen=True, kw_only=True)
class QueuePlan:
    """Who gets which devices now.

    ``order`` has all requests, those that may not start at its end. ``unavailable`` has, for each request that may
    start, the devices that are not available to it, and who claimed them or gets them first.
    """

    order: tuple[WaitingRequest, ...]
    grants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unavailable: Mapping[str, Mapping[str, Claim]] = field(default_factory=dict)
    reservation: Reservation | None = None


def order_of_queue(
    requests: Sequence[WaitingRequest],
    claims: Mapping[str, Claim],
    *,
    now_unix_s: float,
    shares: Mapping[str, float] | None = None,
) -> tuple[WaitingRequest, ...]:
    """Order requests by rules 1 to 3. ``shares`` has the share of each user; default: 1."""
    ready = [one for one in requests if one.responds and one.job.may_start]
    first = sorted((one for one in ready if _is_long(one, now_unix_s)), key=_by_arrival)
    gpus: dict[str, float] = {}
    for claim in claims.values():
        gpus[claim.user] = gpus.get(claim.user, 0.0) + 1
    for one in first:
        gpus[one.user] = gpus.get(one.user, 0.0) + one.request.wanted
    lines: dict[str, list[WaitingRequest]] = {}
    for one in sorted(ready, key=lambda one: (-one.job.priority, *one.arrival), reverse=True):
        if not _is_long(one, now_unix_s):
            lines.setdefault(one.user, []).append(one)

    def use_of(user: str) -> float:
        return gpus.get(user, 0.0) / max((shares or {}).get(user, 1.0), 1e-9)

    ordered = list(first)
    while lines:
        user = min(lines, key=lambda user: (use_of(user), lines[user][-1].arrival))
        taken = lines[user].pop()
        ordered.append(taken)
        gpus[user] = gpus.get(user, 0.0) + taken.request.wanted
        if not lines[user]:
            del lines[user]
    later = [one for one in requests if not (one.responds and one.job.may_start)]
    later.sort(key=lambda one: (one.job.since_unix_s, one.ticket))
    return (*ordered, *later)


def plan_queue(
    node: Node,
    requests: Sequence[WaitingRequest],
    claims: Mapping[str, Claim],
    *,
    now_unix_s: float,
    shares: Mapping[str, float] | None = None,
    seen: Mapping[str, Mapping[str, Claim]] | None = None,
) -> QueuePlan:
    """Return who gets which devices now.

    ``claims`` are all claims of the host. ``seen`` has, by ticket, the claims that block a request that is made inside
    a claim of its own.
    """
    order = order_of_queue(requests, claims, now_unix_s=now_unix_s, shares=shares)
    grants: dict[str, tuple[str, ...]] = {}
    unavailable: dict[str, Mapping[str, Claim]] = {}
    promised: dict[str, Claim] = {}
    reservation: Reservation | None = None
    for one in order:
        if not (one.responds and one.job.may_start):
            continue
        taken = {**(seen or {}).get(one.ticket, claims), **promised}
        if reservation is not None and not _ends_before(one, reservation, now_unix_s):
            taken = {**_reserved(reservation, order, now_unix_s), **taken}
        unavailable[one.ticket] = taken
        if chosen := _devices_for(one, node, taken):
            grants[one.ticket] = chosen
            claim = promise_to(one, now_unix_s)
            promised |= dict.fromkeys(chosen, claim)
        elif reservation is None:
            reservation = _reservation_for(one, node, taken, now_unix_s)
    return QueuePlan(order=order, grants=grants, unavailable=unavailable, reservation=reservation)


def expected_starts(
    node: Node,
    requests: Sequence[WaitingRequest],
    claims: Mapping[str, Claim],
    *,
    now_unix_s: float,
    shares: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return when each request starts if every claim ends at its ``ends_unix_s`` and nothing is added.

    A request whose start depends on a claim without an end is left out.
    """
    starts: dict[str, float] = {}
    waiting, held, time_s = list(requests), dict(claims), now_unix_s
    while waiting:
        plan = plan_queue(node, waiting, held, now_unix_s=time_s, shares=shares)
        for one in plan.order:
            if chosen := plan.grants.get(one.ticket):
                starts[one.ticket] = time_s
                held |= dict.fromkeys(chosen, promise_to(one, time_s))
        waiting = [one for one in waiting if one.ticket not in starts]
        ends = [_end_of(claim, time_s) for claim in held.values()]
        time_s = min(ends, default=math.inf)
        if math.isinf(time_s):
            break
        over = {uuid for uuid, end in zip(held, ends, strict=True) if end <= time_s}
        held = {uuid: claim for uuid, claim in held.items() if uuid not in over}
        node = replace(
            node,
            accelerators=tuple(
                as_idle(device) if device.uuid in over else device for device in node.accelerators
            ),
        )
    return starts


def as_idle(device: Device) -> Device:
    """Return the device as it is when the processes of its claim have exited."""
    return replace(device, processes=(), used_bytes=0, utilization_percent=0)


def promise_to(request: WaitingRequest, now_unix_s: float) -> Claim:
    """Return the claim of a waiting request on the devices that it gets now."""
    lasts_s = request.job.lasts_s
    return Claim(
        pid=request.pid,
        user=request.user,
        command=FIRST_IN_QUEUE,
        since_unix_s=now_unix_s,
        ends_unix_s=None if lasts_s is None else now_unix_s + lasts_s,
        run=request.job.run,
    )


def _by_arrival(request: WaitingRequest) -> tuple[float, str]:
    return request.arrival


def _is_long(request: WaitingRequest, now_unix_s: float) -> bool:
    return now_unix_s - request.job.ready_unix_s >= LONG_WAIT_S


def _devices_for(one: WaitingRequest, node: Node, taken: Mapping[str, Claim]) -> tuple[str, ...]:
    """Return what a request would get now; empty if it cannot be met."""
    free = sum(device.uuid not in taken for device in node.accelerators)
    if free < one.request.wanted:
        return ()  # saves building an error that is not shown
    try:
        chosen = choose_devices(node, one.request, environment=one.environment, claims=taken)
    except (MusterError, TypeError, AttributeError, ValueError):  # any user may have written it
        return ()
    return tuple(device.uuid for device in chosen.value)


def _end_of(claim: Claim, now_unix_s: float) -> float:
    """Return when a claim ends at the latest."""
    if claim.borrowed:
        return now_unix_s + GIVEN_BACK_WITHIN_S
    if claim.ends_unix_s is None or claim.ends_unix_s + _OVERDUE_S < now_unix_s:
        return math.inf
    return max(claim.ends_unix_s, now_unix_s + 1.0)


def _reservation_for(
    one: WaitingRequest, node: Node, taken: Mapping[str, Claim], now_unix_s: float
) -> Reservation | None:
    """Return which devices to keep for a request that cannot be met now; None for none."""
    try:
        offered = device_candidates(node, one.request, one.environment)
        ends = {device.uuid: _available_at(one, device, taken, now_unix_s) for device in offered}
    except (MusterError, TypeError, AttributeError, ValueError):
        return None
    usable = {uuid: end for uuid, end in ends.items() if end is not None}
    if len(usable) < one.request.wanted:
        return None  # no end of a job helps
    at = sorted(usable.values())[one.request.wanted - 1]
    if not math.isinf(at):
        # Of the devices that are free by then, keep those that are freed last: the others stay usable.
        last = sorted(
            (uuid for uuid in usable if usable[uuid] <= at), key=lambda uuid: -usable[uuid]
        )
        return Reservation(ticket=one.ticket, uuids=tuple(last[: one.request.wanted]), at_unix_s=at)
    if not _is_long(one, now_unix_s):
        return None
    free = tuple(uuid for uuid, end in usable.items() if end <= now_unix_s)
    return Reservation(ticket=one.ticket, uuids=free, at_unix_s=None)


def _available_at(
    one: WaitingRequest, device: Device, taken: Mapping[str, Claim], now_unix_s: float
) -> float | None:
    """Return when a request can use a device: infinity if that is unknown, None for never."""
    found = obstacle(device, one.request, {})
    if found is not None and not found.passing:
        return None
    if device.uuid in taken:
        return _end_of(taken[device.uuid], now_unix_s)
    return now_unix_s if found is None else math.inf


def _ends_before(one: WaitingRequest, reservation: Reservation, now_unix_s: float) -> bool:
    """Return whether a request gives its devices back before they are needed."""
    lasts_s, at = one.job.lasts_s, reservation.at_unix_s
    return lasts_s is not None and at is not None and now_unix_s + lasts_s <= at


def _reserved(
    reservation: Reservation, order: Sequence[WaitingRequest], now_unix_s: float
) -> dict[str, Claim]:
    owner = next(one for one in order if one.ticket == reservation.ticket)
    claim = replace(promise_to(owner, now_unix_s), command=RESERVED, ends_unix_s=None)
    return dict.fromkeys(reservation.uuids, claim)
