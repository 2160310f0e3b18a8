"""Read Intel GPUs, as the kernel drivers xe and i915 describe them in sysfs.

The kernel has no stable UUID for them (only Level Zero creates one), so ``XPU-`` and the PCI
address replace it; they are valid until the GPU is moved to another slot. The numbers match
torch.xpu, in PCI order; an integrated GPU does not count. Memory, load and processes are unknown: the kernel shows them only through Intel's
own libraries.
"""

from pathlib import Path

from torchmuster.devices.model import Device, DeviceKind
from torchmuster.devices.readers import sysfs

_INTEGRATED_ADDRESS = "0000:00:02.0"


def read_intel(sys_root: Path = Path("/sys")) -> list[Device]:
    """Return the discrete Intel GPUs, which torch can use."""
    driven = sysfs.pci_addresses(sys_root, "i915") + sysfs.pci_addresses(sys_root, "xe")
    devices: list[Device] = []
    for address in sorted(driven):
        if address == _INTEGRATED_ADDRESS:
            continue
        number = sysfs.read_integer(sys_root / "bus/pci/devices" / address / "device") or 0
        devices.append(
            Device(
                kind=DeviceKind.XPU,
                index=len(devices),
                uuid=f"XPU-{address}",
                name=f"Intel GPU 0x{number:04x}",
                pci_bus_id=address,
            )
        )
    return devices
