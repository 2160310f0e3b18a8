"""AMD GPUs, as the kernel's amdgpu driver and its compute side (KFD) describe them in sysfs.

The order is KFD's, which is also that of ROCm's ``ROCR_VISIBLE_DEVICES``; a node that KFD does
not let us read (one of another container) is left out there, too. A UUID starting with ``GPU-`` is
one that ROCm takes; a GPU without its own number, or a part of a partitioned one, gets ``ROCM-``
and its PCI address, and can be named to ROCm only by its index.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from torchmuster.devices.model import Device, DeviceProcess, Ecc, Kind
from torchmuster.devices.readers import drm, kfd, sysfs
from torchmuster.finding import Finding, Status
from torchmuster.units import MiB

# Installed by libdrm, which ROCm needs; the first is where AMD's own packages put it.
NAME_TABLES = (
    Path("/opt/amdgpu/share/libdrm/amdgpu.ids"),
    Path("/usr/share/libdrm/amdgpu.ids"),
)
# What an idle driver takes; more, if no compute process holds it, is worth a look for windows.
_DRIVER_BYTES = 512 * MiB


def read(
    sys_root: Path = Path("/sys"),
    dev_root: Path = Path("/dev"),
    proc_root: Path = Path("/proc"),
    name_tables: Sequence[Path] = NAME_TABLES,
) -> tuple[list[Device], list[Finding]]:
    """Return the AMD GPUs that ROCm can use, and what keeps it from using them."""
    addresses = sysfs.pci_addresses(sys_root, "amdgpu")
    if not addresses:
        return [], []
    compute = sys_root / "class/kfd/kfd"
    nodes = kfd.nodes(compute / "topology/nodes", sys_root / "bus/pci/devices")
    if not nodes:
        return [], [_no_compute(addresses)]
    entrance = dev_root / "kfd"
    shut = not os.access(entrance, os.R_OK | os.W_OK)
    parts = Counter(node.pci for node in nodes)
    serials = Counter(node.properties.get("unique_id", 0) for node in nodes)
    holders = kfd.holders(compute / "proc")
    devices = []
    for index, node in enumerate(nodes):
        part = f"-{node.number}" if parts[node.pci] > 1 else ""
        serial = node.properties.get("unique_id", 0)
        unique = serial and serials[serial] == 1
        total, used = (node.local_bytes or None, None) if part else _memory(node)
        sensors = sysfs.hwmon(node.pci, "amdgpu")
        temperature, limit = sysfs.temperatures(sensors, "junction", "edge")
        device = Device(
            kind=Kind.ROCM,
            index=index,
            uuid=f"GPU-{serial:016x}" if unique else f"ROCM-{node.pci.name}{part}",
            name=_name(node, name_tables),
            pci_bus_id=node.pci.name,
            numa_node=sysfs.numa_node(node.pci),
            total_bytes=total,
            used_bytes=used,
            utilisation_percent=sysfs.percent(node.pci / "gpu_busy_percent"),
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


def _memory(node: kfd.Node) -> tuple[int | None, int | None]:
    """Return total and used bytes of the memory that ROCm allocates from."""
    total = sysfs.integer(node.pci / "mem_info_vram_total")
    if total is not None and node.local_bytes > total:
        # An APU: since Linux 6.10 ROCm leaves the small carve-out aside and takes system memory.
        return node.local_bytes, sysfs.integer(node.pci / "mem_info_gtt_used")
    return total or node.local_bytes or None, sysfs.integer(node.pci / "mem_info_vram_used")


def _name(node: kfd.Node, tables: Sequence[Path]) -> str:
    """Return the name that ROCm and torch show, else the board's own, else the bare number."""
    device = node.properties.get("device_id", 0)
    revision = sysfs.integer(node.pci / "revision") or 0
    entry = re.compile(rf"^{device:04X},\s*{revision:02X},\s*(\S.*)$", re.MULTILINE)
    listed = (entry.search(sysfs.text(table) or "") for table in tables)
    name = next((match[1].strip() for match in listed if match), None)
    return name or sysfs.text(node.pci / "product_name") or f"AMD GPU 0x{device:04x}"


def _ecc(ras: Path) -> Ecc | None:
    counts = sysfs.text(ras / "umc_err_count") or sysfs.text(ras / "aca_umc") or ""
    found = {kind: int(count) for kind, count in re.findall(r"\b(ue|ce):\s*(\d+)", counts)}
    if not found:
        return None
    return Ecc(enabled=True, corrected=found.get("ce"), uncorrected=found.get("ue"))


def _processes(
    node: kfd.Node, holders: Sequence[DeviceProcess], used_bytes: int, proc_root: Path
) -> tuple[DeviceProcess, ...]:
    """Add a desktop's windows, unknown to KFD and looked for only if memory is unaccounted for."""
    if used_bytes - sum(one.memory_bytes or 0 for one in holders) < _DRIVER_BYTES:
        return tuple(holders)
    known = {one.pid for one in holders}
    windows = drm.processes(proc_root).get(node.pci.name, [])
    return (*holders, *(one for one in windows if one.pid not in known))


def _no_compute(addresses: Sequence[str]) -> Finding:
    return Finding(
        name="rocm-sees-no-gpu",
        status=Status.NOTE,
        what=f"ROCm cannot use the AMD graphics here ({', '.join(addresses)})",
        why="the kernel's compute side (/sys/class/kfd) offers none of it to this process: the "
        "chip is too old, the kernel was built without CONFIG_HSA_AMD, or this is a container",
        fix="in a container: --device=/dev/kfd --device=/dev/dri",
    )


def _shut(entrance: Path, devices: Sequence[Device]) -> Finding:
    return Finding(
        name="kfd-cannot-be-opened",
        status=Status.WARNING,
        what=f"this user may not compute on {', '.join(device.label for device in devices)}",
        why=f"ROCm reaches every AMD GPU through {entrance}, which cannot be opened",
        fix='sudo usermod -aG render,video "$USER"  # then log in again; '
        "in a container: --device=/dev/kfd --device=/dev/dri",
    )
