"""Which devices to take: pure functions from a snapshot to a choice and its reason.

Conditions are hard: a device that breaks one is never chosen. Of the devices that remain, the least
loaded are taken; where load leaves a choice, the set that is alike and best connected, then the one
with more free memory, then the newer architecture, then the lowest numbers.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from torchmuster.decision import Decision
from torchmuster.devices import refusal, topology
from torchmuster.devices.conditions import Obstacle, in_use_by, obstacle
from torchmuster.devices.identify import candidates
from torchmuster.devices.model import Device, Node, label_all
from torchmuster.devices.request import Claim, Request
from torchmuster.errors import Impossible
from torchmuster.units import GiB, format_bytes

# Sets are compared one by one while all of them together have no more links than this; beyond, sets
# are grown from each possible member.
_EXHAUSTIVE_LINKS = 50_000


def choose(
    node: Node,
    request: Request,
    *,
    environment: Mapping[str, str],
    claims: Mapping[str, Claim] | None = None,
) -> Decision[tuple[Device, ...]]:
    """Choose devices for a request, or raise with the condition that failed and what would work."""
    if request.ids == () or (request.count is not None and request.count < 1):
        raise Impossible(
            "asked for fewer than one GPU",
            fix="run on the CPU: start the program without picking GPUs",
        )
    claims = claims or {}
    offered = candidates(node, request, environment)
    obstacles = {
        one.uuid: found for one in offered if (found := obstacle(one, request, claims)) is not None
    }
    eligible = [one for one in offered if one.uuid not in obstacles]
    if request.count is not None:
        wanted = request.count
    else:
        wanted = len(offered) if request.ids is not None else len(eligible)
    if len(eligible) < wanted or not eligible:
        refused = refusal.Refused(
            node=node,
            request=request,
            offered=offered,
            obstacles=obstacles,
            claims=claims,
            environment=environment,
            wanted=max(wanted, 1),
        )
        raise refused.error()
    chosen = _best(node, eligible, wanted)
    return Decision(value=chosen, reason=_reason(node, request, offered, obstacles, chosen))


def load(device: Device) -> tuple[bool, int, int]:
    """How loaded a device is, coarsely, so that noise decides nothing: in use, busy, full."""
    return (
        bool(in_use_by(device)),
        (device.utilisation_percent or 0) // 10,
        (device.used_bytes or 0) // GiB,
    )


def _best(node: Node, eligible: Sequence[Device], count: int) -> tuple[Device, ...]:
    ranked = sorted(eligible, key=lambda one: (load(one), _number(one)))
    limit = load(ranked[count - 1])
    sure = [one for one in ranked if load(one) < limit]
    equal = [one for one in ranked if load(one) == limit]
    best = min(_sets(node, sure, equal, count), key=lambda members: _rank(node, members))
    # In the order in which they were named or made visible: that is how torch will number them.
    members = {one.uuid for one in best}
    return tuple(one for one in eligible if one.uuid in members)


def _sets(
    node: Node, sure: Sequence[Device], equal: Sequence[Device], count: int
) -> Iterator[list[Device]]:
    """Yield the sets worth comparing: all devices below the load limit, and some that are at it."""
    missing = count - len(sure)
    if math.comb(len(equal), missing) * math.comb(count, 2) <= _EXHAUSTIVE_LINKS:
        for extra in itertools.combinations(equal, missing):
            yield [*sure, *extra]
    else:
        for seed in equal:
            yield _grow(node, [*sure, seed], [one for one in equal if one is not seed], count)


def _grow(node: Node, members: list[Device], pool: Sequence[Device], count: int) -> list[Device]:
    """Grow a set, each time by the device that is most like it and best connected to it."""
    model = members[0].name
    left = {one.uuid: one for one in pool}
    weakest = {one.uuid: min(topology.strength(node, one, m) for m in members) for one in pool}
    total = {one.uuid: sum(topology.strength(node, one, m) for m in members) for one in pool}
    constant = {one.uuid: (-(one.free_bytes or 0), _number(one)) for one in pool}
    unlike = {one.uuid: one.name != model for one in pool}
    while len(members) < count:
        best = min(
            left, key=lambda uuid: (unlike[uuid], -weakest[uuid], -total[uuid], constant[uuid])
        )
        newest = left.pop(best)
        members.append(newest)
        for uuid, one in left.items():
            added = topology.strength(node, one, newest)
            weakest[uuid] = min(weakest[uuid], added)
            total[uuid] += added
    return members


def _rank(node: Node, members: Sequence[Device]) -> tuple[object, ...]:
    """Order sets from best to worst: alike, connected, roomy, modern, low numbers."""
    weakest, total = topology.set_strength(node, members)
    return (
        len({(one.kind, one.name, one.total_bytes) for one in members}),
        -weakest,
        -total,
        -min((one.free_bytes or 0) // GiB for one in members),
        # The oldest member first: the others wait for it.
        [
            (-major, -minor)
            for major, minor in sorted(one.compute_capability or (0, 0) for one in members)
        ],
        sorted(_number(one) for one in members),
    )


def _number(device: Device) -> tuple[str, tuple[int, int]]:
    return device.kind, device.place


def _reason(
    node: Node,
    request: Request,
    offered: Sequence[Device],
    obstacles: Mapping[str, Obstacle],
    chosen: Sequence[Device],
) -> str:
    """Say what was asked, what was chosen, how it is joined, and what was passed over and why."""
    several = len(chosen) > 1
    parts = [
        label_all(chosen),
        " + ".join(sorted({one.name for one in chosen})),
    ]
    free = [one.free_bytes for one in chosen if one.free_bytes is not None]
    if free:
        parts.append(f"{format_bytes(min(free))} free" + (" on each" if several else ""))
    if connection := topology.in_words(node, chosen):
        parts.append(connection)
    if len(chosen) < len(offered) - len(obstacles):
        parts.append("the least loaded")
    text = f"asked for {request}: {', '.join(parts)}"
    blocked = [one for one in offered if one.uuid in obstacles]
    return f"{text}; {refusal.in_words(blocked, obstacles)}" if blocked else text
