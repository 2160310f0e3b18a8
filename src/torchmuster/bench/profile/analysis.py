"""The analysis of a profile: shares of each rank's step, operations, memory, straggler."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchmuster.bench.profile import shares, slow_rank
from torchmuster.bench.profile import shares as operations
from torchmuster.bench.profile.changes import TriedChange
from torchmuster.bench.profile.gains import RanksStep, usual_step_s, usual_steps
from torchmuster.bench.profile.intervals import Intervals
from torchmuster.bench.profile.recording import RankFacts, read_facts
from torchmuster.bench.profile.shares import Operations, Shares
from torchmuster.bench.profile.slow_rank import SlowRank
from torchmuster.bench.profile.step_picture import Pictured, picture_of
from torchmuster.bench.profile.trace_events import Lane
from torchmuster.bench.profile.trace_lanes import MOST_HELD, StepLanes, TraceLanes, read_lanes
from torchmuster.bench.profile.trials_wanted import trials_wanted
from torchmuster.errors import Impossible

_SAY_EVERY_S = 8.0


@dataclass(frozen=True, kw_only=True)
class TraceAnalysis:
    """The analysis of one rank's trace; small for any size of trace."""

    steps: tuple[int | None, ...]  # that were analysed
    left_out: tuple[int, ...]  # that are in the trace but were not analysed
    shortened: bool  # only the beginning of the step was analysed
    events: int
    truncated: bool
    unreadable: int
    on_device: bool
    shares: Shares
    passes: (
        tuple[float, float] | None
    )  # shares of forward and backward: overlapped with communication, without an operation
    messages: float  # collectives per step
    sent_s: tuple[float, ...]  # in collectives, by step
    operations: Operations
    memory: tuple[tuple[float, float], ...]  # seconds, bytes
    picture: Pictured | None


@dataclass(frozen=True, kw_only=True)
class RankAnalysis:
    """One rank: its recorded facts, and its trace if available."""

    facts: RankFacts
    trace: TraceAnalysis | None
    shares: Shares
    no_trace: str = ""  # why a recorded trace could not be analysed


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """A whole profile. ``steps`` are the evaluated steps, by rank."""

    ranks: tuple[RankAnalysis, ...]
    steps: tuple[RanksStep, ...]
    step_s: float
    slow: SlowRank | None
    took_s: float

    @property
    def facts(self) -> tuple[RankFacts, ...]:
        """The facts of the ranks."""
        return tuple(one.facts for one in self.ranks)

    @property
    def wanted(self) -> tuple[TriedChange, ...]:
        """Changes to try because their gain cannot be computed, most promising first."""
        bound = any(
            one.trace.operations.smallness.bound
            for one in self.ranks
            if one.trace is not None and one.trace.operations.smallness is not None
        )
        return trials_wanted(self.facts, self.steps, small_operations=bound)

    @property
    def profiler_factor(self) -> float | None:
        """How many times as long a step takes with the profiler; None if no step was profiled."""
        profiled = [step.took_s for one in self.facts for step in one.steps if step.profiled]
        plain = [step.took_s for one in self.facts for step in one.steps if not step.profiled]
        if not profiled or not plain:
            return None
        return statistics.median(profiled) / statistics.median(plain)


def analyse_profile(
    folder: Path, *, most_held: int = MOST_HELD, say: Callable[[str], None] = lambda _: None
) -> Analysis:
    """Read a profile's folder, one trace after the other."""
    begun = time.monotonic()
    facts = read_facts(folder)
    traces: dict[int, TraceAnalysis | str] = {}
    kept = [(one.rank, folder / one.trace.file) for one in facts if one.trace is not None]
    heard = _Heard(len(kept), say)
    for rank, path in kept:
        heard.begin(rank)
        try:
            lanes = read_lanes(path, most_held=most_held, heard=heard.part)
            traces[rank] = analyse_trace(lanes)
        except (OSError, Impossible) as error:  # continue with the other ranks
            traces[rank] = str(error)
    return analyse_facts(facts, traces, took_s=time.monotonic() - begun)


def analyse_facts(
    facts: Sequence[RankFacts],
    traces: Mapping[int, TraceAnalysis | str] | None = None,
    *,
    took_s: float = 0.0,
) -> Analysis:
    """Analyse facts and traces; a text instead of a trace says why it could not be read."""
    steps = tuple(usual_steps(facts))
    ranks = tuple(_rank(one, (traces or {}).get(one.rank), steps) for one in facts)
    return Analysis(
        ranks=ranks,
        steps=steps,
        step_s=usual_step_s(steps) if steps else 0.0,
        slow=_analysis_slow(ranks, steps),
        took_s=took_s,
    )


def _analysis_slow(ranks: Sequence[RankAnalysis], steps: Sequence[RanksStep]) -> SlowRank | None:
    """Return the straggler, by device time if there is a device."""
    traced = {one.facts.rank: one.trace for one in ranks if one.trace and one.trace.on_device}
    if not traced:
        return slow_rank.find_slow_rank(steps)
    return slow_rank.on_devices(
        {rank: trace.sent_s for rank, trace in traced.items()},
        {rank: trace.shares for rank, trace in traced.items()},
    )


def analyse_trace(lanes: TraceLanes) -> TraceAnalysis:
    """Return the analysis of one trace."""
    found = shares.moments(lanes)
    count = max(len(lanes.steps), 1)
    mean = Shares(**{f"{name}_s": when.total / 1e6 / count for name, when in found.items()})
    sent = [step.lanes[Lane.SENDING] for step in lanes.steps if Lane.SENDING in step.lanes]
    return TraceAnalysis(
        steps=tuple(step.number for step in lanes.steps),
        left_out=lanes.left_out,
        shortened=lanes.shortened,
        events=lanes.events,
        truncated=lanes.truncated,
        unreadable=lanes.unreadable,
        on_device=lanes.on_device,
        shares=mean,
        passes=None if lanes.on_device else shares.shares_of_passes(lanes),
        messages=sum(len(spans.begins) for spans in sent) / count,
        sent_s=tuple(_sent_s(step) for step in lanes.steps),
        operations=operations.operations_of_trace(lanes, mean),
        memory=lanes.memory.points(),
        picture=picture_of(lanes, found),
    )


def _sent_s(step: StepLanes) -> float:
    spans = step.lanes.get(Lane.SENDING)
    return Intervals.of(spans.pairs()).total / 1e6 if spans is not None else 0.0


def _rank(
    facts: RankFacts, found: TraceAnalysis | str | None, steps: Sequence[RanksStep]
) -> RankAnalysis:
    """Merge facts and trace of a rank; the device timeline takes precedence over the host's."""
    trace, why = (None, found) if isinstance(found, str) else (found, "")
    if trace is not None and trace.on_device:
        return RankAnalysis(facts=facts, trace=trace, shares=trace.shares)
    beside, unused = (trace.passes if trace is not None else None) or (None, None)
    own = [step[facts.rank] for step in steps]
    return RankAnalysis(
        facts=facts,
        trace=trace,
        shares=shares.shares_of_facts(own, beside=beside, unused=unused),
        no_trace=why,
    )


class _Heard:
    """Reports the progress of reading traces every few seconds."""

    def __init__(self, count: int, say: Callable[[str], None]) -> None:
        self._count, self._say, self._said_at = count, say, time.monotonic()
        self._number, self._doing = 0, ""

    def begin(self, rank: int) -> None:
        """Start with another rank's trace."""
        self._number += 1
        self._doing = f"reading rank {rank}'s trace, {self._number} of {self._count}"
        self.part(0.0)

    def part(self, part: float) -> None:
        """Receive the share of the file that was read."""
        if time.monotonic() - self._said_at >= _SAY_EVERY_S:
            self._said_at = time.monotonic()
            self._say(f"{self._doing}: {part:.0%} of the file")
