"""This machine as hardware: from device drivers and the catalogue."""

import os
from collections.abc import Sequence
from dataclasses import replace

from torchmuster.config.settings import Settings
from torchmuster.devices import snapshot
from torchmuster.devices.identify import device_candidates
from torchmuster.devices.model import Device, Node
from torchmuster.devices.request import DeviceRequest
from torchmuster.devices.visibility import visible
from torchmuster.errors import Impossible
from torchmuster.plan.hardware import catalogue
from torchmuster.plan.hardware.catalogue import Gpu, Hardware
from torchmuster.units import plural


def hardware_here(settings: Settings, *, ranks: int | None = None) -> Hardware:
    """Return this machine as a run with these settings and ranks would use it."""
    node, wanted = snapshot.take_snapshot(), settings.distributed
    if settings.model.device_map == "cpu":
        return _on_cpu(node, ranks if ranks and wanted.enabled else 1)
    count = ranks or wanted.num_gpus if wanted.enabled else 1
    ids = None if wanted.gpu_ids is None else tuple(wanted.gpu_ids)
    seen = visible(node.accelerators, os.environ).devices
    if not seen and ids is None and (ranks or not wanted.num_gpus):
        return _on_cpu(node, count or 1)
    devices = device_candidates(node, DeviceRequest(ids=ids, count=count), os.environ)
    if len(devices) < (count or 1):
        raise Impossible(
            f"cannot plan for {plural(count or 1, 'rank')} on GPUs of this machine",
            why=f"{plural(len(devices), 'GPU')} can be used; of a GPU in MIG mode one slice at most",
            fix="request fewer: --num-gpus N; name hardware: --hardware 8xH100; or plan for the "
            "CPU: --set model.device_map=cpu",
        )
    return _on_cards(node, devices[:count])


def _on_cpu(node: Node, ranks: int) -> Hardware:
    total = node.cpu.total_bytes
    if total is None:
        raise Impossible(
            "cannot plan for this machine",
            why="its memory size could not be read",
            fix="name the hardware: muster plan --hardware 8xH100",
        )
    card = Gpu(
        name=node.cpu.name,
        memory_bytes=total // ranks,
        flops={},
        bandwidth_bytes_s=None,
        kind="cpu",
        source="memory as the system reports it, shared by all ranks",
    )
    return Hardware(card=card, machines=1, cards_per_machine=ranks, host_memory_bytes=total)


def _on_cards(node: Node, devices: Sequence[Device]) -> Hardware:
    """Return GPUs as equal ones: all as the one with the least memory."""
    cards = [_card(device) for device in devices]
    card = min(cards, key=lambda card: card.memory_bytes)
    assumed: tuple[str, ...] = ()
    if len({other.name for other in cards}) > 1:
        assumed = (f"the GPUs differ: the plan assumes {card.name} for all",)
    return Hardware(
        card=card,
        machines=1,
        cards_per_machine=len(devices),
        host_memory_bytes=node.cpu.total_bytes,
        assumed=assumed,
    )


def _card(device: Device) -> Gpu:
    known, memory = catalogue.find_gpu(device.name), device.usable_bytes
    if known is not None:
        source = f"memory as the driver reports it; rates from {known.source}"
        return replace(known, memory_bytes=memory or known.memory_bytes, source=source)
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
    )
