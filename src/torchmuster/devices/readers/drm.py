"""What the kernel's graphics drivers (DRM) tell of a GPU: who holds it open, how much memory it has.

The first stands in /proc for every driver; the second is asked of Intel's drivers by ioctl.
"""

import os
import struct
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torchmuster.devices.model import DeviceProcess
from torchmuster.devices.readers import sysfs
from torchmuster.units import parse_bytes

# Engine names of amdgpu and i915 (busy time), and of xe (busy cycles).
_COMPUTE_ENGINES = ("drm-engine-compute", "drm-cycles-ccs")
_RENDER_ENGINES = ("drm-engine-gfx", "drm-engine-render", "drm-cycles-rcs")

# DRM_IOCTL_XE_DEVICE_QUERY and DRM_IOCTL_I915_QUERY, and the question "memory regions" in each.
_XE_QUERY, _XE_REGIONS, _XE_HEADER_BYTES = 0xC0286440, 1, 8
_I915_QUERY, _I915_REGIONS, _I915_HEADER_BYTES = 0xC0106479, 4, 16
_REGION, _REGION_BYTES, _DEVICE_MEMORY = "=HHIQQ", 88, 1
_LONGEST_ANSWER_BYTES = 1 << 16

Ioctl = Callable[[int, int, bytearray], object]


def processes(proc_root: Path) -> dict[str, list[DeviceProcess]]:
    """Return, by PCI address, the processes that hold a GPU open: all for root, else one's own."""
    found = defaultdict(list)
    for pid in filter(str.isdecimal, sysfs.names(proc_root)):
        for address, clients in _clients(proc_root / pid).items():
            amounts = [_local_bytes(client) for client in clients]
            known = [amount for amount in amounts if amount is not None]
            computes = any(_busy(client, _COMPUTE_ENGINES) for client in clients)
            # A program that has only loaded its data has computed nothing yet, nor drawn anything.
            loading = any(known) and not any(_busy(client, _RENDER_ENGINES) for client in clients)
            process = DeviceProcess(
                pid=int(pid),
                compute=computes or loading,
                memory_bytes=sum(known) if known else None,
            )
            found[address].append(process)
    return dict(found)


def _clients(process: Path) -> dict[str, Iterable[Mapping[str, str]]]:
    """Return what the kernel tells of each GPU file a process has open, by PCI address."""
    clients: dict[str, dict[str, Mapping[str, str]]] = defaultdict(dict)
    for descriptor in sysfs.names(process / "fd"):
        try:
            opened = str((process / "fd" / descriptor).readlink())
        except OSError:
            continue
        if opened.startswith("/dev/dri/"):
            lines = (sysfs.text(process / "fdinfo" / descriptor) or "").splitlines()
            parts = (line.partition(":") for line in lines)
            client = {key: value.strip() for key, _, value in parts}
            # A duplicated descriptor shows the same client again.
            clients[client.get("drm-pdev", "")][client.get("drm-client-id", descriptor)] = client
    return {address: list(found.values()) for address, found in clients.items() if address}


def _local_bytes(client: Mapping[str, str]) -> int | None:
    """Return the device memory of a client: resident, or as older drivers name it."""
    for prefix in ("drm-resident-", "drm-total-", "drm-memory-"):
        regions = (f"{prefix}vram", f"{prefix}local")
        try:
            amounts = [parse_bytes(client[key]) for key in client if key.startswith(regions)]
        except ValueError:
            continue
        if amounts:
            return sum(amounts)
    return None


def _busy(client: Mapping[str, str], engines: Iterable[str]) -> bool:
    return any(client.get(engine, "0").split()[:1] not in ([], ["0"]) for engine in engines)


def kernel(descriptor: int, request: int, argument: bytearray) -> object:
    """Ask the kernel itself."""
    import fcntl  # not there on Windows, where this is never called

    return fcntl.ioctl(descriptor, request, argument)


def local_memory(
    pci: Path, driver: str, dev_root: Path, ioctl: Ioctl
) -> tuple[int | None, int | None, str | None]:
    """Return total and used bytes as the driver answers, and why it could not be asked."""
    nodes = [name for name in sysfs.names(pci / "drm") if name.startswith("renderD")]
    if not nodes:
        return None, None, "its driver offers no render node"
    node = dev_root / "dri" / nodes[0]
    try:
        descriptor = os.open(node, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        return None, None, f"{node} cannot be opened: {error.strerror}"
    try:
        header = _XE_HEADER_BYTES if driver == "xe" else _I915_HEADER_BYTES
        answer = _answer(descriptor, driver, ioctl)
        places = range(header, len(answer) - _REGION_BYTES + 1, _REGION_BYTES)
        regions = [struct.unpack_from(_REGION, answer, place) for place in places]
    except (OSError, struct.error):
        return None, None, None
    finally:
        os.close(descriptor)
    local = [region for region in regions if region[0] == _DEVICE_MEMORY]
    total = sum(region[3] for region in local)
    second = sum(region[4] for region in local)
    # Who may not know the use is told that nothing is used; i915 counts what is left instead.
    used = second if driver == "xe" else total - second
    return total or None, used or None, None


def _answer(descriptor: int, driver: str, ioctl: Ioctl) -> bytes:
    """Ask for the memory regions: first for the length of the answer, then for the answer."""
    size, data = 0, array("B")
    for _ in range(2):
        data = array("B", bytes(size))
        address = data.buffer_info()[0] if size else 0
        if driver == "xe":
            query = bytearray(struct.pack("=QIIQQQ", 0, _XE_REGIONS, size, address, 0, 0))
            ioctl(descriptor, _XE_QUERY, query)
            (size,) = struct.unpack_from("=I", query, 12)
        else:
            item = array("B", struct.pack("=QiIQ", _I915_REGIONS, size, 0, address))
            place = item.buffer_info()[0]
            ioctl(descriptor, _I915_QUERY, bytearray(struct.pack("=IIQ", 1, 0, place)))
            (size,) = struct.unpack_from("=i", item, 8)
        if not 0 < size <= _LONGEST_ANSWER_BYTES:
            return b""
    return data.tobytes()
