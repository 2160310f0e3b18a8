"""Memory of training steps: request, answer, choice of recomputation, tables and charts."""

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

# Deeper models are traced only without and with full recomputation.
_MOST_BLOCKS = 16


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """Forecast peaks of recompute modes, or the reason why there are none."""

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
    """Forecast the peaks of recompute modes; ``look`` traces the model."""
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


# Steps within this margin count as equally fast.
EQUALLY_FAST = 0.02
# Smaller savings do not justify recomputation.
_WORTH_IT = 0.1
# Minimum distance of a knee from the straight line between no and full recomputation, relative.
_KNEE = 0.15
_MOST_WAYS = 7


@dataclass(frozen=True, kw_only=True)
class RecomputeMode:
    """Memory and time of steps with some blocks recomputed."""

    recompute: Recompute  # as in train.activation_checkpointing
    blocks: int  # that are recomputed
    peak_bytes: int | None  # peak of live memory in a step; None: out of memory
    reserved_bytes: int | None = None  # by an accelerator's allocator; None on the CPU
    step_s: tuple[float, ...] = ()  # of whole steps; empty if out of memory

    @property
    def needed_bytes(self) -> int | None:
        """The memory that a device needs: reserved by its allocator, if there is one."""
        return self.peak_bytes if self.reserved_bytes is None else self.reserved_bytes

    @property
    def usual_s(self) -> float:
        """The step time."""
        return statistics.median(self.step_s)

    @property
    def name(self) -> str:
        """The recomputed blocks, as text."""
        return recompute_name(self.recompute)


def recompute_name(recompute: Recompute) -> str:
    """Return the recomputed blocks as text."""
    if recompute == "none":
        return "nothing"
    if recompute == "selective":
        return "selective"
    if recompute in (1, "full"):
        return "every block"
    ending = {2: "2nd", 3: "3rd"}.get(int(recompute), f"{recompute}th")
    return f"every {ending} block"


def recompute_modes_for(blocks: int) -> list[Recompute]:
    """Return the recompute modes to try for this number of blocks, largest saving first.

    Modes with the same number of recomputed blocks count once. For deep models only some are tried.
    """
    if not blocks:
        return ["none"]
    numbers: dict[int, int] = {}  # by number of recomputed blocks
    for every in range(1, blocks + 1):
        numbers.setdefault(blocks // every, every)
    chosen = list(numbers.values())
    while len(chosen) > _MOST_WAYS - 2:
        chosen = [*chosen[:2], *chosen[2:][::2]]
    return ["full" if every == 1 else every for every in chosen] + ["selective", "none"]


def best_recompute(
    ways: Sequence[RecomputeMode], *, limit_bytes: int | None
) -> Decision[RecomputeMode] | None:
    """Choose the fastest mode within the limit, or the knee without one; None: nothing fits."""
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
            reason="the fastest mode that fits on this device; without recomputation it runs out "
            "of "
            "memory",
        )
    return _knee(ran, simplest)


def fastest_recompute(ways: Sequence[RecomputeMode]) -> RecomputeMode:
    """Return the fastest mode; among equals the one that recomputes least."""
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
        reason=f"the fastest of {len(fitting)} modes within {format_bytes(limit_bytes)}: "
        f"{_figures(chosen)}",
    )


def _knee(ways: Sequence[RecomputeMode], nothing: RecomputeMode) -> Decision[RecomputeMode]:
    """Choose the mode with a favourable trade-off of memory and time, if there is one."""
    assert nothing.peak_bytes is not None
    least = min(ways, key=lambda one: one.peak_bytes or 0)
    saved = nothing.peak_bytes - (least.peak_bytes or 0)
    if saved < _WORTH_IT * nothing.peak_bytes:
        return Decision(
            value=nothing,
            reason=f"recomputation saves at most {saved / nothing.peak_bytes * 100:.0f} % "
            f"of {format_bytes(nothing.peak_bytes)} ({least.name})",
        )
    slowest_s = max(one.usual_s for one in ways) - nothing.usual_s
    if slowest_s <= EQUALLY_FAST * nothing.usual_s:
        return Decision(
            value=least,
            reason=f"it saves the most, and no mode is slower by more than "
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
            reason=f"the knee of the curve: {_against(knee, nothing)}; further savings cost "
            f"disproportionately more time",
        )
    return Decision(
        value=nothing,
        reason="if the memory is sufficient: no mode saves much memory for little time "
        f"({least.name}: {_against(least, nothing)}); --limit SIZE finds the fastest mode that "
        "fits",
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
    return f"{format_bytes(one.needed_bytes or 0)}, {one.usual_s * 1000:.0f} ms per step"


PROGRAM = "torchmuster.bench.probes.memory"
# Uses of memory, in order of allocation; the last one is the remainder.
PARTS = ("parameters", "gradients", "optimizer states", "activations and others")


@dataclass(frozen=True, kw_only=True)
class MemoryRequest:
    """The request to a rank."""

    work: Work
    candidate: Candidate  # in one process; its precision is replaced by the requested one
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    device: Literal["auto", "cpu"]
    rounds: int  # of timed steps; each has one step of each mode


@dataclass(frozen=True, kw_only=True)
class StageTaken:
    """Memory of tensors in one stage of a step."""

    name: str  # model built, forward, loss, backward, optimizer step
    step: int  # 1, 2; 0 before the first
    micro_batch: int  # 1, 2; 0 outside of them
    before_bytes: int
    peak_bytes: int  # peak within the stage
    after_bytes: int
    parts: Mapping[str, int]  # after the stage, by PARTS

    @property
    def title(self) -> str:
        """The stage as text."""
        micro = f", micro-batch {self.micro_batch}" if self.micro_batch > 1 else ""
        return f"step {self.step}: {self.name}{micro}" if self.step else self.name


@dataclass(frozen=True, kw_only=True)
class OfPrecision:
    """The stages of the first two steps in one precision; none if memory ran out."""

    precision: str
    stages: tuple[StageTaken, ...]

    @property
    def highest(self) -> StageTaken | None:
        """The stage with the most memory in the second step, which is like all later steps."""
        second = [one for one in self.stages if one.step == 2]
        return max(second, key=lambda one: one.peak_bytes, default=None)


@dataclass(frozen=True, kw_only=True)
class MemoryAnswer:
    """The result of a rank."""

    rank: int
    device: str
    limit_bytes: int | None  # memory of the device, or limit of this process
    precision: Literal["fp32", "bf16", "fp16"]  # of the recompute modes
    precision_reason: str
    parameter_count: int
    blocks: int  # repeated layers of the model
    stages: tuple[OfPrecision, ...]  # that of the recompute modes first
    ways: tuple[RecomputeMode, ...]  # largest saving first


def measure_memory(
    request: MemoryRequest, *, device: Literal["cpu", "gpu"], say: Callable[[str], None]
) -> MemoryAnswer:
    """Measure memory and time of a few real steps in a separate process."""
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


_GIVEN_BACK = "freed by the end of the stage"
_UNKNOWN = "-"


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory:
    """The measurement and the forecast."""

    answer: MemoryAnswer
    model: str  # display name
    micro_batch_size: int
    limit_bytes: int | None  # memory limit of a step; None: no limit
    planned_bytes: Mapping[Recompute, int]  # of the modes with a forecast
    not_planned: str = ""  # why there is no forecast

    @property
    def nothing(self) -> RecomputeMode | None:
        """The steps without recomputation; None if out of memory."""
        return next(
            (one for one in self.answer.ways if one.recompute == "none" and one.step_s), None
        )


def memory_tables(measured: MeasuredMemory) -> Iterator[Table]:
    """Return the tables of the stages and of the recompute modes."""
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
        note="Bytes of tensors. Parameters, gradients, states and the rest are measured after a "
        "stage.",
    )
    if not answer.blocks:
        return
    plain = measured.nothing
    yield Table(
        title=f"savings of recomputation, {answer.blocks} blocks, {answer.precision}",
        head=("recomputed", "blocks", "peak", "forecast", "step time", "±", "memory", "time"),
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
            svg=stacked_chart("Peak memory of each stage, and what remains after it", "B", bars),
            caption=f"In {main.precision}"
            + "".join(f", and below it the second step in {of.precision}" for of in others)
            + ". All later steps are like the second one.",
        )
    curve = [one for one in answer.ways if one.peak_bytes is not None and one.step_s]
    if len(curve) > 1:
        yield Picture(
            title="peak and time",
            svg=line_chart(
                "Peak memory of a step by step time",
                Axis(title="step time", unit="s"),
                Axis(title="peak", unit="B"),
                _curves(measured, curve),
            ),
            caption="Points further to the right recompute more. Lower and further left is better.",
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
    """Return the series of the record."""
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
