"""What the machine's accelerators are like now, as their drivers tell."""

from collections.abc import Iterator

from torchmuster.devices.model import Device, Node
from torchmuster.devices.readers.nvml_events import OF_PROGRAMS
from torchmuster.monitor import catalogue
from torchmuster.monitor.metric import Metric, Sample


def samples(node: Node) -> Iterator[Sample]:
    """Yield what was read of each device; what could not be read is not there."""
    for device in node.accelerators:
        labels = (node.hostname, device.uuid)
        for metric, value in _values(device):
            if value is not None:
                yield Sample(metric, labels, float(value))
        for kind, count in _memory_errors(device):
            if count is not None:
                yield Sample(catalogue.GPU_ECC, (*labels, kind), float(count))
        for number, count in device.xid_errors or ():
            kind = "program" if number in OF_PROGRAMS else "device"
            yield Sample(catalogue.GPU_XID, (*labels, kind, str(number)), float(count))
        for reason in device.throttled_by:
            yield Sample(catalogue.GPU_THROTTLED, (*labels, reason), 1.0)


def _values(device: Device) -> Iterator[tuple[Metric, float | None]]:
    percent = device.utilisation_percent
    yield catalogue.GPU_UTILISATION, None if percent is None else percent / 100
    yield catalogue.GPU_MEMORY_USED, device.used_bytes
    yield catalogue.GPU_MEMORY_USABLE, device.usable_bytes
    yield catalogue.GPU_TEMPERATURE, device.temperature_c
    yield catalogue.GPU_SLOWDOWN_TEMPERATURE, device.slowdown_temperature_c
    yield catalogue.GPU_POWER, device.power_w
    yield catalogue.GPU_POWER_LIMIT, device.power_limit_w
    yield catalogue.GPU_ENERGY, device.energy_j


def _memory_errors(device: Device) -> Iterator[tuple[str, int | None]]:
    if device.ecc is not None and device.ecc.enabled:
        yield "corrected", device.ecc.corrected
        yield "uncorrected", device.ecc.uncorrected
