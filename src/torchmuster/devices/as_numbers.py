"""A device as named numbers, for curves."""

from torchmuster.devices.model import Device
from torchmuster.units import MiB


def numbers_of(device: Device) -> dict[str, float]:
    """Return what is measured of a device now; what could not be read is not there."""
    numbers = {
        "utilisation_percent": device.utilisation_percent,
        "temperature_c": device.temperature_c,
        "power_w": device.power_w,
        "used_memory_mb": None if device.used_bytes is None else device.used_bytes / MiB,
    }
    known = {name: number for name, number in numbers.items() if number is not None}
    return {f"gpu {device.number}/{name}": float(number) for name, number in known.items()}
