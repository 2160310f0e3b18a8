"""How long tests wait, and how they measure what is promised in seconds.

A test waits for an event and gives up after ``GIVE_UP_S``; how long the event took is not its subject.
Promises in seconds are measured by tests with the marker ``alone``, which run one by one (``-n 0``).
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# After this an event counts as one that never happens; shorter than pytest's limit for a whole test.
GIVE_UP_S = 240.0
_WAKE_EVERY_S = 0.05


@contextmanager
def within(limit_s: float, what: str) -> Iterator[None]:
    """Fail if the block takes longer than promised.

    Where the machine was stalled meanwhile, the time says nothing: the test is reported as
    "not measured" (an expected failure, in pytest's last lines).
    """
    with _Stalls() as stalls:
        began_s = time.monotonic()
        yield
        took_s = time.monotonic() - began_s
    if took_s <= limit_s:
        return
    measured = f"{what}: {took_s:.2f} s, promised are {limit_s:g} s"
    if reason := stalls.reason(took_s):
        pytest.xfail(f"not measured: {reason}; {measured}")
    pytest.fail(measured, pytrace=False)


class _Stalls:
    """Watches whether this machine gave its processors to others."""

    def __enter__(self) -> "_Stalls":
        self._over = threading.Event()
        self._worst_s = 0.0
        self._busy_before = _busy_share()
        self._stolen_before_s = _stolen_s()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        last_s = time.monotonic()
        while not self._over.wait(_WAKE_EVERY_S):
            now_s = time.monotonic()
            self._worst_s = max(self._worst_s, now_s - last_s - _WAKE_EVERY_S)
            last_s = now_s

    def reason(self, took_s: float) -> str:
        """Return why a time does not count, or nothing."""
        if self._worst_s > 0.5:
            return f"a thread woke up {self._worst_s:.1f} s late"
        if self._busy_before > 0.5:
            return f"other processes used {self._busy_before:.0%} of the processors"
        stolen_s = _stolen_s() - self._stolen_before_s
        if stolen_s > 0.1 * took_s:
            return f"the hypervisor took {stolen_s:.1f} s of processor time"
        return ""


def _processor_times() -> list[int]:
    """Return the ticks of all processors: user, nice, system, idle, iowait, irq, softirq, steal."""
    first = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    return [int(ticks) for ticks in first.split()[1:9]]


def _busy_share() -> float:
    """Return how much of all processors is in use, over half a second in which the test waits."""
    before = _processor_times()
    time.sleep(0.5)
    ticks = [after - earlier for earlier, after in zip(before, _processor_times(), strict=True)]
    return 1 - (ticks[3] + ticks[4]) / max(1, sum(ticks))


def _stolen_s() -> float:
    return _processor_times()[7] / 100
