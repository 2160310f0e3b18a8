"""This machine as hardware: from device drivers and the catalogue."""

import os
from collections.abc import Sequence
from dataclasses import replace

from torchmuster.config.settings import Settings
from torchmuster.devices import snapshot
from torchmuster.devices.identify import device_candidates
from torchmuster.devices.model import Device, DeviceKind, LinkKind, Node
from torchmuster.devices.request import DeviceRequest
from torchmuster.devices.visibility import visible
from torchmuster.errors import Impossible
from torchmuster.plan.hardware import catalogue
from torchmuster.plan.hardware.catalogue import Gpu, Hardware

_ETHERNET_BYTES_S = 1.25e9  # 10 Gbit/s
_PCIE_BYTES_S = 16e9  # PCIe 3 x16
# Lowest NVIDIA compute capability for each dtype; ``muster train`` uses the same.
_CAPABILITIES = {"bfloat16": (8, 0), "float16": (7, 0), "float32": (0, 0)}


def hardware_here(settings: Settings, *, ranks: int | None = None) -> Hardware:
    """Return this machine as a run with these settings and ranks would use it."""
    node, wanted = snapshot.take_snapshot(), settings.distributed
    if settings.model.device_map == "cpu":
        return _on_cpu(node, ranks if ranks and wanted.enabled else 1)
    seen = visible(node.accelerators, os.environ).devices
    if not seen and not wanted.gpu_ids and wanted.num_gpus and not ranks:
        raise Impossible(
            "cannot plan for GPUs of this machine",
            why="no GPU is visible here",
            fix="name the hardware, such as --hardware 8xH100, or --ranks N for this machine's CPU",
        )
    if seen and ranks and wanted.num_gpus and ranks != wanted.num_gpus:
        raise Impossible(
            f"--ranks {ranks} conflicts with {wanted.num_gpus} GPUs",
            why="each GPU gets one rank",
            fix="give only one of the two",
        )
    count = ranks or wanted.num_gpus if wanted.enabled else 1
    if not wanted.gpu_ids and not seen:
        return _on_cpu(node, count or 1)
    ids = None if wanted.gpu_ids is None else tuple(wanted.gpu_ids)
    devices = device_candidates(node, DeviceRequest(ids=ids, count=count), os.environ)
    _refuse_too_few(node, devices, count)
    return _on_cards(node, devices[:count])


def _on_cpu(node: Node, ranks: int) -> Hardware:
    total = node.cpu.total_bytes
    if total is None:
        raise Impossible(
            "cannot plan for this machine",
            why="its memory size could not be read",
            fix="name the hardware: muster plan --hardware 8xH100",
        )
    assumed = (f"{ranks} ranks share the machine's memory",) if ranks > 1 else ()
    return Hardware(
        card=Gpu(
            name=node.cpu.name,
            memory_bytes=total // ranks,
            flops={},
            bandwidth_bytes_s=None,
            kind="cpu",
            source="memory as the system reports it",
        ),
        machines=1,
        cards_per_machine=ranks,
        within_bytes_s=_PCIE_BYTES_S,
        between_bytes_s=_ETHERNET_BYTES_S,
        host_memory_bytes=total,
        assumed=assumed,
    )


def _refuse_too_few(node: Node, devices: Sequence[Device], ranks: int | None) -> None:
    if not devices:
        raise Impossible(
            "cannot plan for this machine",
            why="its GPUs are split into MIG slices, and a process sees at most one slice",
            fix="plan for one slice: --num-gpus 1, or select one, such as --gpu-ids 0:0",
        )
    if ranks and len(devices) < ranks:
        whole = 0
        for device in node.accelerators:
            whole += device.kind is node.main_kind and device.mig_index is None
        why = f"it has {whole} {'GPU' if whole == 1 else 'GPUs'}"
        if whole != len(devices):
            why = f"it can use {len(devices)} of its {whole} GPUs"
        raise Impossible(
            f"cannot plan for {ranks} ranks on this machine",
            why=why,
            fix="name other hardware, such as 8xH100, or request fewer ranks",
        )


def _on_cards(node: Node, devices: Sequence[Device]) -> Hardware:
    """Return GPUs as equal ones: all as the one with the least memory."""
    cards: list[Gpu] = []
    links = []
    for device in devices:
        known = catalogue.find_gpu(device.name)
        cards.append(_card(device, known))
        as_usual = known is not None and (not known.has_nvlink or _by_nvlink(node, devices))
        links.append(known.within_bytes_s if known and as_usual else _PCIE_BYTES_S)
    card = min(cards, key=lambda card: card.memory_bytes)
    names = sorted({other.name for other in cards})
    assumed: tuple[str, ...] = ()
    if len(names) > 1:
        assumed = (f"{' and '.join(names)} differ: the plan assumes {card.name} for all",)
    return Hardware(
        card=card,
        machines=1,
        cards_per_machine=len(devices),
        within_bytes_s=min(links),
        between_bytes_s=_ETHERNET_BYTES_S,
        host_memory_bytes=node.cpu.total_bytes,
        assumed=assumed,
    )


def _by_nvlink(node: Node, devices: Sequence[Device]) -> bool:
    """Return whether GPUs are connected by NVLink, as far as the driver reports."""
    links = [node.link(devices[0], other) for other in devices[1:]]
    return all(link is None or link.kind is LinkKind.NVLINK for link in links)


def _card(device: Device, known: catalogue.KnownGpu | None) -> Gpu:
    memory = device.usable_bytes
    if known is not None:
        card = known.card
        source = f"memory as the driver reports it; rates from {card.source}"
        return replace(card, memory_bytes=memory or card.memory_bytes, source=source)
    if memory is None:
        raise Impossible(
            f"cannot plan for {device.name}",
            why="its memory could not be read, and it is not in the catalogue",
            fix="name a similar GPU: muster plan --hardware NAME",
        )
    return Gpu(
        name=device.name,
        memory_bytes=memory,
        flops={},
        bandwidth_bytes_s=None,
        kind=str(device.kind),
        source="memory as the driver reports it; rates unknown",
        number_types=_number_types(device),
    )


def _number_types(device: Device) -> tuple[str, ...] | None:
    """Return the dtypes that a GPU outside the catalogue computes fast, as training assumes."""
    if device.kind is DeviceKind.ROCM:
        return tuple(_CAPABILITIES)
    if device.kind is DeviceKind.MPS:
        return ("float16", "float32")
    capability = device.compute_capability
    if capability is None:
        return None
    return tuple(name for name, least in _CAPABILITIES.items() if capability >= least)
