"""What measured memory means: the stages of a step, two precisions, what computing again saves and costs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchmuster.decision import Decision
from torchmuster.finding import Finding, Status
from torchmuster.measure.environment import Environment
from torchmuster.measure.memory_stages import MemoryAnswer, OfPrecision, StageTaken
from torchmuster.measure.recomputing import Way, best
from torchmuster.measure.record import BenchRecord, Json, Series
from torchmuster.measure.report.charts import Axis, Curve, Stack, lines, stacked
from torchmuster.measure.report.figures import amount
from torchmuster.measure.report.report import Picture, Report, Table
from torchmuster.measure.statistics import estimate
from torchmuster.plan.job import Recompute
from torchmuster.plan.proof.comparison import MEMORY_BAND, percent
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


def report(
    measured: Measured,
    *,
    where: Decision[str],
    environment: Environment,
    settings: Mapping[str, Json],
    date: str,
    took_s: float,
) -> Report:
    """Return what was measured, as people and programs read it."""
    answer = measured.answer
    chosen = best(answer.ways, limit_bytes=measured.limit_bytes)
    choices: list[Decision[str]] = [
        Decision(value=f"measured on {answer.device}", reason=where.reason)
    ]
    if chosen is not None and answer.blocks:
        choices.append(Decision(value=_setting(chosen.value), reason=chosen.reason))
    return Report(
        bench="memory",
        question=f"what fills memory in a training step of {measured.model}, and what does computing "
        "again save?",
        findings=tuple(_findings(measured, chosen)),
        choices=tuple(choices),
        tables=tuple(_tables(measured)),
        pictures=tuple(_pictures(measured)),
        record=BenchRecord(
            bench="memory",
            date=date,
            settings=settings,
            environment=environment,
            series=tuple(_series(measured)),
            facts={
                "parameters": answer.parameter_count,
                "blocks": answer.blocks,
                "precision": answer.precision,
                "best": None if chosen is None else chosen.value.recompute,
                "did_not_fit": [str(one.recompute) for one in answer.ways if not one.step_s],
                "planned_bytes": {str(way): size for way, size in measured.planned_bytes.items()},
            },
        ),
        took_s=took_s,
    )


def _setting(way: Way) -> str:
    return f"compute again: {way.name} (train.activation_checkpointing: {way.recompute})"


def _findings(measured: Measured, chosen: Decision[Way] | None) -> Iterator[Finding]:
    answer = measured.answer
    yield _highest(answer.stages[0])
    yield from _precisions(answer)
    if chosen is None:
        yield _nothing_fits(measured)
    if not answer.blocks:
        yield Finding(
            name="memory-no-blocks",
            status=Status.NOTE,
            what="computing again was not tried: the model has no repeated layers",
            why="nothing in it is a ModuleList or Sequential with two or more layers of one class",
            fix="call torch.utils.checkpoint.checkpoint in the model where it fits",
        )
    yield from _plans(measured)


def _highest(of: OfPrecision) -> Finding:
    highest = of.highest
    if highest is None:
        return Finding(
            name="memory-peak",
            status=Status.WARNING,
            what=f"a step in {of.precision}, as the settings have it, runs out of memory here",
            fix="compute more again or make the micro-batch smaller: the table shows what fits",
        )
    states = sum(size for name, size in highest.parts.items() if name != "activations and others")
    named = ", ".join(
        f"{format_bytes(size)} {name}"
        for name, size in highest.parts.items()
        if name != "activations and others" and size
    )
    rest = max(highest.peak_bytes - states, 0)
    return Finding(
        name="memory-peak",
        status=Status.OK,
        what=f"a step takes {format_bytes(highest.peak_bytes)} at most ({of.precision}), in its "
        f"{highest.name}",
        why=f"there after it: {named}. So {format_bytes(rest)} or more of the peak are activations and "
        "what operations have for a moment: less with a smaller micro-batch, or computed again",
    )


def _precisions(answer: MemoryAnswer) -> Iterator[Finding]:
    by_name = {one.precision: one.highest for one in answer.stages}
    full = by_name.pop("fp32", None)
    for name, reduced in by_name.items():
        if full is None or reduced is None:
            continue
        ratio = reduced.peak_bytes / full.peak_bytes
        yield Finding(
            name="memory-precision",
            status=Status.NOTE,
            what=f"{name} takes {format_bytes(reduced.peak_bytes)} instead of "
            f"{format_bytes(full.peak_bytes)} in fp32 ({percent(ratio)})",
            why="weights, their gradients and the optimiser's states stay fp32; activations have half "
            f"the bytes, and {name} copies of weights come in addition",
        )


def _nothing_fits(measured: Measured) -> Finding:
    ran = [one for one in measured.answer.ways if one.needed_bytes is not None]
    limit = measured.limit_bytes
    fix = (
        f"a smaller micro-batch (--set train.micro_batch_size={max(1, measured.micro_batch_size // 2)}), "
        "bf16, or a model that is sharded: muster plan says what fits"
    )
    if not ran or limit is None:
        return Finding(
            name="memory-limit",
            status=Status.FAILURE,
            what="no way of computing again fits on this device",
            fix=fix,
        )
    least = min(ran, key=lambda one: one.needed_bytes or 0)
    missing = (least.needed_bytes or 0) - limit
    return Finding(
        name="memory-limit",
        status=Status.FAILURE,
        what=f"nothing stays within {format_bytes(limit)}: {format_bytes(missing)} are missing with "
        f"{least.name} computed again",
        fix=fix,
    )


def _plans(measured: Measured) -> Iterator[Finding]:
    if measured.not_planned:
        yield Finding(
            name="memory-plan",
            status=Status.NOTE,
            what=f"not compared with a plan: {measured.not_planned}",
        )
    pairs = [
        (one, measured.planned_bytes[one.recompute])
        for one in measured.answer.ways
        if one.peak_bytes is not None and one.recompute in measured.planned_bytes
    ]
    if not pairs:
        return
    worst, planned = max(pairs, key=lambda pair: abs((pair[0].peak_bytes or 0) / pair[1] - 1))
    ratio = (worst.peak_bytes or 0) / planned
    good = abs(ratio - 1) <= MEMORY_BAND
    many = f"{len(pairs)} ways were" if len(pairs) > 1 else "1 way was"
    yield Finding(
        name="memory-plan",
        status=Status.OK if good else Status.WARNING,
        what=f"{many} forecast as muster plan does; furthest off is {worst.name}: forecast "
        f"{format_bytes(planned)}, measured {format_bytes(worst.peak_bytes or 0)} ({percent(ratio)})",
        why=""
        if good
        else f"plans may be off by {MEMORY_BAND * 100:.0f} %: what they say fits may not fit here",
        fix="" if good else "find the micro-batch by trials: muster plan --find-batch-size",
    )


def _tables(measured: Measured) -> Iterator[Table]:
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


def _pictures(measured: Measured) -> Iterator[Picture]:
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


def _series(measured: Measured) -> Iterator[Series]:
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
