"""Measured memory in tables, pictures and series."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torchmuster.bench.probing import run_probe
from torchmuster.bench.record import Series
from torchmuster.bench.report.report import Picture, Table
from torchmuster.bench.statistics import estimate
from torchmuster.decision import Decision
from torchmuster.pages.charts import Axis, Curve, Stack, amount_text, line_chart, stacked_chart
from torchmuster.plan.job import Candidate, Recompute, Work
from torchmuster.plan.proof.comparison import signed_percent
from torchmuster.plan.record import TraceRecord, TraceRequest
from torchmuster.plan.tracing.tracer import Found, TraceRefused
from torchmuster.units import format_bytes

# A deeper model is imagined only where it says most: with nothing and with everything computed again.
_MOST_BLOCKS = 16


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """Peaks of some ways; why there are none, where there are none."""

    planned_bytes: dict[Recompute, int]
    not_planned: str = ""


def forecast_stages(
    work: Work,
    candidate: Candidate,
    ways: Sequence[Recompute],
    *,
    blocks: int,
    kernels: Literal["cpu", "cuda"],
    look: Callable[[Sequence[TraceRequest]], Sequence[Found]],
) -> MemoryForecast:
    """Forecast the peaks of ways to compute again; ``look`` traces."""
    asked = [one for one in ways if blocks <= _MOST_BLOCKS or one in ("none", "full")]
    requests = [
        TraceRequest(work=work, candidate=replace(candidate, recompute=way), kernels=kernels)
        for way in asked
    ]
    found = look(requests)
    refused = next((one for one in found if isinstance(one, TraceRefused)), None)
    if refused is not None:
        return MemoryForecast(planned_bytes={}, not_planned=refused.what)
    return MemoryForecast(
        planned_bytes={
            way: one.peak_bytes
            for way, one in zip(asked, found, strict=True)
            if isinstance(one, TraceRecord)
        }
    )


# A step that is less than so much slower is as fast: nobody would notice.
EQUALLY_FAST = 0.02
# Less than this of the peak is not worth computing anything twice.
_WORTH_IT = 0.1
# A knee lies so far off the straight line from nothing to everything computed again, as a share of its length.
_KNEE = 0.15
_MOST_WAYS = 7


@dataclass(frozen=True, kw_only=True)
class RecomputeMode:
    """What steps take with some of the blocks computed again."""

    recompute: Recompute  # as in train.activation_checkpointing
    blocks: int  # that are computed again
    peak_bytes: int | None  # at most alive in a step; None: it did not fit
    reserved_bytes: int | None = None  # by an accelerator's allocator; None on the CPU
    step_s: tuple[float, ...] = ()  # of whole steps; empty where it did not fit

    @property
    def needed_bytes(self) -> int | None:
        """What a device must have for it: what its allocator keeps, where there is one."""
        return self.peak_bytes if self.reserved_bytes is None else self.reserved_bytes

    @property
    def usual_s(self) -> float:
        """The time of a step."""
        return statistics.median(self.step_s)

    @property
    def name(self) -> str:
        """What is computed again, in words."""
        return recompute_name(self.recompute)


def recompute_name(recompute: Recompute) -> str:
    """Return what is computed again, in words."""
    if recompute == "none":
        return "nothing"
    if recompute == "selective":
        return "selective"
    if recompute in (1, "full"):
        return "every block"
    ending = {2: "2nd", 3: "3rd"}.get(int(recompute), f"{recompute}th")
    return f"every {ending} block"


def recompute_modes_for(blocks: int) -> list[Recompute]:
    """Return what can be tried on a model of so many repeated blocks, what saves most first.

    Numbers that leave the same number of blocks to be computed again are the same way. Of a deep model not all are tried.
    """
    if not blocks:
        return ["none"]
    numbers: dict[int, int] = {}  # by how many blocks are computed again
    for every in range(1, blocks + 1):
        numbers.setdefault(blocks // every, every)
    chosen = list(numbers.values())
    while len(chosen) > _MOST_WAYS - 2:
        chosen = [*chosen[:2], *chosen[2:][::2]]
    return ["full" if every == 1 else every for every in chosen] + ["selective", "none"]


def best_recompute(
    ways: Sequence[RecomputeMode], *, limit_bytes: int | None
) -> Decision[RecomputeMode] | None:
    """Choose: the fastest that stays within the limit, or where none is given the knee; None: nothing fits."""
    ran = [one for one in ways if one.peak_bytes is not None]
    if limit_bytes is not None:
        return _within(limit_bytes, [one for one in ran if (one.needed_bytes or 0) <= limit_bytes])
    if not ran:
        return None
    simplest = min(ran, key=lambda one: (one.blocks, one.recompute == "selective"))
    if simplest.recompute != "none":
        chosen = fastest_recompute(ran)
        return Decision(
            value=chosen,
            reason="the fastest of what fits on this device; with nothing computed again it runs out of "
            "memory",
        )
    return _knee(ran, simplest)


def fastest_recompute(ways: Sequence[RecomputeMode]) -> RecomputeMode:
    """Return the fastest; of those that are as fast, or within its noise, the one that computes least again."""
    quickest = estimate(min(ways, key=lambda one: one.usual_s).step_s)
    enough_s = max(quickest.high, quickest.median * (1 + EQUALLY_FAST))
    equal = [one for one in ways if one.usual_s <= enough_s]
    return min(equal, key=lambda one: (one.blocks, one.usual_s))


def _within(limit_bytes: int, fitting: Sequence[RecomputeMode]) -> Decision[RecomputeMode] | None:
    if not fitting:
        return None
    chosen = fastest_recompute(fitting)
    return Decision(
        value=chosen,
        reason=f"the fastest of {len(fitting)} that stay within {format_bytes(limit_bytes)}: "
        f"{_figures(chosen)}",
    )


def _knee(ways: Sequence[RecomputeMode], nothing: RecomputeMode) -> Decision[RecomputeMode]:
    """Choose the way that saves much more than its share of the time, if there is one."""
    assert nothing.peak_bytes is not None
    least = min(ways, key=lambda one: one.peak_bytes or 0)
    saved = nothing.peak_bytes - (least.peak_bytes or 0)
    if saved < _WORTH_IT * nothing.peak_bytes:
        return Decision(
            value=nothing,
            reason=f"computing again saves at most {saved / nothing.peak_bytes * 100:.0f} % "
            f"of {format_bytes(nothing.peak_bytes)} ({least.name})",
        )
    slowest_s = max(one.usual_s for one in ways) - nothing.usual_s
    if slowest_s <= EQUALLY_FAST * nothing.usual_s:
        return Decision(
            value=least,
            reason=f"it saves most, and no way is slower by more than "
            f"{EQUALLY_FAST * 100:.0f} %; {_against(least, nothing)}",
        )

    def advantage(one: RecomputeMode) -> float:
        gained = (nothing.peak_bytes or 0) - (one.peak_bytes or 0)
        return gained / saved - (one.usual_s - nothing.usual_s) / slowest_s

    knee = max(ways, key=advantage)
    noise = max(estimate(one.step_s).noise * one.usual_s for one in (knee, nothing)) / slowest_s
    if advantage(knee) > max(_KNEE, noise):
        return Decision(
            value=knee,
            reason=f"the knee of the curve: {_against(knee, nothing)}; more would cost "
            "more time for what it saves",
        )
    return Decision(
        value=nothing,
        reason="where memory suffices: no way saves more than its share of the time "
        f"({least.name}: {_against(least, nothing)}); with --limit SIZE the fastest that fits is found",
    )


def _against(one: RecomputeMode, other: RecomputeMode) -> str:
    assert one.peak_bytes is not None
    assert other.peak_bytes is not None
    less, more = 1 - one.peak_bytes / other.peak_bytes, one.usual_s / other.usual_s - 1
    return (
        f"{format_bytes(one.peak_bytes)} instead of {format_bytes(other.peak_bytes)} "
        f"({-less * 100:+.0f} %) for {more * 100:+.0f} % time"
    )


def _figures(one: RecomputeMode) -> str:
    return f"{format_bytes(one.needed_bytes or 0)}, {one.usual_s * 1000:.0f} ms a step"


PROGRAM = "torchmuster.bench.probes.memory"
# What memory is for, in the order in which it comes to be; the last is what is left beside the others.
PARTS = ("parameters", "gradients", "optimiser states", "activations and others")


@dataclass(frozen=True, kw_only=True)
class MemoryRequest:
    """What a rank is told to do."""

    work: Work
    candidate: Candidate  # in one process; its precision is replaced by what is asked for
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    device: Literal["auto", "cpu"]
    rounds: int  # of timed steps; each has one step of each way


@dataclass(frozen=True, kw_only=True)
class StageTaken:
    """What tensors took in one stage of a step."""

    name: str  # model built, forward, loss, backward, optimiser step
    step: int  # 1, 2; 0 before the first
    micro_batch: int  # 1, 2; 0 outside of them
    before_bytes: int
    peak_bytes: int  # at most, within it
    after_bytes: int
    parts: Mapping[str, int]  # what is there after it, by PARTS

    @property
    def title(self) -> str:
        """The stage as people see it."""
        micro = f", micro-batch {self.micro_batch}" if self.micro_batch > 1 else ""
        return f"step {self.step}: {self.name}{micro}" if self.step else self.name


@dataclass(frozen=True, kw_only=True)
class OfPrecision:
    """The stages of the first two steps in one precision; none if memory ran out."""

    precision: str
    stages: tuple[StageTaken, ...]

    @property
    def highest(self) -> StageTaken | None:
        """The stage with the most memory in the second step, which is what all later ones are like."""
        second = [one for one in self.stages if one.step == 2]
        return max(second, key=lambda one: one.peak_bytes, default=None)


@dataclass(frozen=True, kw_only=True)
class MemoryAnswer:
    """What a rank saw."""

    rank: int
    device: str
    limit_bytes: int | None  # what the device has, or this process may take
    precision: Literal["fp32", "bf16", "fp16"]  # that the ways were tried in
    precision_reason: str
    parameter_count: int
    blocks: int  # repeated layers of the model
    stages: tuple[OfPrecision, ...]  # the precision of the ways first
    ways: tuple[RecomputeMode, ...]  # what saves most first


def measure_memory(
    request: MemoryRequest, *, device: Literal["cpu", "gpu"], say: Callable[[str], None]
) -> MemoryAnswer:
    """Follow and time a few real steps in a process of its own."""
    (answer,) = run_probe(
        PROGRAM,
        request,
        MemoryAnswer,
        device=device,
        folder=request.work.folder,
        doing="measuring memory",
        say=say,
    )
    return answer


_GIVEN_BACK = "given back by its end"
_UNKNOWN = "-"


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory:
    """What was measured, and what was known before."""

    answer: MemoryAnswer
    model: str  # as people know it
    micro_batch_size: int
    limit_bytes: int | None  # that a step is to stay within; None: nobody has set one
    planned_bytes: Mapping[Recompute, int]  # of the ways that a plan was made for
    not_planned: str = ""  # why there is none

    @property
    def nothing(self) -> RecomputeMode | None:
        """The steps with nothing computed again; None if they did not fit."""
        return next(
            (one for one in self.answer.ways if one.recompute == "none" and one.step_s), None
        )


def memory_tables(measured: MeasuredMemory) -> Iterator[Table]:
    """Return the stages, and the ways to compute again."""
    answer = measured.answer
    main, *others = answer.stages
    beside = {(one.step, one.micro_batch, one.name): one for of in others for one in of.stages}
    other = others[0].precision if others else ""
    yield Table(
        title=f"memory by stage, {main.precision}, micro-batch {measured.micro_batch_size}",
        head=("stage", "before", "peak", "after", *_short_parts(), f"peak {other}"),
        rows=tuple(
            (
                one.title,
                *map(format_bytes, (one.before_bytes, one.peak_bytes, one.after_bytes)),
                *map(format_bytes, one.parts.values()),
                _memory_size(beside.get((one.step, one.micro_batch, one.name))),
            )
            for one in main.stages
        ),
        note="Bytes of tensors. Parameters, gradients, states and the rest are what is there after a stage.",
    )
    if not answer.blocks:
        return
    plain = measured.nothing
    yield Table(
        title=f"what computing again saves, of {answer.blocks} blocks, {answer.precision}",
        head=("computed again", "blocks", "peak", "forecast", "a step", "±", "memory", "time"),
        rows=tuple(_memory_row(one, plain, measured.planned_bytes) for one in answer.ways),
        note="Selective keeps the results of matrix products, convolutions and attention.",
    )


def _short_parts() -> tuple[str, ...]:
    return ("parameters", "gradients", "states", "rest")


def _memory_size(stage: StageTaken | None) -> str:
    return _UNKNOWN if stage is None else format_bytes(stage.peak_bytes)


def _memory_row(
    way: RecomputeMode, plain: RecomputeMode | None, planned: Mapping[Recompute, int]
) -> tuple[str, ...]:
    forecast = planned.get(way.recompute)
    known = _UNKNOWN if forecast is None else format_bytes(forecast)
    if way.peak_bytes is None:
        nothing = (_UNKNOWN,) * 3
        return way.name, str(way.blocks), "does not fit", known, *nothing, _UNKNOWN
    took = estimate(way.step_s)
    less = more = _UNKNOWN
    if plain is not None and plain.peak_bytes is not None:
        less = signed_percent(way.peak_bytes / plain.peak_bytes)
        more = signed_percent(took.median / plain.usual_s)
    return (
        *(way.name, str(way.blocks), format_bytes(way.peak_bytes), known),
        *(amount_text(took.median, "s"), f"{took.noise * 100:.0f} %", less, more),
    )


def memory_pictures(measured: MeasuredMemory) -> Iterator[Picture]:
    """Draw the stages, and peak over time."""
    answer = measured.answer
    main, *others = answer.stages
    bars = [Stack(name=one.title, parts=_at_peak(one)) for one in main.stages]
    bars += [
        Stack(name=f"{of.precision}, {one.title}", parts=_at_peak(one))
        for of in others
        for one in of.stages
        if one.step == 2
    ]
    if bars:
        yield Picture(
            title="memory by stage",
            svg=stacked_chart(
                "The peak of each stage, and what of it is there afterwards", "B", bars
            ),
            caption=f"In {main.precision}"
            + "".join(f", and below the second step in {of.precision}" for of in others)
            + ". The second step is what all later ones are like.",
        )
    curve = [one for one in answer.ways if one.peak_bytes is not None and one.step_s]
    if len(curve) > 1:
        yield Picture(
            title="peak and time",
            svg=line_chart(
                "Peak memory of a step over its time",
                Axis(title="time of a step", unit="s"),
                Axis(title="peak", unit="B"),
                _curves(measured, curve),
            ),
            caption="From left to right more is computed again. Lower and further left is better.",
        )


def _at_peak(stage: StageTaken) -> dict[str, float]:
    parts: dict[str, float] = dict(stage.parts)
    parts[_GIVEN_BACK] = max(stage.peak_bytes - stage.after_bytes, 0)
    return parts


def _curves(measured: MeasuredMemory, ways: list[RecomputeMode]) -> list[Curve]:
    numbered = sorted(
        (one for one in ways if one.recompute != "selective"), key=lambda one: one.blocks
    )
    curves = [
        Curve(
            name="every n-th block",
            points=[(one.usual_s, one.peak_bytes or 0) for one in numbered],
        )
    ]
    curves += [
        Curve(name="selective", points=[(one.usual_s, one.peak_bytes or 0)])
        for one in ways
        if one.recompute == "selective"
    ]
    planned = [one for one in numbered if one.recompute in measured.planned_bytes]
    if planned:
        points = [(one.usual_s, measured.planned_bytes[one.recompute]) for one in planned]
        curves.append(Curve(name="forecast", points=points, dashed=True))
    return curves


def memory_series(measured: MeasuredMemory) -> Iterator[Series]:
    """Return what a record keeps."""
    for of in measured.answer.stages:
        for one in of.stages:
            yield Series(
                name="stage_peak",
                unit="B",
                better="lower",
                samples=(float(one.peak_bytes),),
                labels={
                    "precision": of.precision,
                    "step": one.step,
                    "micro_batch": one.micro_batch,
                    "stage": one.name,
                },
            )
    for way in measured.answer.ways:
        labels: dict[str, str | int | float] = {"recompute": str(way.recompute)}
        if way.peak_bytes is not None:
            yield Series(
                name="peak",
                unit="B",
                better="lower",
                samples=(float(way.peak_bytes),),
                labels=labels,
            )
        if way.step_s:
            yield Series(name="step", unit="s", better="lower", samples=way.step_s, labels=labels)
