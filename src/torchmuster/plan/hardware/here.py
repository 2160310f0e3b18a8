"""This machine as hardware: from device drivers, the catalogue and measurements."""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from torchmuster.config.settings import Settings
from torchmuster.devices import snapshot
from torchmuster.devices.claims import Claims
from torchmuster.devices.identify import device_candidates
from torchmuster.devices.model import Device, DeviceKind, LinkKind, Node
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.devices.request import DeviceRequest, GpuId, obstacle
from torchmuster.devices.visibility import visible
from torchmuster.errors import Impossible
from torchmuster.plan.hardware import catalogue
from torchmuster.plan.hardware.catalogue import Gpu, Hardware, Link

# Typical of one core of a current server with AVX2; used if nothing was measured.
_CORE_FLOPS, _CORE_BYTES_S = 60e9, 8e9
_TYPICAL = "typical of a CPU core, not measured"
_LOCAL = Link(latency_s=2e-4, bytes_s=2e9, source="typical of gloo on one machine, not measured")
_ETHERNET = Link(latency_s=5e-5, bytes_s=1.25e9, source="assumed: 10 Gbit/s")
_PCIE = Link(latency_s=2.5e-6, bytes_s=16e9, source="assumed: PCIe 3 x16")


# Lowest NVIDIA compute capability for each dtype; ``muster train`` uses the same.
_BF16, _FAST_FP16 = (8, 0), (7, 0)


def hardware_from_settings(
    settings: Settings,
    *,
    ranks: int | None = None,
    device: Literal["auto", "gpu", "cpu"] = "auto",
    node: Node | None = None,
    environment: Mapping[str, str] | None = None,
) -> Hardware:
    """Return this machine as a run with these settings and ranks would use it."""
    node = node or snapshot.take_snapshot()
    environment = os.environ if environment is None else environment
    wanted = settings.distributed
    ids, count = wanted.gpu_ids, ranks or wanted.num_gpus
    if not wanted.enabled:
        count = 1
    if device == "cpu" or (device == "auto" and settings.model.device_map == "cpu"):
        return _on_cpu(node, ranks if ranks and wanted.enabled else 1, usable_cores().value)
    seen = visible(node.accelerators, environment).devices
    if not seen and not ids and (device == "gpu" or (wanted.num_gpus and not ranks)):
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
    return hardware_here(ranks=count, ids=ids, node=node, environment=environment)


def hardware_here(
    *,
    ranks: int | None = None,
    ids: Sequence[GpuId] | None = None,
    node: Node | None = None,
    cores: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Hardware:
    """Return the visible hardware: accelerators, or the CPU shared by ``ranks`` (default: 1)."""
    node = node or snapshot.take_snapshot()
    environment = os.environ if environment is None else environment
    if not ids and not visible(node.accelerators, environment).devices:
        return _on_cpu(node, ranks or 1, cores or usable_cores().value)
    request = DeviceRequest(ids=None if ids is None else tuple(ids), count=ranks)
    devices = device_candidates(node, request, environment)
    _refuse_too_few(node, devices, ranks)
    found = _on_cards(node, devices[:ranks])
    taken = tuple(_here_taken(devices[:ranks], environment))
    return dataclasses.replace(found, assumed=(*found.assumed, *taken))


def _here_taken(devices: Sequence[Device], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield which GPUs are in use: a plan assumes that they are free."""
    claims = Claims.here(environment).read(one.uuid for one in devices).blocking
    for one in devices:
        if found := obstacle(one, DeviceRequest(), claims):
            yield f"{one.label} is {found.text}; the plan assumes that it is free"


def _on_cpu(node: Node, ranks: int, cores: int) -> Hardware:
    total = node.cpu.total_bytes
    if total is None:
        raise Impossible(
            "cannot plan for this machine",
            why="its memory size could not be read",
            fix="name the hardware: muster plan --hardware 8xH100",
        )
    return Hardware(
        card=Gpu(
            name=node.cpu.name,
            memory_bytes=total // ranks,
            flops={"float32": _CORE_FLOPS * cores / ranks},
            bandwidth_bytes_s=_CORE_BYTES_S * cores / ranks,
            kind="cpu",
            source=_TYPICAL,
        ),
        machines=1,
        cards_per_machine=ranks,
        within=_LOCAL,
        between=_ETHERNET,
        host_memory_bytes=total,
        assumed=(f"{ranks} ranks share {cores} cores and the machine's memory",)
        if ranks > 1
        else (),
    )


def _refuse_too_few(node: Node, devices: Sequence[Device], ranks: int | None) -> None:
    if not devices:
        raise Impossible(
            "cannot plan for this machine",
            why="its GPUs are split into MIG slices, and a process sees at most one slice",
            fix="plan for one slice: --num-gpus 1, or select one, such as --gpu-ids 0:0",
        )
    if ranks and len(devices) < ranks:
        whole = sum(
            one.kind is node.main_kind and one.mig_index is None for one in node.accelerators
        )
        can = f"it has {whole} {'GPU' if whole == 1 else 'GPUs'}"
        raise Impossible(
            f"cannot plan for {ranks} ranks on this machine",
            why=can if whole == len(devices) else f"it can use {len(devices)} of its {whole} GPUs",
            fix="name other hardware, such as 8xH100, or request fewer ranks",
        )


def _on_cards(node: Node, devices: Sequence[Device]) -> Hardware:
    listed = [catalogue.find_gpu(one.name) for one in devices]
    cards = [_card(one, known) for one, known in zip(devices, listed, strict=True)]
    links = [
        known.within if known and _as_usual(known, node, devices) else _PCIE for known in listed
    ]
    card = _least(cards)
    said = []
    if len({one.name for one in cards}) > 1:
        said.append(
            f"{card.name} differ: the plan assumes the smallest memory and the lowest rates for all"
        )
    return Hardware(
        card=card,
        machines=1,
        cards_per_machine=len(devices),
        within=min(links, key=lambda link: link.bytes_s),
        between=_ETHERNET,
        host_memory_bytes=node.cpu.total_bytes,
        assumed=tuple(dict.fromkeys(said)),
    )


def _card(device: Device, known: catalogue.KnownGpu | None) -> Gpu:
    memory = device.usable_bytes
    if memory is None and known is not None:
        memory = known.card.memory_bytes
    if memory is None:
        raise Impossible(
            f"cannot plan for {device.name}",
            why="its memory could not be read, and it is not in the catalogue",
            fix="name a similar GPU: muster plan --hardware NAME",
        )
    rates = f"rates from {known.card.source}" if known else "rates unknown"
    return Gpu(
        name=known.card.name if known else device.name,
        memory_bytes=memory,
        flops=known.card.flops if known else {},
        bandwidth_bytes_s=known.card.bandwidth_bytes_s if known else None,
        kind=str(device.kind),
        source=f"memory as the driver reports it; {rates}",
        number_types=known.card.number_types if known else _number_types(device),
    )


def _number_types(device: Device) -> tuple[str, ...] | None:
    """Return the dtypes that a GPU outside the catalogue computes fast, as training assumes."""
    if device.kind is DeviceKind.ROCM:
        return ("bfloat16", "float16", "float32")
    if device.kind is DeviceKind.MPS:
        return ("float16", "float32")
    capability = device.compute_capability
    if capability is None:
        return None
    names = (("bfloat16", _BF16), ("float16", _FAST_FP16), ("float32", (0, 0)))
    return tuple(name for name, least in names if capability >= least)


def _least(cards: Sequence[Gpu]) -> Gpu:
    """Return a GPU with the lowest memory and rates of all, since all wait for the slowest."""
    rates = [one.bandwidth_bytes_s for one in cards if one.bandwidth_bytes_s is not None]
    types = [set(one.number_types) for one in cards if one.number_types is not None]
    return Gpu(
        name=" and ".join(dict.fromkeys(one.name for one in cards)),
        memory_bytes=min(one.memory_bytes for one in cards),
        flops={
            key: min(one.flops[key] for one in cards)
            for key in cards[0].flops
            if all(key in one.flops for one in cards)
        },
        bandwidth_bytes_s=min(rates) if len(rates) == len(cards) else None,
        kind=cards[0].kind,
        source=" and ".join(dict.fromkeys(one.source for one in cards)),
        number_types=tuple(sorted(set.intersection(*types))) if len(types) == len(cards) else None,
    )


def _as_usual(listed: catalogue.KnownGpu, node: Node, devices: Sequence[Device]) -> bool:
    """Return whether GPUs that usually have NVLink have it here, as far as the driver reports."""
    first = devices[0]
    links = [node.link(first, other) for other in devices[1:]]
    by_nvlink = all(link is None or link.kind is LinkKind.NVLINK for link in links)
    return by_nvlink or not listed.within.source.startswith("NVLink")
