"""Measure how long a rank waits for data, and suggest a fix."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.finding import Finding, Status
from torchmuster.train.data.step import Step

T = TypeVar("T")

_MUCH = 0.1  # of the time; less is not reported
_FIRST_TRY = 4


class Starvation:
    """Measures how long a custom loop waits for data.

    ::

        starvation = Starvation()
        for step in starvation.watch(loader.epoch(0)):
            …
        print(render([starvation.verdict(workers=0, ranks=world.local_world_size)]))
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._began: float | None = None

    def watch(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Yield the steps, and measure the wait for each step and each of its micro-batches."""
        if self._began is None:
            self._began = time.perf_counter()
        for step in self._timed(steps):
            yield replace(step, micro_batches=self._timed(step.micro_batches))

    def _timed(self, items: Iterable[T]) -> Iterator[T]:
        before = time.perf_counter()
        for item in items:
            self.waited_s += time.perf_counter() - before
            yield item
            before = time.perf_counter()
        self.waited_s += time.perf_counter() - before

    def verdict(self, *, workers: int, ranks: int) -> Finding:
        """Return the finding so far; ``ranks`` is the number on this host, sharing its cores."""
        total_s = 0.0 if self._began is None else time.perf_counter() - self._began
        share = self.waited_s / total_s if total_s else 0.0
        return judge_starvation(share, workers=workers, cores=usable_cores().value, ranks=ranks)


def judge_starvation(share: float, *, workers: int, cores: int, ranks: int) -> Finding:
    """Return a finding on whether a rank waits too long for data, and what to try."""
    what = f"{share * 100:.0f} % of the time the device waits for data"
    if share < _MUCH:
        return Finding(name="data-in-time", status=Status.OK, what=what)
    return Finding(
        name="data-starvation",
        status=Status.WARNING,
        what=what,
        why="reading is slower than computing: a faster device would not help",
        fix=starvation_advice(workers=workers, cores=cores, ranks=ranks),
    )


def starvation_advice(*, workers: int, cores: int, ranks: int) -> str:
    """Return how many workers to try, limited by the number of cores."""
    each = max(1, cores // ranks)
    shared = f"{cores} core{'s' if cores > 1 else ''} / {ranks} rank{'s' if ranks > 1 else ''}"
    if workers < each:
        return f"workers {workers} -> try {min(each, max(2 * workers, _FIRST_TRY))} ({shared})"
    return (
        f"{workers} worker{'s' if workers > 1 else ''} already use all cores ({shared}): make a "
        "sample cheaper to read (decode, resize and tokenize once, beforehand), or read from a faster disk"
    )
