"""Read the small text files in which the Linux kernel describes devices.

A file that is missing, forbidden, empty or garbled reads as None: with a suspended GPU, an older
driver or a container one field is missing, never the whole report.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from torchmuster.devices.model import DeviceProcess
from torchmuster.units import parse_bytes

# Engine names of amdgpu and i915 (busy time), and of xe (busy cycles).
_COMPUTE_ENGINES = ("drm-engine-compute", "drm-cycles-ccs")
_RENDER_ENGINES = ("drm-engine-gfx", "drm-engine-render", "drm-cycles-rcs")
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def read_text(path: Path) -> str | None:
    """Return the stripped content of a file, or None if it is empty or unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except (OSError, ValueError):
        return None


def read_integer(path: Path) -> int | None:
    """Return the number in a file, decimal or with ``0x``, or None."""
    content = read_text(path)
    try:
        return None if content is None else int(content, 16 if content.startswith("0x") else 10)
    except ValueError:
        return None


def read_percent(path: Path) -> int | None:
    """Return a percentage, or None; some firmware reports 65535 for an unknown value."""
    value = read_integer(path)
    return value if value is not None and 0 <= value <= 100 else None


def read_names(folder: Path) -> list[str]:
    """Return the sorted names in a folder, none if it cannot be listed."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except (OSError, ValueError):
        return []


def pci_addresses(sys_root: Path, driver: str) -> list[str]:
    """Return the PCI addresses of the devices that a kernel driver holds, in PCI order."""
    entries = read_names(sys_root / "bus/pci/drivers" / driver)
    return [entry for entry in entries if _PCI_ADDRESS.fullmatch(entry)]


def numa_node(pci: Path) -> int | None:
    """Return the NUMA node of a PCI device; the kernel's -1 (unknown) gives None."""
    node = read_integer(pci / "numa_node")
    return None if node is None or node < 0 else node


def hwmon(pci: Path, driver: str) -> Path:
    """Return the folder with the sensors of the whole device, not those of a part."""
    folders = [pci / "hwmon" / name for name in read_names(pci / "hwmon")]
    whole = (folder for folder in folders if read_text(folder / "name") == driver)
    return next(whole, folders[0] if folders else pci / "hwmon")


def temperatures(sensors: Path, *labels: str) -> tuple[int | None, int | None]:
    """Return the temperature and its critical limit in °C, for the first label with a reading.

    For a driver without labels, the first sensor is used.
    """
    inputs = {number: read_integer(sensors / f"temp{number}_input") for number in "123"}
    measured = [number for number, value in inputs.items() if value is not None]
    labelled = {read_text(sensors / f"temp{number}_label"): number for number in reversed(measured)}
    for label in (*labels, None):
        if label in labelled:
            number = labelled[label]
            limit = read_integer(sensors / f"temp{number}_crit")
            return round((inputs[number] or 0) / 1000), round(limit / 1000) if limit else None
    return None, None


def watts(sensors: Path, *files: str) -> float | None:
    """Return the power in watts from the first of these files that is not 0 ("not measured")."""
    microwatts = (read_integer(sensors / file) for file in files)
    return next((value / 1e6 for value in microwatts if value), None)


def joules(sensors: Path) -> float | None:
    """Return the energy in joules since the driver was loaded, or None if it is not counted."""
    # Of the card; some GPUs on xe only count that of the package, in the second file.
    counts = (read_integer(sensors / file) for file in ("energy1_input", "energy2_input"))
    return next((count / 1e6 for count in counts if count is not None), None)


def drm_processes(proc_root: Path) -> dict[str, list[DeviceProcess]]:
    """Return, by PCI address, the processes that have a GPU open: all for root, else the user's."""
    found = defaultdict(list)
    for pid in filter(str.isdecimal, read_names(proc_root)):
        for address, clients in _clients(proc_root / pid).items():
            amounts = [_local_bytes(client) for client in clients]
            known = [amount for amount in amounts if amount is not None]
            computes = any(_busy(client, _COMPUTE_ENGINES) for client in clients)
            # A program that is still loading its data has neither computed nor drawn anything.
            loading = any(known) and not any(_busy(client, _RENDER_ENGINES) for client in clients)
            process = DeviceProcess(
                pid=int(pid),
                compute=computes or loading,
                memory_bytes=sum(known) if known else None,
            )
            found[address].append(process)
    return dict(found)


def _clients(process: Path) -> dict[str, Iterable[Mapping[str, str]]]:
    """Return the kernel's fdinfo of each GPU file that a process has open, by PCI address."""
    clients: dict[str, dict[str, Mapping[str, str]]] = defaultdict(dict)
    for descriptor in read_names(process / "fd"):
        try:
            opened = str((process / "fd" / descriptor).readlink())
        except OSError:
            continue
        if opened.startswith("/dev/dri/"):
            lines = (read_text(process / "fdinfo" / descriptor) or "").splitlines()
            parts = (line.partition(":") for line in lines)
            client = {key: value.strip() for key, _, value in parts}
            # A duplicated descriptor shows the same client again.
            clients[client.get("drm-pdev", "")][client.get("drm-client-id", descriptor)] = client
    return {address: list(found.values()) for address, found in clients.items() if address}


def _local_bytes(client: Mapping[str, str]) -> int | None:
    """Return the device memory of a client: resident, or the key of older drivers."""
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
