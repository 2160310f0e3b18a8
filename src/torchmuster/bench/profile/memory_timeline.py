"""How much memory was held over time, from the profiler's memory events."""

import math
from array import array
from dataclasses import dataclass

from torchmuster.bench.profile.trace_events import Event

_PLACES = 600
_CPU = 0  # as PyTorch numbers the types of devices


@dataclass
class MemoryTimeline:
    """The most that was allocated in each of many equal parts of the time that was profiled.

    On a device it is all that the allocator gave out. On the CPU the profiler counts from its own start, so it
    can be below zero.
    """

    begin: float
    end: float
    on_cpu: "array[float]"
    on_device: "array[float]"

    @classmethod
    def between(cls, begin: float, end: float) -> "MemoryTimeline":
        """Return a timeline in which nothing was heard of yet."""
        nothing = [math.nan] * _PLACES
        return cls(begin, end, array("d", nothing), array("d", nothing))

    def add(self, event: Event) -> None:
        """Take in one event of the profiler."""
        args = event.args
        if args is None or not isinstance(event.ts, float) or self.end <= self.begin:
            return
        held = args.total_allocated_bytes
        if not isinstance(held, int | float) or not self.begin <= event.ts < self.end:
            return
        lane = self.on_cpu if args.device_type == _CPU else self.on_device
        at = int((event.ts - self.begin) / (self.end - self.begin) * _PLACES)
        lane[at] = held if math.isnan(lane[at]) else max(lane[at], held)

    def points(self) -> tuple[tuple[float, float], ...]:
        """Return (seconds since the first step, bytes): of the device if it had any events, else of the CPU."""
        lane = self.on_device if any(map(math.isfinite, self.on_device)) else self.on_cpu
        width_s = (self.end - self.begin) / 1e6 / _PLACES
        return tuple(
            ((at + 0.5) * width_s, held) for at, held in enumerate(lane) if math.isfinite(held)
        )
