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
from torchmuster.units import MiB

_LOCAL_HEAPS = (1, 2)
# Installed by libdrm, which ROCm needs; the first path is that of AMD's own packages.
NAME_TABLES = (
    Path("/opt/amdgpu/share/libdrm/amdgpu.ids"),
    Path("/usr/share/libdrm/amdgpu.ids"),
)
# Memory of an idle driver. If more is in use than compute processes hold, windows may hold it.
_DRIVER_BYTES = 512 * MiB


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
    found = []
    for number in sorted(int(name) for name in sysfs.read_names(topology) if name.isdecimal()):
        folder = topology / str(number)
        # A CPU is also a node, with neither a GPU id nor SIMD units.
        gpu_id = sysfs.read_integer(folder / "gpu_id")
        properties = _properties(folder / "properties") if gpu_id else {}
        if gpu_id and properties.get("simd_count"):
            files = [folder / "mem_banks" / bank for bank in sysfs.read_names(folder / "mem_banks")]
            banks = [_properties(file / "properties") for file in files]
            local = [bank for bank in banks if bank.get("heap_type") in _LOCAL_HEAPS]
            node = KfdNode(
                number=number,
                gpu_id=gpu_id,
                properties=properties,
                pci=_pci(properties, pci_devices),
                local_bytes=sum(bank.get("size_in_bytes", 0) for bank in local),
            )
            found.append(node)
    return found


def _properties(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in (sysfs.read_text(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _pci(properties: Mapping[str, int], pci_devices: Path) -> Path:
    location = properties.get("location_id", 0)
    bus, slot, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 7
    card = f"{properties.get('domain', 0):04x}:{bus:02x}:{slot:02x}"
    exact = pci_devices / f"{card}.{function}"
    # In a partitioned GPU the function counts the parts, and only the first is a PCI device.
    return exact if exact.is_dir() else pci_devices / f"{card}.0"


def kfd_holders(folder: Path) -> dict[int, list[DeviceProcess]]:
    """Return, by KFD's GPU id, the processes that hold memory there or have a queue open."""
    found = defaultdict(list)
    for pid in filter(str.isdecimal, sysfs.read_names(folder)):
        queues = folder / pid / "queues"
        queued = {
            sysfs.read_integer(queues / queue / "gpuid") for queue in sysfs.read_names(queues)
        }
        for entry in sysfs.read_names(folder / pid):
            gpu_id = entry.removeprefix("vram_")
            if gpu_id != entry and gpu_id.isdecimal():
                held = sysfs.read_integer(folder / pid / entry)
                if held or int(gpu_id) in queued:
                    process = DeviceProcess(pid=int(pid), compute=True, memory_bytes=held or None)
                    found[int(gpu_id)].append(process)
    return dict(found)


def read_amd(
    sys_root: Path = Path("/sys"),
    dev_root: Path = Path("/dev"),
    proc_root: Path = Path("/proc"),
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
            processes=_processes(node, holders.get(node.gpu_id, []), used or 0, proc_root),
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
    listed = (entry.search(sysfs.read_text(table) or "") for table in tables)
    name = next((match[1].strip() for match in listed if match), None)
    return name or sysfs.read_text(node.pci / "product_name") or f"AMD GPU 0x{device:04x}"


def _ecc(ras: Path) -> Ecc | None:
    counts = sysfs.read_text(ras / "umc_err_count") or sysfs.read_text(ras / "aca_umc") or ""
    found = {kind: int(count) for kind, count in re.findall(r"\b(ue|ce):\s*(\d+)", counts)}
    if not found:
        return None
    return Ecc(enabled=True, corrected=found.get("ce"), uncorrected=found.get("ue"))


def _processes(
    node: KfdNode, holders: Sequence[DeviceProcess], used_bytes: int, proc_root: Path
) -> tuple[DeviceProcess, ...]:
    """Add a desktop's windows, which KFD does not list, if some used memory is unaccounted for."""
    if used_bytes - sum(one.memory_bytes or 0 for one in holders) < _DRIVER_BYTES:
        return tuple(holders)
    known = {one.pid for one in holders}
    windows = sysfs.drm_processes(proc_root).get(node.pci.name, [])
    return (*holders, *(one for one in windows if one.pid not in known))


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
