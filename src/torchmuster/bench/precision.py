"""Training precision: request to a process with torch, its answer and the report."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchmuster.bench import stability
from torchmuster.bench.environment import Environment
from torchmuster.bench.probing import run_probe
from torchmuster.bench.record import BenchRecord, Json, Series
from torchmuster.bench.report.report import Picture, Report, Table
from torchmuster.bench.stability import Course
from torchmuster.bench.statistics import Estimate, estimate
from torchmuster.decision import Decision
from torchmuster.finding import Finding, Status
from torchmuster.pages.charts import Axis, Bar, Curve, amount_text, bar_chart, line_chart
from torchmuster.plan.job import Work
from torchmuster.units import format_bytes

PROGRAM = "torchmuster.bench.probes.precision"
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
SMALL_GPT = Work(
    build="torchmuster.bench.probes.small_gpt:make_small_gpt",
    dataset="torchmuster.bench.probes.small_gpt:make_learnable_rows",
    loss="language_model",
)


@dataclass(frozen=True, kw_only=True)
class PrecisionRequest:
    """The training, its number of steps and of timed rounds."""

    device: Literal["auto", "cpu"]
    work: Work
    micro_batch_size: int
    steps: int  # trained in each precision from the same weights, with the same data
    rounds: int  # of timed steps
    study: bool  # whether to train the deliberately unstable models as well
    warm_up_s: float = 0.2


@dataclass(frozen=True, kw_only=True)
class PrecisionRun:
    """A training run in one precision."""

    precision: str
    step_s: tuple[float, ...]
    peak_bytes: int  # peak of tensors on the device, in a step
    losses: tuple[float | None, ...]  # of each step; None: not finite
    held_loss: float | None  # after the last step, on held-out samples
    output_error: (
        float | None
    )  # of the first outputs against float64: norm of the difference over the norm
    skipped: int  # attempts of a step that were skipped because of non-finite gradients
    scale: float | None = None  # loss scale at the end, if used
    trouble: str = ""  # the first step that failed for another reason than the loss scale


@dataclass(frozen=True, kw_only=True)
class PrecisionAnswer:
    """The answer of the process; fp32 comes first."""

    device: str
    device_name: str
    parameter_count: int
    ways: tuple[PrecisionRun, ...]
    missing: Mapping[str, str]  # precisions that this device does not support, and why
    other_order_loss: float | None  # of fp32 with the same data in another order
    courses: tuple[Course, ...] = ()  # of the deliberately unstable models


def measure_precision(
    request: PrecisionRequest, *, device: Literal["cpu", "gpu"], say: Callable[[str], None]
) -> PrecisionAnswer:
    """Train and time in a separate process."""
    (answer,) = run_probe(
        PROGRAM,
        request,
        PrecisionAnswer,
        device=device,
        folder=request.work.folder,
        doing="training in each precision",
        say=say,
    )
    return answer


# Instructions that speed up 16-bit products, by their names in /proc/cpuinfo.
_UNITS = {
    "bf16": {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "bf16": "BF16 of Arm"},
    "fp16": {"amx_fp16": "AMX", "avx512_fp16": "AVX-512 FP16", "asimdhp": "FP16 of Arm"},
}


def units_of_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, tuple[str, ...]] | None:
    """Return this CPU's units for bf16 and fp16, possibly none; None if unknown."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            flags = next(
                (set(one.split()) for one in lines if one.startswith(("flags", "Features"))), None
            )
    except OSError:
        return None
    if flags is None:
        return None
    return {
        kind: tuple(name for flag, name in known.items() if flag in flags)
        for kind, known in _UNITS.items()
    }


_WORTH = 1.1  # minimum speed-up over fp32
_AS_GOOD = 0.95  # bf16 is preferred from this share of fp16's speed on: it needs no loss scale
_ALLOWED_DIFFERENCE = 0.01  # of the loss, if another order of the data changes it less

Units = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class ComparedPrecision:
    """A precision compared with fp32."""

    way: PrecisionRun
    step_s: Estimate
    gain: float  # times as fast
    gain_low: float  # lower bound given the noise
    memory_share: float
    loss_difference: float | None  # as a share of fp32's loss; None: one of them is not finite


def compare_precisions(answer: PrecisionAnswer) -> list[ComparedPrecision]:
    """Compare every precision with fp32, which is the first."""
    plain = answer.ways[0]
    plain_s = estimate(plain.step_s)
    found = []
    for way in answer.ways:
        step_s = estimate(way.step_s)
        found.append(
            ComparedPrecision(
                way=way,
                step_s=step_s,
                gain=plain_s.median / step_s.median,
                gain_low=plain_s.low / step_s.high,
                memory_share=way.peak_bytes / plain.peak_bytes,
                loss_difference=difference(way.held_loss, plain.held_loss),
            )
        )
    return found


def difference(one: float | None, other: float | None) -> float | None:
    """Return the relative difference of two losses; None if one is not finite."""
    return None if one is None or not other else one / other - 1


def allowed_difference(answer: PrecisionAnswer) -> float:
    """Return the allowed difference from fp32's loss: the effect of another data order."""
    changed = difference(answer.other_order_loss, answer.ways[0].held_loss)
    return max(_ALLOWED_DIFFERENCE, abs(changed or 0.0))


def choose_fastest_precision(answer: PrecisionAnswer, units: Units | None) -> Decision[str]:
    """Choose the fastest precision that trains as well as fp32; fp32 if none gains enough.

    ``units`` are the CPU's 16-bit units; None on accelerators, or if unknown.
    """
    allowed = allowed_difference(answer)
    compared = compare_precisions(answer)
    refused: list[str] = []
    good: dict[str, ComparedPrecision] = {}
    for one in compared[1:]:
        name = one.way.precision
        if one.way.trouble or one.loss_difference is None:
            refused.append(f"{name} gave non-finite values")
        elif abs(one.loss_difference) > allowed:
            refused.append(f"{name}'s loss differs by {one.loss_difference:+.1%}")
        elif one.gain < _WORTH:
            refused.append(f"{name} is {one.gain:.2g} times as fast{_no_unit(name, units)}")
        elif one.gain_low <= 1.0:
            refused.append(f"{name} is {one.gain:.2g} times as fast, which may be noise")
        else:
            good[name] = one
    refused += [f"{name}: {why}" for name, why in answer.missing.items()]
    beside = f"; {'; '.join(refused)}" if refused else ""
    if not good:
        return Decision(value="fp32", reason=f"no other precision gains enough here{beside}")
    best = max(good.values(), key=lambda one: one.gain)
    if "bf16" in good and good["bf16"].gain >= _AS_GOOD * best.gain:
        best = good["bf16"]
    return Decision(
        value=best.way.precision,
        reason=f"{best.gain:.2g} times as fast as fp32 with {best.memory_share:.0%} of its memory; after "
        f"{len(best.way.losses)} steps its loss differs by {best.loss_difference:+.2%} (allowed: "
        f"{allowed:.2%}){beside}",
    )


def _no_unit(name: str, units: Units | None) -> str:
    if units is None or name not in units:
        return ""
    known = ", ".join(units[name])
    if known:
        return f" (this CPU's hardware support: {known})"
    return " (this CPU has no hardware support for it)"


_NOISY = 0.1


def precision_report(
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
    """Return the report of the measurement."""
    compared = compare_precisions(answer)
    chosen = choose_fastest_precision(answer, units)
    name = environment.cpu if answer.device == "cpu" else answer.device_name
    tables, pictures = (
        [_precision_table(request, answer, compared)],
        [*_precision_pictures(compared)],
    )
    if answer.courses:
        tables.append(stability.stability_table(answer.courses))
        pictures += stability.stability_pictures(answer.courses)
    return Report(
        bench="precision",
        question=f"in which precision should {_precision_model(request, answer)} be trained on {name}?",
        findings=(
            *_precision_findings(answer, compared, chosen),
            *stability.stability_findings(answer.courses),
        ),
        choices=(Decision(value=f"measured on {name}", reason=where.reason), chosen),
        tables=tuple(tables),
        pictures=tuple(pictures),
        record=BenchRecord(
            bench="precision",
            date=date,
            settings=settings,
            environment=environment,
            series=tuple(_precision_series(request, answer)),
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


def _precision_model(request: PrecisionRequest, answer: PrecisionAnswer) -> str:
    work = request.work
    named = work.model_name_or_path or work.build or "the model"
    if named.startswith("torchmuster."):
        named = "a small GPT"
    return f"{named} ({answer.parameter_count / 1e6:.3g} million parameters)"


def _precision_series(request: PrecisionRequest, answer: PrecisionAnswer) -> Iterator[Series]:
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


def _precision_findings(
    answer: PrecisionAnswer, compared: Sequence[ComparedPrecision], chosen: Decision[str]
) -> Iterator[Finding]:
    allowed = allowed_difference(answer)
    for one in compared:
        name = one.way.precision
        if one.way.trouble:
            yield Finding(
                name=f"precision-{name}-not-finite",
                status=Status.WARNING,
                what=f"{name}: {one.way.trouble}",
                why="fp16 overflows above 65504" if name == "fp16" else "",
                fix="use bf16, which has the range of fp32"
                if name == "fp16"
                else "run muster train: it names the layer and the samples that cause this",
            )
        elif one.loss_difference is not None and abs(one.loss_difference) > allowed:
            yield Finding(
                name=f"precision-{name}-other-loss",
                status=Status.WARNING,
                what=f"{name}: after {len(one.way.losses)} steps the loss differs by "
                f"{one.loss_difference:+.1%} from the fp32 loss",
                why=f"another order of the same data changes it by {_of_order(answer)}",
                fix="train longer in both precisions before deciding",
            )
    noise = max(one.step_s.noise for one in compared)
    if noise > _NOISY:
        yield Finding(
            name="precision-noisy",
            status=Status.WARNING,
            what=f"the noise of the step time is ±{noise:.0%}",
            why="other processes use the host, or its clock frequency changes",
            fix="measure again on an idle host",
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


def _precision_table(
    request: PrecisionRequest, answer: PrecisionAnswer, compared: Sequence[ComparedPrecision]
) -> Table:
    rows = []
    for one in compared:
        way, change = one.way, one.loss_difference
        rows.append(
            (
                way.precision,
                f"{amount_text(one.step_s.median, 's')} ±{one.step_s.noise:.0%}",
                f"{one.gain:.2f}",
                format_bytes(way.peak_bytes),
                f"{one.memory_share:.0%}",
                "not finite" if way.held_loss is None else f"{way.held_loss:.4g}",
                "?" if change is None else f"{change:+.2%}",
                "?" if way.output_error is None else f"{way.output_error:.1e}",
                str(way.skipped),
            )
        )
    random = " of random tokens" if request.work.dataset is None else ""
    return Table(
        title=f"the same {request.steps} steps from the same weights, {request.micro_batch_size} samples each",
        head=(
            *("precision", "step", "speed-up", "tensors", "of fp32", "loss"),
            *("difference", "outputs", "lost"),
        ),
        rows=tuple(rows),
        note=f"loss: after the last step, on held-out samples{random}; with another order of the "
        "data the "
        f"loss of fp32 differs by {_of_order(answer)}. outputs: relative difference of the first "
        "outputs "
        "from float64. lost: attempts of a step whose gradients overflowed; the step is repeated "
        "with a "
        "smaller loss scale.",
    )


def _precision_pictures(compared: Sequence[ComparedPrecision]) -> Iterator[Picture]:
    yield Picture(
        title="step time",
        svg=bar_chart(
            "Training step time",
            "s",
            [
                Bar(
                    name=one.way.precision,
                    value=one.step_s.median,
                    low=one.step_s.low,
                    high=one.step_s.high,
                    label=f"{amount_text(one.step_s.median, 's')} ({one.gain:.2f}x)",
                )
                for one in compared
            ],
        ),
        caption="Interleaved measurement; the line is the 95 % interval of the median.",
    )
    yield Picture(
        title="losses",
        svg=line_chart(
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
        caption="Where curves coincide, the precision does not affect the training.",
    )
