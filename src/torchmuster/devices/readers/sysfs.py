"""The small text files in which a Linux kernel tells of its devices, and how to read them.

A file that is missing, forbidden, empty or garbled reads as None: a sleeping GPU, an older driver
or a container must cost a field, never the whole report.
"""

import re
from pathlib import Path

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def text(path: Path) -> str | None:
    """Return the stripped content of a file, or None if there is none to be had."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except (OSError, ValueError):
        return None


def integer(path: Path) -> int | None:
    """Return the number in a file, decimal or with ``0x``, or None."""
    content = text(path)
    try:
        return None if content is None else int(content, 16 if content.startswith("0x") else 10)
    except ValueError:
        return None


def percent(path: Path) -> int | None:
    """Return a share of 100, or None; some firmware answers 65535 when it does not know."""
    value = integer(path)
    return value if value is not None and 0 <= value <= 100 else None


def names(folder: Path) -> list[str]:
    """Return the sorted names in a folder, none if it cannot be listed."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except (OSError, ValueError):
        return []


def pci_addresses(sys_root: Path, driver: str) -> list[str]:
    """Return the PCI addresses of the devices that a kernel driver holds, in PCI order."""
    entries = names(sys_root / "bus/pci/drivers" / driver)
    return [entry for entry in entries if _PCI_ADDRESS.fullmatch(entry)]


def numa_node(pci: Path) -> int | None:
    """Return the NUMA node next to a PCI device; the kernel's -1 means that it has no idea."""
    node = integer(pci / "numa_node")
    return None if node is None or node < 0 else node


def hwmon(pci: Path, driver: str) -> Path:
    """Return the folder with the sensors of the whole device, not those of one part of it."""
    folders = [pci / "hwmon" / name for name in names(pci / "hwmon")]
    whole = (folder for folder in folders if text(folder / "name") == driver)
    return next(whole, folders[0] if folders else pci / "hwmon")


def temperatures(sensors: Path, *labels: str) -> tuple[int | None, int | None]:
    """Return the temperature and its critical limit in °C, of the first label that is measured.

    A driver without labels has one sensor that counts, and it comes first.
    """
    inputs = {number: integer(sensors / f"temp{number}_input") for number in "123"}
    measured = [number for number, value in inputs.items() if value is not None]
    labelled = {text(sensors / f"temp{number}_label"): number for number in reversed(measured)}
    for label in (*labels, None):
        if label in labelled:
            number = labelled[label]
            limit = integer(sensors / f"temp{number}_crit")
            return round((inputs[number] or 0) / 1000), round(limit / 1000) if limit else None
    return None, None


def watts(sensors: Path, *files: str) -> float | None:
    """Return the first of these power files that is not zero, which means "not measured"."""
    microwatts = (integer(sensors / file) for file in files)
    return next((value / 1e6 for value in microwatts if value), None)


def joules(sensors: Path) -> float | None:
    """Return the energy drawn since the driver was loaded, where it is counted."""
    microjoules = integer(sensors / "energy1_input")
    return None if microjoules is None else microjoules / 1e6
