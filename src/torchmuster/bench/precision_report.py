"""What each precision gives in speed and memory and costs in accuracy, as people and programs read it."""

from collections.abc import Iterator, Mapping, Sequence

from torchmuster.bench import stability
from torchmuster.bench.environment import Environment
from torchmuster.bench.precision import PrecisionAnswer, PrecisionRequest
from torchmuster.bench.precision_choice import (
    Compared,
    Units,
    allowed_difference,
    choose,
    compare,
    difference,
)
from torchmuster.bench.record import BenchRecord, Json, Series
from torchmuster.bench.report.report import Picture, Report, Table
from torchmuster.decision import Decision
from torchmuster.finding import Finding, Status
from torchmuster.pages.charts import Axis, Bar, Curve, bars, lines
from torchmuster.pages.figures import amount
from torchmuster.units import format_bytes

_NOISY = 0.1


def report(
    request: PrecisionRequest,
    answer: PrecisionAnswer,
    *,
    where: Decision[str],
    units: Units | None,
    environment: Environment,
    settings: Mapping[str, Json],
    date: str,
    took_s: float,
) -> Report:
    """Return what was measured, as people and programs read it."""
    compared = compare(answer)
    chosen = choose(answer, units)
    name = environment.cpu if answer.device == "cpu" else answer.device_name
    tables, pictures = [_table(request, answer, compared)], [*_pictures(compared)]
    if answer.courses:
        tables.append(stability.table(answer.courses))
        pictures += stability.pictures(answer.courses)
    return Report(
        bench="precision",
        question=f"in which precision should {_model(request, answer)} be trained on {name}?",
        findings=(
            *_findings(answer, compared, chosen),
            *stability.findings(answer.courses),
        ),
        choices=(Decision(value=f"measured on {name}", reason=where.reason), chosen),
        tables=tuple(tables),
        pictures=tuple(pictures),
        record=BenchRecord(
            bench="precision",
            date=date,
            settings=settings,
            environment=environment,
            series=tuple(_series(request, answer)),
            facts={
                "device": answer.device_name,
                "chosen": chosen.value,
                "why": chosen.reason,
                "units_of_cpu": None if units is None else {k: list(v) for k, v in units.items()},
                "held_loss": {one.precision: one.held_loss for one in answer.ways},
                "other_order_loss": answer.other_order_loss,
                "output_error": {one.precision: one.output_error for one in answer.ways},
                "skipped": {one.precision: one.skipped for one in answer.ways},
                "not_measured": dict(answer.missing),
                "unstable_models": [
                    {
                        "model": one.case,
                        "precision": one.precision,
                        "losses": list(one.losses),
                        "scales": list(one.scales),
                        "lost_steps": list(one.skipped),
                        "first_not_finite": one.culprit or None,
                    }
                    for one in answer.courses
                ],
            },
        ),
        took_s=took_s,
    )


def _model(request: PrecisionRequest, answer: PrecisionAnswer) -> str:
    work = request.work
    named = work.model_name_or_path or work.build or "the model"
    if named.startswith("torchmuster."):
        named = "a small GPT"
    return f"{named} ({answer.parameter_count / 1e6:.3g} million parameters)"


def _series(request: PrecisionRequest, answer: PrecisionAnswer) -> Iterator[Series]:
    for way in answer.ways:
        labels = {"precision": way.precision}
        yield Series(name="step", unit="s", better="lower", samples=way.step_s, labels=labels)
        yield Series(
            name="tensors at the peak",
            unit="B",
            better="lower",
            samples=(float(way.peak_bytes),),
            labels=labels,
        )


def _findings(
    answer: PrecisionAnswer, compared: Sequence[Compared], chosen: Decision[str]
) -> Iterator[Finding]:
    allowed = allowed_difference(answer)
    for one in compared:
        name = one.way.precision
        if one.way.trouble:
            yield Finding(
                name=f"precision-{name}-not-finite",
                status=Status.WARNING,
                what=f"{name}: {one.way.trouble}",
                why="fp16 ends at 65504" if name == "fp16" else "",
                fix="take bf16, which has the range of fp32"
                if name == "fp16"
                else "look for the cause with muster train, which names layer and samples",
            )
        elif one.loss_difference is not None and abs(one.loss_difference) > allowed:
            yield Finding(
                name=f"precision-{name}-other-loss",
                status=Status.WARNING,
                what=f"{name}: after {len(one.way.losses)} steps the loss differs by "
                f"{one.loss_difference:+.1%} from that of fp32",
                why=f"another order of the same data changes it by {_of_order(answer)}",
                fix="train longer in both before you decide",
            )
    noise = max(one.step_s.noise for one in compared)
    if noise > _NOISY:
        yield Finding(
            name="precision-noisy",
            status=Status.WARNING,
            what=f"a step's time is known to {noise:.0%} only",
            why="others use the machine, or its clock changes",
            fix="measure again when it is quiet",
        )
    yield Finding(
        name="precision",
        status=Status.OK,
        what=f"train.precision: {chosen.value}"
        if chosen.value != "tf32"
        else "train.precision: fp32, with torch.set_float32_matmul_precision('high')",
    )


def _of_order(answer: PrecisionAnswer) -> str:
    changed = difference(answer.other_order_loss, answer.ways[0].held_loss)
    return "?" if changed is None else f"{changed:+.2%}"


def _table(
    request: PrecisionRequest, answer: PrecisionAnswer, compared: Sequence[Compared]
) -> Table:
    rows = []
    for one in compared:
        way, change = one.way, one.loss_difference
        rows.append(
            (
                way.precision,
                f"{amount(one.step_s.median, 's')} ±{one.step_s.noise:.0%}",
                f"{one.gain:.2f}",
                format_bytes(way.peak_bytes),
                f"{one.memory_share:.0%}",
                "not finite" if way.held_loss is None else f"{way.held_loss:.4g}",
                "?" if change is None else f"{change:+.2%}",
                "?" if way.output_error is None else f"{way.output_error:.1e}",
                str(way.skipped),
            )
        )
    random = " of drawn tokens" if request.work.dataset is None else ""
    return Table(
        title=f"the same {request.steps} steps from the same weights, {request.micro_batch_size} samples each",
        head=(
            *("precision", "step", "as fast", "tensors", "of fp32", "loss"),
            *("difference", "outputs", "lost"),
        ),
        rows=tuple(rows),
        note=f"loss: after the last step, on samples{random} that were not trained on; with another order of "
        f"the data that of fp32 differs by {_of_order(answer)}. outputs: how far the first ones are "
        "from float64. lost: tries of a step whose gradients overflowed; it is taken again with a smaller loss scale.",
    )


def _pictures(compared: Sequence[Compared]) -> Iterator[Picture]:
    yield Picture(
        title="time of a step",
        svg=bars(
            "Time of a training step",
            "s",
            [
                Bar(
                    name=one.way.precision,
                    value=one.step_s.median,
                    low=one.step_s.low,
                    high=one.step_s.high,
                    label=f"{amount(one.step_s.median, 's')} ({one.gain:.2f}x)",
                )
                for one in compared
            ],
        ),
        caption="Measured in turns; the line is how far the median may be off.",
    )
    yield Picture(
        title="losses",
        svg=lines(
            "Losses from the same weights with the same data",
            Axis(title="step"),
            Axis(title="loss"),
            [
                Curve(name=one.way.precision, points=points)
                for one in compared
                if (
                    points := [(float(i), x) for i, x in enumerate(one.way.losses) if x is not None]
                )
            ],
        ),
        caption="Where curves lie on each other, the number type does not matter to what is learnt.",
    )
