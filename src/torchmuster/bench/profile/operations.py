"""Which operations take the time, and whether they are so small that starting them is most of it."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torchmuster.bench.profile.shares import Shares
from torchmuster.bench.profile.trace_kinds import Lane
from torchmuster.bench.profile.trace_lanes import TraceLanes

_SHOWN = 12
_FINENESS = 8  # places for each doubling
_SMALL_S = 20e-6  # an operation of PyTorch costs its host some microseconds, whatever it computes
_BOUND_FROM = 0.5
_IDLE_FROM = 0.2


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One kind of operation: a kernel on a device, or an operation on the host without those it calls."""

    name: str
    calls: float  # a step
    self_s: float  # a step


@dataclass(frozen=True, kw_only=True)
class Smallness:
    """How small the operations of a step are.

    ``small_part`` is the part of their time that goes to those of less than 20 microseconds; ``bound`` tells whether
    the step is limited by how fast operations can be started, not by what they compute.
    """

    calls: float  # a step
    median_s: float
    small_part: float
    bound: bool


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The operations of a step."""

    top: tuple[Operation, ...]  # by their time
    smallness: Smallness | None  # None where there are none


class _Sizes:
    """How long operations are, without holding each of them."""

    def __init__(self) -> None:
        self.count, self.whole_s, self.small_s = 0, 0.0, 0.0
        self._by_power: Counter[int] = Counter()

    def add(self, size_s: float) -> None:
        """Count one more."""
        self.count += 1
        self.whole_s += size_s
        self.small_s += size_s if size_s < _SMALL_S else 0.0
        self._by_power[round(_FINENESS * math.log2(max(size_s, 1e-9)))] += 1

    def median_s(self) -> float:
        """Return the median, exact to four per cent."""
        seen = 0
        for power, count in sorted(self._by_power.items()):
            seen += count
            if 2 * seen >= self.count:
                return float(2 ** (power / _FINENESS))
        return 0.0


def of_trace(lanes: TraceLanes, shares: Shares) -> Operations:
    """Return what the steps of a trace are made of."""
    calls: dict[int, int] = defaultdict(int)
    total: dict[int, float] = defaultdict(float)
    sizes = _Sizes()
    for name, self_us in _kernels(lanes) if lanes.on_device else _host_operations(lanes):
        calls[name] += 1
        total[name] += self_us
        sizes.add(self_us / 1e6)
    steps = max(len(lanes.steps), 1)
    top = sorted(total, key=lambda name: -total[name])[:_SHOWN]
    return Operations(
        top=tuple(
            Operation(
                name=lanes.names[name], calls=calls[name] / steps, self_s=total[name] / 1e6 / steps
            )
            for name in top
        ),
        smallness=_smallness(sizes, steps, shares if lanes.on_device else None),
    )


def _smallness(sizes: _Sizes, steps: int, device_shares: Shares | None) -> Smallness | None:
    if not sizes.whole_s:
        return None
    small_part, median_s = sizes.small_s / sizes.whole_s, sizes.median_s()
    if device_shares is None:
        bound = small_part >= _BOUND_FROM
    else:
        bound = median_s < _SMALL_S and device_shares.part("idle") >= _IDLE_FROM
    return Smallness(
        calls=sizes.count / steps, median_s=median_s, small_part=small_part, bound=bound
    )


def _kernels(lanes: TraceLanes) -> Iterator[tuple[int, float]]:
    for step in lanes.steps:
        spans = step.lanes.get(Lane.WORK)
        if spans is not None:
            for begin, end, name in zip(spans.begins, spans.ends, spans.names, strict=True):
                yield name, end - begin


def _host_operations(lanes: TraceLanes) -> Iterator[tuple[int, float]]:
    """Give every operation on the threads that compute, with the time that none of those it called had."""
    threads = lanes.working_threads
    for step in lanes.steps:
        for thread, spans in step.operations.items():
            if thread not in threads:
                continue
            opened: list[list[float]] = []  # end, what it called, name, begin
            for begin, end, name in spans.in_order():
                while opened and opened[-1][0] <= begin:
                    yield _closed(opened)
                opened.append([end, 0.0, name, begin])
            while opened:
                yield _closed(opened)


def _closed(opened: list[list[float]]) -> tuple[int, float]:
    end, called, name, begin = opened.pop()
    if opened:
        opened[-1][1] += end - begin
    return int(name), max(end - begin - called, 0.0)
