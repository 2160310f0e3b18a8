"""The lanes of one rank's trace: activities over time, stored compactly.

Events are not ordered by time. Those of the marked steps are stored as begins and ends of 8 bytes
each, with their steps; if there are more than ``most_held``, the last step is dropped, or the
second half of a single step, and the report mentions it.
"""

import functools
import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchmuster.bench.profile.intervals import Intervals
from torchmuster.bench.profile.trace_events import (
    STEP_MARKS,
    Event,
    Lane,
    MemoryTimeline,
    TraceFile,
    computes,
    is_operation,
    lane_of,
    step_of,
)

MOST_HELD = 3_000_000  # intervals: about 100 MB
_MOST_NAMES = 20_000
_OTHER_NAMES = "(names beyond the first 20,000)"


class Spans:
    """Begins and ends, each with the number of its name."""

    __slots__ = ("begins", "ends", "names")

    def __init__(self) -> None:
        self.begins: array[float] = array("d")
        self.ends: array[float] = array("d")
        self.names: array[int] = array("i")

    def add(self, begin: float, end: float, name: int) -> None:
        """Add one span."""
        self.begins.append(begin)
        self.ends.append(end)
        self.names.append(name)

    def forget_from(self, moment: float) -> None:
        """Keep only spans that began before a moment."""
        kept = [at for at, begin in enumerate(self.begins) if begin < moment]
        self.begins = array("d", (self.begins[at] for at in kept))
        self.ends = array("d", (self.ends[at] for at in kept))
        self.names = array("i", (self.names[at] for at in kept))

    def in_order(self) -> Iterator[tuple[float, float, int]]:
        """Yield the spans by begin.

        An enclosing span comes before its children, as the profiler writes it.
        """
        begins, ends, names = self.begins, self.ends, self.names
        order: Iterable[int] = range(len(begins))
        if any(before > after for before, after in pairwise(begins)):
            order = sorted(order, key=begins.__getitem__)
        for at in order:
            yield begins[at], ends[at], names[at]

    def pairs(self, *, without: frozenset[int] = frozenset()) -> Iterator[tuple[float, float]]:
        """Yield the intervals of all spans by begin, without some names."""
        since, until = math.inf, -math.inf
        for begin, end, name in self.in_order():
            if name in without:
                continue
            if begin <= until:  # most lie within the previous one
                until = max(until, end)
                continue
            if since < until:
                yield since, until
            since, until = begin, end
        if since < until:
            yield since, until


@dataclass
class StepLanes:
    """What began within one step."""

    number: int | None
    begin: float
    end: float
    lanes: dict[Lane, Spans] = field(default_factory=dict)
    operations: dict[Any, Spans] = field(default_factory=dict)  # by thread

    @property
    def held(self) -> int:
        """The number of stored spans."""
        spans = (*self.lanes.values(), *self.operations.values())
        return sum(len(one.begins) for one in spans)

    def halve(self) -> None:
        """Cut the step in the middle, and drop what began later."""
        self.end = (self.begin + self.end) / 2
        for spans in (*self.lanes.values(), *self.operations.values()):
            spans.forget_from(self.end)


@dataclass
class TraceLanes:
    """One rank's trace, in microseconds of its own clock."""

    header: dict[str, Any]
    steps: list[StepLanes]
    names: list[str]
    main_thread: Any
    left_out: tuple[int, ...]  # steps of the trace that were not loaded
    shortened: bool  # only the beginning of a step is loaded because of its size
    memory: MemoryTimeline
    events: int
    truncated: bool
    unreadable: int

    @property
    def on_device(self) -> bool:
        """Whether a device worked for this rank."""
        return any(Lane.WORK in step.lanes for step in self.steps)

    def lane(self, lane: Lane) -> Intervals:
        """Return the intervals of this activity."""
        return Intervals.of(
            *(step.lanes[lane].pairs() for step in self.steps if lane in step.lanes)
        )

    def windows(self) -> Intervals:
        """Return the loaded steps."""
        return Intervals.of([(step.begin, step.end) for step in self.steps])

    @functools.cached_property
    def working_threads(self) -> frozenset[Any]:
        """The threads on which the training computes: the loop's own, and those of the backward pass."""
        found = {self.main_thread}
        backward = {
            number
            for number, name in enumerate(self.names)
            if name.startswith("autograd::engine::evaluate_function")
        }
        for step in self.steps:
            for thread, spans in step.operations.items():
                if self.main_thread is None or not backward.isdisjoint(spans.names):
                    found.add(thread)
        return frozenset(found)

    @functools.cached_property
    def host_work(self) -> Intervals:
        """The intervals with an operation on the host's computing threads."""
        sends = frozenset(number for number, name in enumerate(self.names) if not computes(name))
        return Intervals.of(
            *(
                spans.pairs(without=sends)
                for step in self.steps
                for thread, spans in step.operations.items()
                if thread in self.working_threads
            )
        )


def read_lanes(
    path: Path, *, most_held: int = MOST_HELD, heard: Callable[[float], None] = lambda _: None
) -> TraceLanes:
    """Read a trace twice: first its steps, then the activities in them."""
    trace = TraceFile(path, heard=heard)
    steps, main_thread = _steps(trace)
    return _Filling(trace, steps, main_thread, most_held).lanes()


def _steps(trace: TraceFile) -> tuple[list[StepLanes], Any]:
    """Return the marked steps, or the whole trace as one step if none is marked."""
    for mark in STEP_MARKS:
        found: dict[int, tuple[float, float, Any]] = {}
        for batch in trace.batches(holding=mark):
            for event in batch:
                number = step_of(event)
                if number is not None and isinstance(event.ts, float):
                    found.setdefault(number, (event.ts, event.ts + event.dur, event.tid))
        if found:
            steps = [
                StepLanes(number=number, begin=begin, end=end)
                for number, (begin, end, _) in sorted(found.items(), key=lambda one: one[1][0])
            ]
            return steps, next(iter(found.values()))[2]
    return [_whole(trace)], None


def _whole(trace: TraceFile) -> StepLanes:
    begin, end = float("inf"), float("-inf")
    for batch in trace.batches():
        for event in batch:
            if event.ph == "X" and isinstance(event.ts, float) and event.cat != "Trace":
                begin, end = min(begin, event.ts), max(end, event.ts + event.dur)
    return StepLanes(number=None, begin=min(begin, end), end=max(begin, end))


class _Filling:
    """Sorts the events of a trace into steps and lanes."""

    def __init__(
        self, trace: TraceFile, steps: list[StepLanes], main_thread: Any, most_held: int
    ) -> None:
        self._trace, self._steps, self._main_thread = trace, steps, main_thread
        self._most_held, self._held = most_held, 0
        self._begins = [step.begin for step in steps]
        self._numbers: dict[str, int] = {}
        self._left_out: list[int] = []
        self._shortened = False

    def lanes(self) -> TraceLanes:
        memory = MemoryTimeline.between(self._steps[0].begin, self._steps[-1].end)
        count = 0
        for batch in self._trace.batches():
            count += len(batch)
            for event in batch:
                if event.ph == "X":
                    self._put(event)
                elif event.ph == "i" and event.name == "[memory]":
                    memory.add(event)
            while self._held > self._most_held:
                self._let_go()
        return TraceLanes(
            header=self._trace.header,
            steps=self._steps,
            names=list(self._numbers),
            main_thread=self._main_thread,
            left_out=tuple(reversed(self._left_out)),
            shortened=self._shortened,
            memory=memory,
            events=count,
            truncated=self._trace.truncated,
            unreadable=self._trace.unreadable,
        )

    def _put(self, event: Event) -> None:
        begin = event.ts
        if not isinstance(begin, float):
            return
        at = bisect_right(self._begins, begin) - 1
        if at < 0 or begin >= self._steps[at].end:
            return
        step = self._steps[at]
        if is_operation(event):
            spans = step.operations.get(event.tid)
            if spans is None:
                spans = step.operations[event.tid] = Spans()
        elif (lane := lane_of(event)) is not None:
            spans = step.lanes.get(lane)
            if spans is None:
                spans = step.lanes[lane] = Spans()
        else:
            return
        spans.add(begin, begin + event.dur, self._number(event.name))
        self._held += 1

    def _number(self, name: str) -> int:
        found = self._numbers.get(name)
        if found is None:
            if len(self._numbers) >= _MOST_NAMES:
                name = _OTHER_NAMES
            found = self._numbers.setdefault(name, len(self._numbers))
        return found

    def _let_go(self) -> None:
        """Drop the last step, or the second half of the only one."""
        step = self._steps[-1]
        if len(self._steps) > 1:
            self._steps.pop()
            self._begins.pop()
            self._held -= step.held
            if step.number is not None:
                self._left_out.append(step.number)
            return
        before = step.held
        step.halve()
        self._shortened = True
        self._held -= before - step.held
