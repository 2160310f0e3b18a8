"""Read Intel GPUs, as the kernel drivers xe and i915 describe them in sysfs.

The kernel has no stable UUID for them (only Level Zero creates one), so ``XPU-`` and the PCI
address replace it; they are valid until the GPU is moved to another slot. The numbers match
torch.xpu, in PCI order; as in torch, an integrated GPU (Arc class only) counts only if there is no
discrete one. Memory, load and processes are unknown: the kernel shows them only through Intel's
own libraries.
"""

import os
from pathlib import Path

from torchmuster.devices.model import Device, DeviceKind
from torchmuster.devices.readers import sysfs
from torchmuster.finding import Finding, Status

# The PCI ids of the integrated GPUs on which torch supports XPU: Meteor Lake, Arrow Lake, Lunar
# Lake, Panther Lake (from Intel's compute runtime, shared/source/dll/devices).
_INTEGRATED = frozenset({0x7D55, 0x7D51, 0x64A0, 0xB080, 0xB081, 0xB082, 0xB083})
_INTEGRATED_ADDRESS = "0000:00:02.0"


def read_intel(
    sys_root: Path = Path("/sys"), dev_root: Path = Path("/dev")
) -> tuple[list[Device], list[Finding]]:
    """Return the Intel GPUs that torch can use, and findings about what prevents that."""
    pci = sys_root / "bus/pci/devices"
    discrete, integrated = [], []
    driven = sysfs.pci_addresses(sys_root, "i915") + sysfs.pci_addresses(sys_root, "xe")
    for address in sorted(driven):
        if address != _INTEGRATED_ADDRESS:
            discrete.append(address)
        elif sysfs.read_integer(pci / address / "device") in _INTEGRATED:
            integrated.append(address)
    devices = []
    for index, address in enumerate(discrete or integrated):
        devices.append(_read_device(index, pci / address, dev_root))
    return devices, [_cannot_be_opened(device) for device in devices if device.trouble]


def _read_device(index: int, pci: Path, dev_root: Path) -> Device:
    number = sysfs.read_integer(pci / "device") or 0
    return Device(
        kind=DeviceKind.XPU,
        index=index,
        uuid=f"XPU-{pci.name}",
        name=f"Intel GPU 0x{number:04x}",
        pci_bus_id=pci.name,
        numa_node=sysfs.numa_node(pci),
        trouble=_why_not_opened(pci, dev_root),
    )


def _why_not_opened(pci: Path, dev_root: Path) -> str | None:
    nodes = [name for name in sysfs.read_names(pci / "drm") if name.startswith("renderD")]
    if not nodes:
        return "its driver offers no render node"
    node = dev_root / "dri" / nodes[0]
    return None if os.access(node, os.R_OK | os.W_OK) else f"{node} cannot be opened"


def _cannot_be_opened(device: Device) -> Finding:
    return Finding(
        name="xpu-cannot-be-opened",
        status=Status.WARNING,
        what=f"this user may not use {device.label} ({device.name})",
        why=device.trouble or "",
        fix='sudo usermod -aG render "$USER"  # then log in again; '
        "in a container: --device=/dev/dri",
    )
