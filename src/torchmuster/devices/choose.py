"""Choose devices: pure functions from a snapshot to a choice and its reason.

Conditions are hard: a device that violates one is never chosen. Of the remaining devices the least
loaded are chosen; ties are broken by: same model and best connected, then more free memory, then
newer architecture, then lowest numbers.
"""

import itertools
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torchmuster.decision import Decision
from torchmuster.devices.identify import device_candidates
from torchmuster.devices.model import Device, LinkKind, Node, label_all
from torchmuster.devices.request import Claim, DeviceRequest, Obstacle, in_use_by, obstacle
from torchmuster.devices.visibility import visible
from torchmuster.errors import DevicesBusy, Impossible, MusterError, TooFewDevices
from torchmuster.finding import Status
from torchmuster.units import GiB, format_bytes, plural

# Up to this many devices are listed one by one; beyond it, devices with the same obstacle together.
_ONE_BY_ONE = 4
_WORDS = {
    LinkKind.PIX: "one PCIe switch",
    LinkKind.PXB: "several PCIe switches",
    LinkKind.PHB: "the CPU's PCIe host bridge",
    LinkKind.NODE: "PCIe within one NUMA node",
    LinkKind.SYS: "PCIe across CPU sockets",
}
# All sets are compared if together they have no more links than this; otherwise sets are grown from
# each possible member.
_EXHAUSTIVE_LINKS = 50_000


@dataclass(frozen=True, kw_only=True)
class DevicesRefused:
    """A request that cannot be met now, with the data to report why and what would work."""

    node: Node
    request: DeviceRequest
    offered: Sequence[Device]
    obstacles: Mapping[str, Obstacle]
    claims: Mapping[str, Claim]
    environment: Mapping[str, str]
    wanted: int

    def error(self) -> MusterError:
        """Return the error to raise: DevicesBusy if waiting can help, else TooFewDevices."""
        able = len(self.offered) - len(self.obstacles)
        lasting = sum(not one.passing for one in self.obstacles.values())
        have = f"{able} available" if able else "none available"
        ways = [shlex.join(["muster", "gpus", "pick", *one.as_flags()]) for one in self.nearest()]
        if len(self.offered) - lasting >= self.wanted:
            waiting = shlex.join(["muster", "gpus", "pick", *self.request.as_flags(), "--wait"])
            return DevicesBusy(
                f"{self.request} requested, {have} now",
                why=self._why(),
                fix="\n".join([waiting, *ways]),
            )
        if not ways:  # a fix for the driver, if the driver is the problem, comes first
            ways = [one.fix for one in self.node.findings if one.status is Status.FAILURE]
            ways.append("run on the CPU: start the program without picking GPUs")
        return TooFewDevices(
            f"{self.request} requested, {have}", why=self._why(), fix="\n".join(ways)
        )

    def nearest(self) -> list[DeviceRequest]:
        """Return the nearest requests that would be granted now.

        One condition is relaxed at a time, as little as possible; if no single one is enough, all
        of them together; the GPU ids are dropped last.
        """
        single = [
            self._with_less_memory(),
            replace(self.request, share=True),
            self._with_fewer(self.request),
        ]
        if self.request.ids is not None:
            single.append(replace(self.request, ids=None, count=self.wanted))
        works = [one for one in dict.fromkeys(single) if one != self.request and self._works(one)]
        if works:
            return works
        bare = replace(self.request, share=True, min_free_bytes=None, min_total_bytes=None)
        loosest = [self._with_fewer(one) for one in (bare, replace(bare, ids=None))]
        return [one for one in loosest if self._works(one)][:1]

    def _with_less_memory(self) -> DeviceRequest:
        """Lower one memory condition, else both, until enough devices meet it."""
        asked = self.request
        free, total = asked.min_free_bytes, asked.min_total_bytes
        for kept_free, kept_total in ((None, total), (free, None), (None, None)):
            bare = replace(asked, min_free_bytes=kept_free, min_total_bytes=kept_total)
            able = self._able(bare)
            if len(able) < self.wanted:
                continue
            lowered = replace(
                asked,
                min_free_bytes=self._lowered(free, [one.free_bytes for one in able]),
                min_total_bytes=self._lowered(total, [one.total_bytes for one in able]),
            )
            if self._works(lowered):
                return lowered
        return asked

    def _lowered(self, asked: int | None, have: Sequence[int | None]) -> int | None:
        last = sorted((one or 0 for one in have), reverse=True)[self.wanted - 1]
        return min(asked or 0, last) or None

    def _with_fewer(self, request: DeviceRequest) -> DeviceRequest:
        # Try 1 even if no device qualifies: a single device may be a MIG slice.
        return replace(request, count=max(min(len(self._able(request)), self.wanted), 1))

    def _able(self, request: DeviceRequest) -> list[Device]:
        offered = device_candidates(self.node, request, self.environment)
        return [one for one in offered if obstacle(one, request, self.claims) is None]

    def _works(self, request: DeviceRequest) -> bool:
        return len(self._able(request)) >= (request.count or self.wanted)

    def _why(self) -> str:
        node = self.node
        if not node.accelerators:
            known = "".join(f"; {one.what}" for one in node.findings)
            return f"no GPU is visible on {node.hostname}{known}"
        shown = visible(node.accelerators, self.environment)
        ours = [one for one in node.accelerators if one.kind is node.main_kind]
        seen = [one for one in ours if one in shown.devices]
        slices = sum(one.mig_index is not None for one in seen)
        text = f"{node.hostname} has {plural(len(seen) - slices, 'GPU')}"
        if slices:
            text += f" and {plural(slices, 'MIG slice')} (one per process)"
        if hidden := {shown.hidden_by[one.uuid] for one in ours if one.uuid in shown.hidden_by}:
            text += f" visible ({', '.join(sorted(hidden))})"
        blocked = [one for one in self.offered if one.uuid in self.obstacles]
        return text + (f"; {describe_refusal(blocked, self.obstacles)}" if blocked else "")


def describe_refusal(devices: Sequence[Device], obstacles: Mapping[str, Obstacle]) -> str:
    """List the obstacles: ``GPU 3 is in use by alice (pid 4242)``."""
    groups: dict[str, list[Device]] = {}
    for one in devices:
        found = obstacles[one.uuid]
        text = found.text if len(devices) <= _ONE_BY_ONE else found.brief
        groups.setdefault(text, []).append(one)
    return "; ".join(
        f"{label_all(group)} {'is' if len(group) == 1 else 'are'} {text}"
        for text, group in groups.items()
    )


def link_strength(node: Node, a: Device, b: Device) -> int:
    """Order links by speed: any NVLink before any PCIe, more lanes before fewer; 0 if unknown."""
    link = node.link(a, b)
    return 0 if link is None else 100 * (1 + link.kind) + link.lanes


def set_strength(node: Node, members: Sequence[Device]) -> tuple[int, int]:
    """Order sets by their weakest link (which limits a ring), then by the sum."""
    strengths = [link_strength(node, a, b) for a, b in itertools.combinations(members, 2)]
    return min(strengths, default=0), sum(strengths)


def describe_link(node: Node, members: Sequence[Device]) -> str:
    """Describe how a set is connected, by its weakest link; empty if unknown."""
    links = [node.link(a, b) for a, b in itertools.combinations(members, 2)]
    known = [link for link in links if link is not None]
    if not known or len(known) < len(links):
        return ""
    weakest = min(known, key=lambda link: (link.kind, link.lanes))
    if weakest.kind is LinkKind.NVLINK:
        return f"connected by NVLink ({weakest.short})"
    return f"connected by {_WORDS[weakest.kind]} ({weakest.short})"


def choose_devices(
    node: Node,
    request: DeviceRequest,
    *,
    environment: Mapping[str, str],
    claims: Mapping[str, Claim] | None = None,
) -> Decision[tuple[Device, ...]]:
    """Choose devices for a request, or raise with the condition that failed and what would work."""
    if request.ids == () or (request.count is not None and request.count < 1):
        raise Impossible(
            "fewer than one GPU requested",
            fix="run on the CPU: start the program without picking GPUs",
        )
    claims = claims or {}
    offered = device_candidates(node, request, environment)
    obstacles = {
        one.uuid: found for one in offered if (found := obstacle(one, request, claims)) is not None
    }
    eligible = [one for one in offered if one.uuid not in obstacles]
    if request.count is not None:
        wanted = request.count
    else:
        wanted = len(offered) if request.ids is not None else len(eligible)
    if len(eligible) < wanted or not eligible:
        refused = DevicesRefused(
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


def device_load(device: Device) -> tuple[bool, int, int]:
    """Return a coarse load of a device (in use, busy, full), so that noise does not decide."""
    return (
        bool(in_use_by(device)),
        (device.utilization_percent or 0) // 10,
        (device.used_bytes or 0) // GiB,
    )


def _best(node: Node, eligible: Sequence[Device], count: int) -> tuple[Device, ...]:
    ranked = sorted(eligible, key=lambda one: (device_load(one), _number(one)))
    limit = device_load(ranked[count - 1])
    sure = [one for one in ranked if device_load(one) < limit]
    equal = [one for one in ranked if device_load(one) == limit]
    best = min(_sets(node, sure, equal, count), key=lambda members: _rank(node, members))
    # In the order in which they were named or made visible, which is torch's numbering.
    members = {one.uuid for one in best}
    return tuple(one for one in eligible if one.uuid in members)


def _sets(
    node: Node, sure: Sequence[Device], equal: Sequence[Device], count: int
) -> Iterator[list[Device]]:
    """Yield the sets to compare: all devices below the load limit, plus some at the limit."""
    missing = count - len(sure)
    if math.comb(len(equal), missing) * math.comb(count, 2) <= _EXHAUSTIVE_LINKS:
        for extra in itertools.combinations(equal, missing):
            yield [*sure, *extra]
    else:
        for seed in equal:
            yield _grow(node, [*sure, seed], [one for one in equal if one is not seed], count)


def _grow(node: Node, members: list[Device], pool: Sequence[Device], count: int) -> list[Device]:
    """Grow a set, each time by the most similar and best connected device."""
    model = members[0].name
    left = {one.uuid: one for one in pool}
    weakest = {one.uuid: min(link_strength(node, one, m) for m in members) for one in pool}
    total = {one.uuid: sum(link_strength(node, one, m) for m in members) for one in pool}
    constant = {one.uuid: (-(one.free_bytes or 0), _number(one)) for one in pool}
    unlike = {one.uuid: one.name != model for one in pool}
    while len(members) < count:
        best = min(
            left, key=lambda uuid: (unlike[uuid], -weakest[uuid], -total[uuid], constant[uuid])
        )
        newest = left.pop(best)
        members.append(newest)
        for uuid, one in left.items():
            added = link_strength(node, one, newest)
            weakest[uuid] = min(weakest[uuid], added)
            total[uuid] += added
    return members


def _rank(node: Node, members: Sequence[Device]) -> tuple[object, ...]:
    """Order sets from best to worst: same model, connection, free memory, generation, number."""
    weakest, total = set_strength(node, members)
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
    request: DeviceRequest,
    offered: Sequence[Device],
    obstacles: Mapping[str, Obstacle],
    chosen: Sequence[Device],
) -> str:
    """Describe the request, the choice, how it is connected, and what was skipped and why."""
    several = len(chosen) > 1
    parts = [
        label_all(chosen),
        " + ".join(sorted({one.name for one in chosen})),
    ]
    free = [one.free_bytes for one in chosen if one.free_bytes is not None]
    if free:
        parts.append(f"{format_bytes(min(free))} free" + (" on each" if several else ""))
    if connection := describe_link(node, chosen):
        parts.append(connection)
    if len(chosen) < len(offered) - len(obstacles):
        parts.append("the least loaded")
    text = f"{request} requested: {', '.join(parts)}"
    blocked = [one for one in offered if one.uuid in obstacles]
    return f"{text}; {describe_refusal(blocked, obstacles)}" if blocked else text
