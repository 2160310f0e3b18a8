"""Choose devices: pure functions from a snapshot to a choice and its reason.

Conditions are hard: a device that violates one is never chosen. Of the remaining devices the least
loaded are chosen; ties are broken by: same model and best connected, then more free memory, then
newer architecture, then lowest numbers.
"""

import itertools
from collections.abc import Mapping, Sequence

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
_LINK_TEXTS = {
    LinkKind.PIX: "one PCIe switch",
    LinkKind.PXB: "several PCIe switches",
    LinkKind.PHB: "the CPU's PCIe host bridge",
    LinkKind.NODE: "PCIe within one NUMA node",
    LinkKind.SYS: "PCIe across CPU sockets",
}


def choose_devices(
    node: Node,
    request: DeviceRequest,
    *,
    environment: Mapping[str, str],
    claims: Mapping[str, Claim] | None = None,
) -> Decision[tuple[Device, ...]]:
    """Choose devices for a request, or raise with the condition that failed.

    Raises ``DevicesBusy`` if waiting can help, else ``TooFewDevices``.
    """
    if request.ids == () or (request.count is not None and request.count < 1):
        raise Impossible(
            "fewer than one GPU requested",
            fix="run on the CPU: --device cpu",
        )
    offered = device_candidates(node, request, environment)
    obstacles = {}
    for device in offered:
        problem = obstacle(device, request, claims or {})
        if problem is not None:
            obstacles[device.uuid] = problem
    eligible = [device for device in offered if device.uuid not in obstacles]
    wanted = request.count
    if wanted is None:
        wanted = len(eligible) if request.ids is None else len(offered)
    if len(eligible) < wanted or not eligible:
        raise _refusal(node, request, offered, obstacles, max(wanted, 1), environment)
    chosen = _best(node, eligible, wanted)
    return Decision(value=chosen, reason=_reason(node, request, offered, obstacles, chosen))


def _refusal(
    node: Node,
    request: DeviceRequest,
    offered: Sequence[Device],
    obstacles: Mapping[str, Obstacle],
    wanted: int,
    environment: Mapping[str, str],
) -> MusterError:
    able = len(offered) - len(obstacles)
    what = f"{request} requested, {able or 'none'} available"
    why = _why_refused(node, offered, obstacles, environment)
    fixes = [f"request {plural(able, 'GPU')}: --num-gpus {able}"] if able else []
    lasting = [problem for problem in obstacles.values() if not problem.passing]
    if len(offered) - len(lasting) >= wanted:
        fixes = ["wait for them: --wait", *fixes]
        return DevicesBusy(f"{what} now", why=why, fix="\n".join(fixes))
    if not fixes:  # a fix for the driver, if the driver is the problem, comes first
        broken = (finding for finding in node.findings if finding.status is Status.FAILURE)
        fixes = [finding.fix for finding in broken]
        fixes.append("run on the CPU: --device cpu")
    return TooFewDevices(what, why=why, fix="\n".join(fixes))


def _why_refused(
    node: Node,
    offered: Sequence[Device],
    obstacles: Mapping[str, Obstacle],
    environment: Mapping[str, str],
) -> str:
    if not node.accelerators:
        known = "".join(f"; {finding.what}" for finding in node.findings)
        return f"no GPU is visible on {node.hostname}{known}"
    shown = visible(node.accelerators, environment)
    whole = [device for device in shown.devices if device.mig_index is None]
    text = f"{node.hostname} has {plural(len(whole), 'GPU')}"
    slices = len(shown.devices) - len(whole)
    if slices:
        text += f" and {plural(slices, 'MIG slice')} (one per process)"
    if shown.hidden_by:
        text += f" visible ({', '.join(sorted(set(shown.hidden_by.values())))})"
    blocked = [device for device in offered if device.uuid in obstacles]
    if blocked:
        text += f"; {describe_refusal(blocked, obstacles)}"
    return text


def describe_refusal(devices: Sequence[Device], obstacles: Mapping[str, Obstacle]) -> str:
    """List the obstacles: ``GPU 3: in use by alice (pid 4242)``."""
    groups: dict[str, list[Device]] = {}
    for device in devices:
        problem = obstacles[device.uuid]
        text = problem.text if len(devices) <= _ONE_BY_ONE else problem.brief
        groups.setdefault(text, []).append(device)
    return "; ".join(f"{label_all(group)}: {text}" for text, group in groups.items())


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
    return f"connected by {_LINK_TEXTS[weakest.kind]} ({weakest.short})"


def device_load(device: Device) -> tuple[bool, int, int]:
    """Return a coarse load of a device (in use, busy, full), so that noise does not decide."""
    return (
        bool(in_use_by(device)),
        (device.utilization_percent or 0) // 10,
        (device.used_bytes or 0) // GiB,
    )


def _best(node: Node, eligible: Sequence[Device], count: int) -> tuple[Device, ...]:
    """Return the least loaded devices; of equal ones the best set that grows from one of them."""
    ranked = sorted(eligible, key=lambda device: (device_load(device), _number(device)))
    limit = device_load(ranked[count - 1])
    certain = [device for device in ranked if device_load(device) < limit]
    equal = [device for device in ranked if device_load(device) == limit]
    candidates = []
    for start in equal:
        members = [*certain, start]
        while len(members) < count:
            left = [device for device in equal if device not in members]
            members.append(min(left, key=lambda device: _rank(node, [*members, device])))
        candidates.append(members)
    best = min(candidates, key=lambda members: _rank(node, members))
    # In the order in which they were named or made visible, which is torch's numbering.
    return tuple(device for device in eligible if device in best)


def _rank(node: Node, members: Sequence[Device]) -> tuple[object, ...]:
    """Order sets from best to worst: same model, connection, free memory, generation, number."""
    weakest, total = set_strength(node, members)
    models = {(device.kind, device.name, device.total_bytes) for device in members}
    free_gib = min((device.free_bytes or 0) // GiB for device in members)
    # The oldest member first: the others wait for it.
    generations = sorted(device.compute_capability or (0, 0) for device in members)
    newest_first = [(-major, -minor) for major, minor in generations]
    numbers = sorted(_number(device) for device in members)
    return len(models), -weakest, -total, -free_gib, newest_first, numbers


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
    models = sorted({device.name for device in chosen})
    parts = [label_all(chosen), " + ".join(models)]
    free = [device.free_bytes for device in chosen if device.free_bytes is not None]
    if free:
        each = " on each" if len(chosen) > 1 else ""
        parts.append(f"{format_bytes(min(free))} free{each}")
    connection = describe_link(node, chosen)
    if connection:
        parts.append(connection)
    if len(chosen) < len(offered) - len(obstacles):
        parts.append("the least loaded")
    text = f"{request} requested: {', '.join(parts)}"
    blocked = [device for device in offered if device.uuid in obstacles]
    return f"{text}; {describe_refusal(blocked, obstacles)}" if blocked else text
