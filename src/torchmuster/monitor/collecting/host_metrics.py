"""What the machine itself is like now: processors, memory, disk, network."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

from torchmuster.monitor import catalogue
from torchmuster.monitor.metric import Metric, Sample


class HostMetrics:
    """Looks at the machine; the processors' share is that since the last look."""

    def __init__(self, host: str, runs: Path) -> None:
        self._host = host
        self._runs = runs
        psutil.cpu_percent()  # the first look has nothing to compare with

    def samples(self) -> Iterator[Sample]:
        """Yield what could be read."""
        memory = psutil.virtual_memory()
        yield self._sample(catalogue.HOST_CPU, psutil.cpu_percent() / 100)
        yield self._sample(catalogue.HOST_MEMORY_AVAILABLE, memory.available)
        yield self._sample(catalogue.HOST_MEMORY, memory.total)
        with contextlib.suppress(OSError):  # the folder may not be there yet
            yield self._sample(catalogue.HOST_DISK_FREE, psutil.disk_usage(str(self._runs)).free)
        received, sent = 0, 0
        for name, count in psutil.net_io_counters(pernic=True).items():
            if not name.startswith("lo"):
                received += count.bytes_recv
                sent += count.bytes_sent
        yield self._sample(catalogue.HOST_NETWORK, received, "received")
        yield self._sample(catalogue.HOST_NETWORK, sent, "sent")

    def _sample(self, metric: Metric, value: float, *labels: str) -> Sample:
        return Sample(metric, (self._host, *labels), float(value))
