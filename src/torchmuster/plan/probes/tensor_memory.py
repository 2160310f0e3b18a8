"""How much of a device tensors take: now, and at most since one last looked."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch

from torchmuster.plan.probes.live_storage import LiveStorages
from torchmuster.plan.probes.log import Sized


class Taken(NamedTuple):
    """What tensors take."""

    live_bytes: int  # now
    peak_bytes: int  # at most since the last look


Look: TypeAlias = Callable[[], Taken]


@contextmanager
def tensor_memory(device: torch.device) -> Iterator[Look]:
    """Yield what says how much tensors take of the device.

    An accelerator's allocator counts by itself. On the CPU every storage that is made or used inside the ``with`` is
    followed, which slows everything down.
    """
    if device.type != "cpu":
        yield lambda: _of_accelerator(device)
        return
    seen = LiveStorages(answer=lambda _: None, on_host=True)
    followed = _OfHost(seen)
    with seen.followed():
        yield followed.look


def _of_accelerator(device: torch.device) -> Taken:
    taken = Taken(
        live_bytes=int(torch.accelerator.memory_allocated(device)),
        peak_bytes=int(torch.accelerator.max_memory_allocated(device)),
    )
    torch.accelerator.reset_peak_memory_stats(device)
    return taken


class _OfHost:
    """Adds up what the log of storages says, from look to look."""

    def __init__(self, seen: LiveStorages) -> None:
        self._seen = seen
        self._sizes: dict[int, int] = {}
        self._begin = 0

    def look(self) -> Taken:
        """Bring what lives up to date with the log."""
        total = peak = sum(self._sizes.values())
        events = self._seen.log.events
        end = len(events)
        for event in events[self._begin : end]:
            if isinstance(event, Sized):
                total += event.size_bytes - self._sizes.pop(event.number, 0)
                peak = max(peak, total)
                if event.size_bytes:
                    self._sizes[event.number] = event.size_bytes
        self._begin = end
        return Taken(live_bytes=total, peak_bytes=peak)
