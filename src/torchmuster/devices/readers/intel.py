"""Read Intel GPUs, as the kernel drivers xe and i915 describe them in sysfs.

The kernel has no stable UUID for them (only Level Zero creates one), so ``XPU-`` and the PCI
address replace it; they are valid until the GPU is moved to another slot. The numbers match
torch.xpu, in PCI order; as in torch, an integrated GPU (Arc class only) counts only if there is no
discrete one.

Left None: utilization and power, which are counters that need two readings; and memory, unless
Intel's own driver packages write it to sysfs.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from torchmuster.devices.model import Device, DeviceKind, DeviceProcess
from torchmuster.devices.readers import sysfs
from torchmuster.finding import Finding, Status

# The PCI ids of the integrated GPUs on which torch supports XPU: Meteor Lake, Arrow Lake, Lunar
# Lake, Panther Lake (from Intel's compute runtime, shared/source/dll/devices).
_INTEGRATED = frozenset({0x7D55, 0x7D51, 0x64A0, 0xB080, 0xB081, 0xB082, 0xB083})
_INTEGRATED_ADDRESS = "0000:00:02.0"


def read_intel(
    sys_root: Path = Path("/sys"),
    dev_root: Path = Path("/dev"),
    proc_root: Path = Path("/proc"),
) -> tuple[list[Device], list[Finding]]:
    """Return the Intel GPUs that torch can use, and findings about what prevents that."""
    pci = sys_root / "bus/pci/devices"
    driven = []
    for driver in ("i915", "xe"):
        driven += [(address, driver) for address in sysfs.pci_addresses(sys_root, driver)]
    discrete, integrated = [], []
    for address, driver in sorted(driven):
        if address != _INTEGRATED_ADDRESS:
            discrete.append((address, driver))
        elif sysfs.read_integer(pci / address / "device") in _INTEGRATED:
            integrated.append((address, driver))
    chosen = discrete or integrated
    holders = sysfs.drm_processes(proc_root) if chosen else {}
    devices = [
        _device(index, pci / address, driver, dev_root, holders.get(address, []))
        for index, (address, driver) in enumerate(chosen)
    ]
    return devices, [_shut(device) for device in devices if device.trouble]


def _device(
    index: int, pci: Path, driver: str, dev_root: Path, processes: Sequence[DeviceProcess]
) -> Device:
    number = sysfs.read_integer(pci / "device") or 0
    sensors = sysfs.hwmon(pci, driver)
    temperature, limit = sysfs.temperatures(sensors, "pkg")
    total, used = _written_memory(pci)
    return Device(
        kind=DeviceKind.XPU,
        index=index,
        uuid=f"XPU-{pci.name}",
        name=f"Intel GPU 0x{number:04x}",
        pci_bus_id=pci.name,
        numa_node=sysfs.numa_node(pci),
        total_bytes=total,
        used_bytes=used,
        temperature_c=temperature,
        slowdown_temperature_c=limit,
        power_limit_w=sysfs.watts(sensors, "power1_max", "power2_max"),
        energy_j=sysfs.joules(sensors),
        processes=tuple(processes),
        trouble=_why_not_opened(pci, dev_root),
    )


def _why_not_opened(pci: Path, dev_root: Path) -> str | None:
    nodes = [name for name in sysfs.read_names(pci / "drm") if name.startswith("renderD")]
    if not nodes:
        return "its driver offers no render node"
    node = dev_root / "dri" / nodes[0]
    return None if os.access(node, os.R_OK | os.W_OK) else f"{node} cannot be opened"


def _written_memory(pci: Path) -> tuple[int | None, int | None]:
    """Return total and used bytes from sysfs, where only Intel's own driver packages put them."""
    cards = [
        pci / "drm" / name for name in sysfs.read_names(pci / "drm") if name.startswith("card")
    ]
    tiles = [pci / name for name in sysfs.read_names(pci) if name.startswith("tile")]
    sizes = [sysfs.read_integer(tile / "physical_vram_size_bytes") for tile in tiles]
    sizes += [sysfs.read_integer(card / "lmem_total_bytes") for card in cards]
    total = sum(size or 0 for size in sizes) or None
    free = [sysfs.read_integer(card / "lmem_avail_bytes") for card in cards]
    if total is None or not free or free[0] is None:
        return total, None
    return total, max(total - free[0], 0)


def _shut(device: Device) -> Finding:
    return Finding(
        name="xpu-cannot-be-opened",
        status=Status.WARNING,
        what=f"this user may not use {device.label} ({device.name})",
        why=device.trouble or "",
        fix='sudo usermod -aG render "$USER"  # then log in again; '
        "in a container: --device=/dev/dri",
    )
