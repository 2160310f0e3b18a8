"""The time breakdown of a step: every moment has exactly one category."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

from torchmuster.bench.profile.intervals import Intervals
from torchmuster.bench.profile.recording import RecordedStep
from torchmuster.bench.profile.trace_events import Lane
from torchmuster.bench.profile.trace_lanes import TraceLanes


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Seconds of one step by category, averaged over the analysed steps."""

    compute_s: float = 0.0  # without communication
    overlapped_s: float = 0.0  # computing, overlapped with communication
    exposed_s: float = 0.0  # communication or waiting for other ranks, without overlap
    optimizer_s: float = 0.0
    data_s: float = 0.0  # waiting for the loader
    reads_s: float = 0.0  # reading values to the host, including the device's idle time for them
    save_s: float = 0.0
    copies_s: float = 0.0  # on a device: only copies
    idle_s: float = 0.0  # none of these: the host's own code, or a device without work

    @property
    def total_s(self) -> float:
        """The whole step."""
        return sum(self.by_name().values())

    def by_name(self) -> dict[str, float]:
        """Return seconds by the share's name: compute, overlapped, ..."""
        return {one.name.removesuffix("_s"): float(getattr(self, one.name)) for one in fields(self)}

    def part(self, name: str) -> float:
        """Return a share as a part of the step, from 0 to 1."""
        whole_s = self.total_s
        return self.by_name()[name] / whole_s if whole_s else 0.0


WORDS: Mapping[str, str] = {
    "compute": "compute",
    "overlapped": "compute during communication",
    "exposed": "waiting for communication",
    "optimizer": "optimizer",
    "data": "waiting for data",
    "reads": "reading values to host",
    "save": "saving",
    "copies": "copies",
    "idle": "other code, or idle",
}


def shares_of_facts(
    steps: Iterable[RecordedStep], *, beside: float | None, unused: float | None
) -> Shares:
    """Return the shares of steps as the host saw them.

    ``beside`` and ``unused`` are the shares of forward and backward that overlap with communication
    and that have no operation; they are known from a trace only.
    """
    taken = list(steps)
    count = max(len(taken), 1)

    def mean(name: str) -> float:
        return sum(float(getattr(step, name)) for step in taken) / count

    passes_s = mean("forward_s") + mean("backward_s") - mean("waiting_s")
    overlapped_s, unused_s = passes_s * (beside or 0.0), passes_s * (unused or 0.0)
    return Shares(
        compute_s=max(passes_s - overlapped_s - unused_s, 0.0),
        overlapped_s=overlapped_s,
        exposed_s=mean("waiting_s") + mean("communication_s"),
        optimizer_s=mean("optimizer_s"),
        data_s=mean("data_s"),
        reads_s=mean("reads_s"),
        save_s=mean("save_s"),
        idle_s=unused_s + mean("other_s"),
    )


def moments(lanes: TraceLanes) -> dict[str, Intervals]:
    """Return the intervals of each share of :class:`Shares`, over all loaded steps."""
    found = _on_device(lanes) if lanes.on_device else _on_host(lanes)
    left = lanes.windows()
    named: dict[str, Intervals] = {}
    for name, when in found:
        taken = left & when
        named[name] = named[name] | taken if name in named else taken
        left = left - when
    named["idle"] = left
    return named


def shares_of_trace(lanes: TraceLanes) -> Shares:
    """Return the shares of a step, from its trace alone."""
    count = max(len(lanes.steps), 1)
    return Shares(
        **{f"{name}_s": when.total / 1e6 / count for name, when in moments(lanes).items()}
    )


def _on_host(lanes: TraceLanes) -> Iterator[tuple[str, Intervals]]:
    """Yield the shares of a rank that computes on the host, highest precedence first."""
    for name, lane in (("save", Lane.SAVE), ("data", Lane.DATA), ("reads", Lane.READS)):
        yield name, lanes.lane(lane)
    sending, work = lanes.lane(Lane.SENDING), lanes.host_work
    yield "exposed", lanes.lane(Lane.COMMUNICATION)
    yield "optimizer", lanes.lane(Lane.OPTIMIZER)
    yield "overlapped", work & sending
    yield "compute", work
    yield "exposed", sending


def _on_device(lanes: TraceLanes) -> Iterator[tuple[str, Intervals]]:
    """Yield the shares of a rank with a device.

    Host activity counts only while the device idles.
    """
    work, sending = lanes.lane(Lane.WORK), lanes.lane(Lane.SENDING)
    yield "overlapped", work & sending
    yield "optimizer", work & lanes.lane(Lane.OPTIMIZER_ON_DEVICE)
    yield "compute", work
    yield "exposed", sending
    copies = lanes.lane(Lane.COPIES)
    yield "copies", copies
    yield "save", lanes.lane(Lane.SAVE)
    yield "data", lanes.lane(Lane.DATA)
    # After a synchronization, the device waits until the host launches new work.
    idle = lanes.windows() - (work | sending | copies)
    yield "reads", idle.holding_any(lanes.lane(Lane.BLOCKED).ends)
    yield "reads", lanes.lane(Lane.READS)


def shares_of_passes(lanes: TraceLanes) -> tuple[float, float] | None:
    """Return the shares of forward and backward with communication, and without operation.

    Waiting time is excluded; None if the passes are not marked.
    """
    passes = (lanes.lane(Lane.FORWARD) | lanes.lane(Lane.BACKWARD)) & lanes.windows()
    sending, work = lanes.lane(Lane.SENDING), lanes.host_work
    busy = passes - (sending - work) - lanes.lane(Lane.READS)
    if not busy.total:
        return None
    return (busy & work & sending).total / busy.total, (busy - work).total / busy.total


_SHOWN = 12
_FINENESS = 8  # buckets per factor of 2
_SMALL_S = 20e-6  # launching a PyTorch operation takes some microseconds on the host
_BOUND_FROM = 0.5
_IDLE_FROM = 0.2


@dataclass(frozen=True, kw_only=True)
class ProfiledOperation:
    """One kind of operation: a device kernel, or a host operation without its children."""

    name: str
    calls: float  # per step
    self_s: float  # a step


@dataclass(frozen=True, kw_only=True)
class Smallness:
    """How small the operations of a step are.

    ``small_part`` is the share of time in operations under 20 microseconds; ``bound`` is whether
    the step is launch-bound, that is, limited by how fast operations can be launched.
    """

    calls: float  # a step
    median_s: float
    small_part: float
    bound: bool


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The operations of a step."""

    top: tuple[ProfiledOperation, ...]  # by time
    smallness: Smallness | None  # None without operations


class _Sizes:
    """A histogram of operation durations."""

    def __init__(self) -> None:
        self.count, self.whole_s, self.small_s = 0, 0.0, 0.0
        self._by_power: Counter[int] = Counter()

    def add(self, size_s: float) -> None:
        """Count one operation."""
        self.count += 1
        self.whole_s += size_s
        self.small_s += size_s if size_s < _SMALL_S else 0.0
        self._by_power[round(_FINENESS * math.log2(max(size_s, 1e-9)))] += 1

    def median_s(self) -> float:
        """Return the median, accurate to 4 %."""
        seen = 0
        for power, count in sorted(self._by_power.items()):
            seen += count
            if 2 * seen >= self.count:
                return float(2 ** (power / _FINENESS))
        return 0.0


def operations_of_trace(lanes: TraceLanes, shares: Shares) -> Operations:
    """Return the operations of the steps of a trace."""
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
            ProfiledOperation(
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
    """Yield every operation on the computing threads with its self time."""
    threads = lanes.working_threads
    for step in lanes.steps:
        for thread, spans in step.operations.items():
            if thread not in threads:
                continue
            opened: list[list[float]] = []  # end, time of children, name, begin
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
