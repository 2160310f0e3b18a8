"""Read AMD GPUs from sysfs, as the amdgpu driver and its compute driver (KFD) describe them.

The order is KFD's, which ROCm's ``ROCR_VISIBLE_DEVICES`` also uses; both leave out a node that KFD
does not let us read (one of another container). ROCm accepts a UUID that starts with
``GPU-``; a GPU without a serial number, or a part of a partitioned one, gets ``ROCM-`` and its PCI
address, and ROCm accepts only its index.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.devices.model import Device, DeviceKind, DeviceProcess, Ecc
from torchmuster.devices.readers import sysfs
from torchmuster.finding import Finding, Status

_LOCAL_HEAPS = (1, 2)
# Installed by libdrm, which ROCm needs; the first path is that of AMD's own packages.
NAME_TABLES = (
    Path("/opt/amdgpu/share/libdrm/amdgpu.ids"),
    Path("/usr/share/libdrm/amdgpu.ids"),
)


@dataclass(frozen=True, kw_only=True)
class KfdNode:
    """A compute device in KFD's topology: a PCI device, or a part of a partitioned one."""

    number: int
    gpu_id: int
    properties: Mapping[str, int]
    pci: Path
    local_bytes: int


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
        local_bytes = 0
        for bank in sysfs.read_names(folder / "mem_banks"):
            memory = _properties(folder / "mem_banks" / bank / "properties")
            if memory.get("heap_type") in _LOCAL_HEAPS:
                local_bytes += memory.get("size_in_bytes", 0)
        node = KfdNode(
            number=number,
            gpu_id=gpu_id,
            properties=properties,
            pci=_pci(properties, pci_devices),
            local_bytes=local_bytes,
        )
        nodes.append(node)
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
    card = f"{properties.get('domain', 0):04x}:{bus:02x}:{slot:02x}"
    exact = pci_devices / f"{card}.{function}"
    # In a partitioned GPU the function counts the parts, and only the first is a PCI device.
    return exact if exact.is_dir() else pci_devices / f"{card}.0"


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
    name_tables: Sequence[Path] = NAME_TABLES,
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
    parts = Counter(node.pci for node in nodes)
    serials = Counter(node.properties.get("unique_id", 0) for node in nodes)
    holders = kfd_holders(compute / "proc")
    devices = []
    for index, node in enumerate(nodes):
        part = f"-{node.number}" if parts[node.pci] > 1 else ""
        serial = node.properties.get("unique_id", 0)
        unique = serial and serials[serial] == 1
        total, used = (node.local_bytes or None, None) if part else _memory(node)
        sensors = sysfs.hwmon(node.pci, "amdgpu")
        temperature, limit = sysfs.temperatures(sensors, "junction", "edge")
        device = Device(
            kind=DeviceKind.ROCM,
            index=index,
            uuid=f"GPU-{serial:016x}" if unique else f"ROCM-{node.pci.name}{part}",
            name=_name(node, name_tables),
            pci_bus_id=node.pci.name,
            numa_node=sysfs.numa_node(node.pci),
            total_bytes=total,
            used_bytes=used,
            utilization_percent=sysfs.read_percent(node.pci / "gpu_busy_percent"),
            temperature_c=temperature,
            slowdown_temperature_c=limit,
            power_w=sysfs.watts(sensors, "power1_average", "power1_input"),
            power_limit_w=sysfs.watts(sensors, "power1_cap"),
            ecc=_ecc(node.pci / "ras"),
            processes=tuple(holders.get(node.gpu_id, ())),
            trouble=f"{entrance} cannot be opened" if shut else None,
        )
        devices.append(device)
    return devices, [_shut(entrance, devices)] if shut else []


def _memory(node: KfdNode) -> tuple[int | None, int | None]:
    """Return total and used bytes of the memory that ROCm allocates from."""
    total = sysfs.read_integer(node.pci / "mem_info_vram_total")
    if total is not None and node.local_bytes > total:
        # An APU: since Linux 6.10 ROCm ignores the small carve-out and uses system memory.
        return node.local_bytes, sysfs.read_integer(node.pci / "mem_info_gtt_used")
    return total or node.local_bytes or None, sysfs.read_integer(node.pci / "mem_info_vram_used")


def _name(node: KfdNode, tables: Sequence[Path]) -> str:
    """Return the name that ROCm and torch show, else the board's name, else the device id."""
    device = node.properties.get("device_id", 0)
    revision = sysfs.read_integer(node.pci / "revision") or 0
    entry = re.compile(rf"^{device:04X},\s*{revision:02X},\s*(\S.*)$", re.MULTILINE)
    for table in tables:
        match = entry.search(sysfs.read_text(table) or "")
        if match:
            return match[1].strip()
    return sysfs.read_text(node.pci / "product_name") or f"AMD GPU 0x{device:04x}"


def _ecc(ras: Path) -> Ecc | None:
    counts = sysfs.read_text(ras / "umc_err_count") or sysfs.read_text(ras / "aca_umc") or ""
    found = {kind: int(count) for kind, count in re.findall(r"\b(ue|ce):\s*(\d+)", counts)}
    if not found:
        return None
    return Ecc(enabled=True, corrected=found.get("ce"), uncorrected=found.get("ue"))


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
