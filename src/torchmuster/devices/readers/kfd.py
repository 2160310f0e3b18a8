"""The compute side of the kernel's amdgpu driver (KFD): its devices in its own order, and their users."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchmuster.devices.model import DeviceProcess
from torchmuster.devices.readers import sysfs

_LOCAL_HEAPS = (1, 2)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A compute device in KFD's topology: a PCI device, or a part of a partitioned one."""

    number: int
    gpu_id: int
    properties: Mapping[str, int]
    pci: Path
    local_bytes: int


def nodes(topology: Path, pci_devices: Path) -> list[Node]:
    """Return the GPUs among KFD's nodes, in its order."""
    found = []
    for number in sorted(int(name) for name in sysfs.names(topology) if name.isdecimal()):
        folder = topology / str(number)
        # A CPU is a node, too, with neither a GPU id nor SIMD units.
        gpu_id = sysfs.integer(folder / "gpu_id")
        properties = _properties(folder / "properties") if gpu_id else {}
        if gpu_id and properties.get("simd_count"):
            files = [folder / "mem_banks" / bank for bank in sysfs.names(folder / "mem_banks")]
            banks = [_properties(file / "properties") for file in files]
            local = [bank for bank in banks if bank.get("heap_type") in _LOCAL_HEAPS]
            node = Node(
                number=number,
                gpu_id=gpu_id,
                properties=properties,
                pci=_pci(properties, pci_devices),
                local_bytes=sum(bank.get("size_in_bytes", 0) for bank in local),
            )
            found.append(node)
    return found


def _properties(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in (sysfs.text(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _pci(properties: Mapping[str, int], pci_devices: Path) -> Path:
    location = properties.get("location_id", 0)
    bus, slot, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 7
    card = f"{properties.get('domain', 0):04x}:{bus:02x}:{slot:02x}"
    exact = pci_devices / f"{card}.{function}"
    # In a partitioned GPU the function counts the parts, and only the first is a PCI device.
    return exact if exact.is_dir() else pci_devices / f"{card}.0"


def holders(folder: Path) -> dict[int, list[DeviceProcess]]:
    """Return, by KFD's GPU id, the processes that hold memory there or have a queue open."""
    found = defaultdict(list)
    for pid in filter(str.isdecimal, sysfs.names(folder)):
        queues = folder / pid / "queues"
        queued = {sysfs.integer(queues / queue / "gpuid") for queue in sysfs.names(queues)}
        for entry in sysfs.names(folder / pid):
            gpu_id = entry.removeprefix("vram_")
            if gpu_id != entry and gpu_id.isdecimal():
                held = sysfs.integer(folder / pid / entry)
                if held or int(gpu_id) in queued:
                    process = DeviceProcess(pid=int(pid), compute=True, memory_bytes=held or None)
                    found[int(gpu_id)].append(process)
    return dict(found)
