"""A snapshot as plain JSON types, for ``--json`` and for files. The keys are a contract."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torchmuster.devices.model import Device, Node
from torchmuster.devices.request import Claim, in_use_by
from torchmuster.devices.visibility import Visible
from torchmuster.units import MiB


def node_as_json(node: Node, shown: Visible, claims: Mapping[str, Claim]) -> dict[str, Any]:
    """Return everything that is known about a host's devices."""
    return {
        "hostname": node.hostname,
        "taken_unix_s": node.taken_unix_s,
        "driver_version": node.driver_version,
        "cuda_version": node.cuda_version,
        "accelerators": [_device(device, shown, claims) for device in node.accelerators],
        "cpu": _plain(node.cpu),
        "links": [asdict(link) | {"kind": link.short} for link in node.links],
        "findings": [finding.as_json() for finding in (*node.findings, *shown.findings)],
    }


def _device(device: Device, shown: Visible, claims: Mapping[str, Claim]) -> dict[str, Any]:
    claim = claims.get(device.uuid)
    return {
        **_plain(device),
        "visible": device in shown.devices,
        "hidden_by": shown.hidden_by.get(device.uuid),
        "in_use": bool(in_use_by(device)),
        "claim": asdict(claim) if claim else None,
    }


def _plain(device: Device) -> dict[str, Any]:
    return {**asdict(device), "number": device.number, "free_bytes": device.free_bytes}


def device_numbers(device: Device) -> dict[str, float]:
    """Return the current measurements of a device; unreadable ones are left out."""
    numbers = {
        "utilization_percent": device.utilization_percent,
        "temperature_c": device.temperature_c,
        "power_w": device.power_w,
        "used_memory_mb": None if device.used_bytes is None else device.used_bytes / MiB,
    }
    known = {name: number for name, number in numbers.items() if number is not None}
    return {f"gpu {device.number}/{name}": float(number) for name, number in known.items()}
