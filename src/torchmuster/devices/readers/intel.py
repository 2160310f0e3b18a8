"""Read Intel GPUs, as the kernel drivers xe and i915 describe them.

The kernel has no stable UUID for them (only Level Zero creates one), so ``XPU-`` and the PCI
address replace it; they are valid until the GPU is moved to another slot. The numbers match
torch.xpu, in PCI order; as in torch, an integrated GPU (Arc class only) counts only if there is no
discrete one.

Left None: utilization and power, which are counters that need two readings; used memory, which the
drivers report only to root; and the memory of an integrated GPU, which is system memory.
"""

from collections.abc import Sequence
from pathlib import Path

from torchmuster.devices.model import Device, DeviceKind, DeviceProcess
from torchmuster.devices.readers import sysfs
from torchmuster.finding import Finding, Status

# PCI device ids and names from Intel's compute runtime (shared/source/dll/devices).
_DISCRETE = {
    **dict.fromkeys((0xE209, 0xE20B), "Intel Arc B580"),
    0xE20C: "Intel Arc B570",
    0xE211: "Intel Arc Pro B60",
    0xE212: "Intel Arc Pro B50",
    0x5690: "Intel Arc A770M",
    0x56A0: "Intel Arc A770",
    0x56A1: "Intel Arc A750",
    0x56A2: "Intel Arc A580",
    0x56A5: "Intel Arc A380",
    0x56A6: "Intel Arc A310",
    0x56B1: "Intel Arc Pro A40/A50",
    0x56B3: "Intel Arc Pro A60",
    0x56C0: "Intel Data Center GPU Flex 170",
    0x56C1: "Intel Data Center GPU Flex 140",
    0x0B69: "Intel Data Center GPU Max 1450",
    **dict.fromkeys((0x0BD5, 0x0BD6), "Intel Data Center GPU Max 1550"),
    **dict.fromkeys((0x0BD9, 0x0BDA, 0x0BDB), "Intel Data Center GPU Max 1100"),
}
# The integrated GPUs on which torch supports XPU.
_INTEGRATED = {
    0x7D55: "Intel Arc (Meteor Lake)",
    0x7D51: "Intel Arc (Arrow Lake)",
    0x64A0: "Intel Arc (Lunar Lake)",
    **dict.fromkeys((0xB080, 0xB082), "Intel Arc B390 (Panther Lake)"),
    **dict.fromkeys((0xB081, 0xB083), "Intel Arc B370 (Panther Lake)"),
}
_INTEGRATED_ADDRESS = "0000:00:02.0"


def read_intel(
    sys_root: Path = Path("/sys"),
    dev_root: Path = Path("/dev"),
    proc_root: Path = Path("/proc"),
    ioctl: sysfs.Ioctl = sysfs.kernel_driver,
) -> tuple[list[Device], list[Finding]]:
    """Return the Intel GPUs that torch can use, and findings about what prevents that."""
    driven = [
        (address, driver)
        for driver in ("i915", "xe")
        for address in sysfs.pci_addresses(sys_root, driver)
    ]
    if not driven:
        return [], []
    pci = sys_root / "bus/pci/devices"
    ids = {address: sysfs.read_integer(pci / address / "device") or 0 for address, _ in driven}
    discrete = [
        (address, driver)
        for address, driver in sorted(driven)
        if address != _INTEGRATED_ADDRESS or ids[address] in _DISCRETE
    ]
    integrated = [(address, driver) for address, driver in driven if ids[address] in _INTEGRATED]
    chosen = discrete or integrated
    holders = sysfs.drm_processes(proc_root) if chosen else {}
    devices = [
        _intel_device(index, pci / address, driver, dev_root, ioctl, holders.get(address, []))
        for index, (address, driver) in enumerate(chosen)
    ]
    return devices, [_shut(device) for device in devices if device.trouble]


def _intel_device(
    index: int,
    pci: Path,
    driver: str,
    dev_root: Path,
    ioctl: sysfs.Ioctl,
    processes: Sequence[DeviceProcess],
) -> Device:
    number = sysfs.read_integer(pci / "device") or 0
    sensors = sysfs.hwmon(pci, driver)
    temperature, limit = sysfs.temperatures(sensors, "pkg")
    total, used, trouble = sysfs.drm_local_memory(pci, driver, dev_root, ioctl)
    if total is None:
        total, used = _intel_written(pci)
    return Device(
        kind=DeviceKind.XPU,
        index=index,
        uuid=f"XPU-{pci.name}",
        name=(_DISCRETE | _INTEGRATED).get(number, f"Intel GPU 0x{number:04x}"),
        pci_bus_id=pci.name,
        numa_node=sysfs.numa_node(pci),
        total_bytes=total,
        used_bytes=used,
        temperature_c=temperature,
        slowdown_temperature_c=limit,
        power_limit_w=sysfs.watts(sensors, "power1_max", "power2_max"),
        energy_j=sysfs.joules(sensors),
        processes=tuple(processes),
        trouble=trouble,
    )


def _intel_written(pci: Path) -> tuple[int | None, int | None]:
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
