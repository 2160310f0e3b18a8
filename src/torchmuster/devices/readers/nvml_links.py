"""How NVIDIA GPUs are joined, as NVML tells: NVLink, direct or through switches, else PCIe."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pynvml

from torchmuster.devices.model import Device, Link, LinkKind
from torchmuster.devices.readers.nvml_ask import Unreachable, ask

_PCIE_LEVELS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: LinkKind.PIX,
    pynvml.NVML_TOPOLOGY_SINGLE: LinkKind.PIX,
    pynvml.NVML_TOPOLOGY_MULTIPLE: LinkKind.PXB,
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: LinkKind.PHB,
    pynvml.NVML_TOPOLOGY_NODE: LinkKind.NODE,
    pynvml.NVML_TOPOLOGY_SYSTEM: LinkKind.SYS,
}


def read_links(devices: Sequence[Device], handles: Mapping[str, Any]) -> Iterator[Link]:
    """Yield the best path of every pair of whole GPUs that answer."""
    joined = [one for one in devices if not one.mig_enabled and not one.trouble]
    lanes = {one.uuid: _count_nvlinks(handles[one.uuid]) for one in joined}
    gpus = {_bus_key(one.pci_bus_id or "") for one in devices}
    for a, b in itertools.combinations(joined, 2):
        direct = lanes[a.uuid].get(_bus_key(b.pci_bus_id or ""), 0)
        # What both reach and is no GPU is a switch; a GPU between two others passes nothing on.
        switches = (lanes[a.uuid].keys() & lanes[b.uuid].keys()) - gpus
        switched = sum(min(lanes[a.uuid][one], lanes[b.uuid][one]) for one in switches)
        if direct + switched:
            yield Link(a=a.uuid, b=b.uuid, kind=LinkKind.NVLINK, lanes=direct + switched)
            continue
        try:
            level = ask(
                pynvml.nvmlDeviceGetTopologyCommonAncestor, handles[a.uuid], handles[b.uuid]
            )
        except Unreachable:
            continue
        if level in _PCIE_LEVELS:
            yield Link(a=a.uuid, b=b.uuid, kind=_PCIE_LEVELS[level])


def _count_nvlinks(handle: Any) -> dict[str, int]:
    """Count a device's active NVLinks by what is at the other end: a GPU or a switch, by its bus."""
    counts: dict[str, int] = {}
    try:
        for lane in range(pynvml.NVML_NVLINK_MAX_LINKS):
            state = ask(pynvml.nvmlDeviceGetNvLinkState, handle, lane)
            if state is None:
                break  # lanes are numbered without gaps
            remote = ask(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, lane) if state else None
            if remote is not None:
                end = _bus_key(remote.busId)
                counts[end] = counts.get(end, 0) + 1
    except Unreachable:
        return {}
    return counts


def _bus_key(bus_id: str) -> str:
    """PCI addresses come with four or eight digits of domain and in either case."""
    domain, _, address = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{address}"
