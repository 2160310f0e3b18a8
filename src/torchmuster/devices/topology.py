"""How devices are joined: the strength of a link, and of a set, in numbers and in words."""

import itertools
from collections.abc import Sequence

from torchmuster.devices.model import Device, LinkKind, Node

_WORDS = {
    LinkKind.PIX: "one PCIe switch",
    LinkKind.PXB: "several PCIe switches",
    LinkKind.PHB: "the CPU's PCIe host bridge",
    LinkKind.NODE: "PCIe within one NUMA node",
    LinkKind.SYS: "PCIe across CPU sockets",
}


def strength(node: Node, a: Device, b: Device) -> int:
    """Order links by speed: any NVLink before any PCIe, more lanes before fewer; 0 if unknown."""
    link = node.link(a, b)
    return 0 if link is None else 100 * (1 + link.kind) + link.lanes


def set_strength(node: Node, members: Sequence[Device]) -> tuple[int, int]:
    """Order sets: first by the weakest link (a ring is as fast as that), then by the sum."""
    strengths = [strength(node, a, b) for a, b in itertools.combinations(members, 2)]
    return min(strengths, default=0), sum(strengths)


def in_words(node: Node, members: Sequence[Device]) -> str:
    """Say how a set is joined, by its weakest link; empty if that is not known."""
    links = [node.link(a, b) for a, b in itertools.combinations(members, 2)]
    known = [link for link in links if link is not None]
    if not known or len(known) < len(links):
        return ""
    weakest = min(known, key=lambda link: (link.kind, link.lanes))
    if weakest.kind is LinkKind.NVLINK:
        return f"joined by NVLink ({weakest.short})"
    return f"joined by {_WORDS[weakest.kind]} ({weakest.short})"
