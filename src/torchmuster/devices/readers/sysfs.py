"""Read the small text files in which the Linux kernel describes devices.

A file that is missing, forbidden, empty or garbled reads as None: with a suspended GPU, an older
driver or a container one field is missing, never the whole report.
"""

import re
from pathlib import Path

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


def hwmon(pci: Path, driver: str) -> Path:
    """Return the folder with the sensors of the whole device, not those of a part."""
    folders = [pci / "hwmon" / name for name in read_names(pci / "hwmon")]
    whole = (folder for folder in folders if read_text(folder / "name") == driver)
    return next(whole, folders[0] if folders else pci / "hwmon")


def temperatures(sensors: Path, *labels: str) -> tuple[int | None, int | None]:
    """Return the temperature and its critical limit in °C, for the first label with a reading."""
    sensor_of = {read_text(sensors / f"temp{number}_label"): number for number in "321"}
    for label in labels:
        number = sensor_of.get(label)
        value = read_integer(sensors / f"temp{number}_input")
        if value is not None:
            limit = read_integer(sensors / f"temp{number}_crit")
            return round(value / 1000), round(limit / 1000) if limit else None
    return None, None


def watts(sensors: Path, *files: str) -> float | None:
    """Return the power in watts from the first of these files that is not 0 ("not measured")."""
    microwatts = (read_integer(sensors / file) for file in files)
    return next((value / 1e6 for value in microwatts if value), None)
