"""Read AMD GPUs from sysfs, as the amdgpu driver and its compute driver (KFD) describe them.

The order is KFD's, which ROCm's ``ROCR_VISIBLE_DEVICES`` also uses; both leave out a node that KFD
does not let us read (one of another container). ROCm accepts a UUID that starts with
``GPU-``; a GPU without a serial number gets ``ROCM-`` and its PCI address, and ROCm accepts only its index.
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.devices.model import Device, DeviceKind, DeviceProcess
from torchmuster.devices.readers import sysfs
from torchmuster.finding import Finding, Status


@dataclass(frozen=True, kw_only=True)
class KfdNode:
    """A compute device in KFD's topology."""

    gpu_id: int
    properties: Mapping[str, int]
    pci: Path


def kfd_nodes(topology: Path, pci_devices: Path) -> list[KfdNode]:
    """Return the GPUs among KFD's nodes, in its order."""
    nodes = []
    for number in sorted(int(name) for name in sysfs.read_names(topology) if name.isdecimal()):
        folder = topology / str(number)
        # A CPU is also a node, with neither a GPU id nor SIMD units.
        gpu_id = sysfs.read_integer(folder / "gpu_id")
        properties = _properties(folder / "properties") if gpu_id else {}
        if not gpu_id or not properties.get("simd_count"):
            continue
        pci = _pci(properties, pci_devices)
        if pci.is_dir():  # else a further part of a partitioned GPU
            nodes.append(KfdNode(gpu_id=gpu_id, properties=properties, pci=pci))
    return nodes


def _properties(path: Path) -> dict[str, int]:
    properties = {}
    for line in (sysfs.read_text(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if value.isdecimal():
            properties[name] = int(value)
    return properties


def _pci(properties: Mapping[str, int], pci_devices: Path) -> Path:
    location = properties.get("location_id", 0)
    bus, slot, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 7
    return pci_devices / f"{properties.get('domain', 0):04x}:{bus:02x}:{slot:02x}.{function}"


def kfd_holders(folder: Path) -> dict[int, list[DeviceProcess]]:
    """Return, by KFD's GPU id, the processes that hold memory there or have a queue open."""
    holders = defaultdict(list)
    for pid in filter(str.isdecimal, sysfs.read_names(folder)):
        queues = folder / pid / "queues"
        queued = set()
        for queue in sysfs.read_names(queues):
            queued.add(sysfs.read_integer(queues / queue / "gpuid"))
        for entry in sysfs.read_names(folder / pid):
            prefix, _, gpu_id = entry.partition("_")
            if prefix != "vram" or not gpu_id.isdecimal():
                continue
            held = sysfs.read_integer(folder / pid / entry)
            if held or int(gpu_id) in queued:
                process = DeviceProcess(pid=int(pid), compute=True, memory_bytes=held or None)
                holders[int(gpu_id)].append(process)
    return dict(holders)


def read_amd(
    sys_root: Path = Path("/sys"),
    dev_root: Path = Path("/dev"),
) -> tuple[list[Device], list[Finding]]:
    """Return the AMD GPUs that ROCm can use, and findings about what prevents that."""
    addresses = sysfs.pci_addresses(sys_root, "amdgpu")
    if not addresses:
        return [], []
    compute = sys_root / "class/kfd/kfd"
    nodes = kfd_nodes(compute / "topology/nodes", sys_root / "bus/pci/devices")
    if not nodes:
        return [], [_no_compute(addresses)]
    entrance = dev_root / "kfd"
    shut = not os.access(entrance, os.R_OK | os.W_OK)
    holders = kfd_holders(compute / "proc")
    devices = []
    for index, node in enumerate(nodes):
        serial = node.properties.get("unique_id", 0)
        total = sysfs.read_integer(node.pci / "mem_info_vram_total")
        sensors = sysfs.hwmon(node.pci, "amdgpu")
        temperature, limit = sysfs.temperatures(sensors, "junction", "edge")
        device = Device(
            kind=DeviceKind.ROCM,
            index=index,
            uuid=f"GPU-{serial:016x}" if serial else f"ROCM-{node.pci.name}",
            name=_name(node),
            pci_bus_id=node.pci.name,
            total_bytes=total,
            used_bytes=sysfs.read_integer(node.pci / "mem_info_vram_used"),
            utilization_percent=sysfs.read_percent(node.pci / "gpu_busy_percent"),
            temperature_c=temperature,
            slowdown_temperature_c=limit,
            power_w=sysfs.watts(sensors, "power1_average", "power1_input"),
            power_limit_w=sysfs.watts(sensors, "power1_cap"),
            processes=tuple(holders.get(node.gpu_id, ())),
            trouble=f"{entrance} cannot be opened" if shut else None,
        )
        devices.append(device)
    return devices, [_shut(entrance, devices)] if shut else []


def _name(node: KfdNode) -> str:
    """Return the board's name, else the device id."""
    device_id = node.properties.get("device_id", 0)
    return sysfs.read_text(node.pci / "product_name") or f"AMD GPU 0x{device_id:04x}"


def _no_compute(addresses: Sequence[str]) -> Finding:
    return Finding(
        name="rocm-sees-no-gpu",
        status=Status.NOTE,
        what=f"ROCm cannot use the AMD GPUs of this host ({', '.join(addresses)})",
        why="the kernel's compute driver (/sys/class/kfd) shows none of them to this process: the "
        "GPU is too old, the kernel was built without CONFIG_HSA_AMD, or this container has no "
        "access to it",
        fix="in a container: --device=/dev/kfd --device=/dev/dri",
    )


def _shut(entrance: Path, devices: Sequence[Device]) -> Finding:
    return Finding(
        name="kfd-cannot-be-opened",
        status=Status.WARNING,
        what=f"this user may not use {', '.join(device.label for device in devices)}",
        why=f"ROCm accesses every AMD GPU through {entrance}, which cannot be opened",
        fix='sudo usermod -aG render,video "$USER"  # then log in again; '
        "in a container: --device=/dev/kfd --device=/dev/dri",
    )
