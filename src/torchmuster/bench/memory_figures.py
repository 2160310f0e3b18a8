"""Measured memory in tables, pictures and series."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchmuster.bench.memory_stages import MemoryAnswer, StageTaken
from torchmuster.bench.recomputing import Way
from torchmuster.bench.record import Series
from torchmuster.bench.report.report import Picture, Table
from torchmuster.bench.statistics import estimate
from torchmuster.pages.charts import Axis, Curve, Stack, lines, stacked
from torchmuster.pages.figures import amount
from torchmuster.plan.job import Recompute
from torchmuster.plan.proof.comparison import percent
from torchmuster.units import format_bytes

_GIVEN_BACK = "given back by its end"
_UNKNOWN = "-"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured, and what was known before."""

    answer: MemoryAnswer
    model: str  # as people know it
    micro_batch_size: int
    limit_bytes: int | None  # that a step is to stay within; None: nobody has set one
    planned_bytes: Mapping[Recompute, int]  # of the ways that a plan was made for
    not_planned: str = ""  # why there is none

    @property
    def nothing(self) -> Way | None:
        """The steps with nothing computed again; None if they did not fit."""
        return next(
            (one for one in self.answer.ways if one.recompute == "none" and one.step_s), None
        )


def tables(measured: Measured) -> Iterator[Table]:
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
                _size(beside.get((one.step, one.micro_batch, one.name))),
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
        rows=tuple(_row(one, plain, measured.planned_bytes) for one in answer.ways),
        note="Selective keeps the results of matrix products, convolutions and attention.",
    )


def _short_parts() -> tuple[str, ...]:
    return ("parameters", "gradients", "states", "rest")


def _size(stage: StageTaken | None) -> str:
    return _UNKNOWN if stage is None else format_bytes(stage.peak_bytes)


def _row(way: Way, plain: Way | None, planned: Mapping[Recompute, int]) -> tuple[str, ...]:
    forecast = planned.get(way.recompute)
    known = _UNKNOWN if forecast is None else format_bytes(forecast)
    if way.peak_bytes is None:
        nothing = (_UNKNOWN,) * 3
        return way.name, str(way.blocks), "does not fit", known, *nothing, _UNKNOWN
    took = estimate(way.step_s)
    less = more = _UNKNOWN
    if plain is not None and plain.peak_bytes is not None:
        less = percent(way.peak_bytes / plain.peak_bytes)
        more = percent(took.median / plain.usual_s)
    return (
        *(way.name, str(way.blocks), format_bytes(way.peak_bytes), known),
        *(amount(took.median, "s"), f"{took.noise * 100:.0f} %", less, more),
    )


def pictures(measured: Measured) -> Iterator[Picture]:
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
            svg=stacked("The peak of each stage, and what of it is there afterwards", "B", bars),
            caption=f"In {main.precision}"
            + "".join(f", and below the second step in {of.precision}" for of in others)
            + ". The second step is what all later ones are like.",
        )
    curve = [one for one in answer.ways if one.peak_bytes is not None and one.step_s]
    if len(curve) > 1:
        yield Picture(
            title="peak and time",
            svg=lines(
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


def _curves(measured: Measured, ways: list[Way]) -> list[Curve]:
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


def series(measured: Measured) -> Iterator[Series]:
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
