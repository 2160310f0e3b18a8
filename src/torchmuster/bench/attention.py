"""Attention implementations by sequence length: request, answer and report."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torchmuster.bench.environment import Environment
from torchmuster.bench.probing import run_probe
from torchmuster.bench.record import BenchRecord, Json, Series
from torchmuster.bench.report.report import Picture, Report, Table
from torchmuster.bench.statistics import estimate
from torchmuster.decision import Decision
from torchmuster.finding import Finding, Status
from torchmuster.pages.charts import Axis, Curve, amount_text, line_chart
from torchmuster.units import format_bytes

PROGRAM = "torchmuster.bench.probes.attention"
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
LENGTHS_QUICK = (128, 256)
# A call that takes longer is skipped, unless its length was requested.
LONGEST_S = 0.5
# Measured and shown in this order.
KINDS: Mapping[str, str] = {
    "plain": "softmax(QK')V, written out",
    "sdpa": "scaled_dot_product_attention with the backend that torch chooses",
    "math": "scaled_dot_product_attention with the backend MATH",
    "flash": "scaled_dot_product_attention with the backend FLASH_ATTENTION",
    "efficient": "scaled_dot_product_attention with the backend EFFICIENT_ATTENTION",
    "cudnn": "scaled_dot_product_attention with the backend CUDNN_ATTENTION",
    "flex": "flex_attention, compiled",
}


@dataclass(frozen=True, kw_only=True)
class AttentionRequest:
    """The attention to measure."""

    device: Literal["auto", "cpu"]
    number_type: Literal["auto", "float32", "bfloat16", "float16"]
    lengths: tuple[int, ...]
    batch: int
    heads: int
    head_size: int
    causal: bool
    kinds: tuple[str, ...] = tuple(KINDS)
    rounds: int = 11
    longest_s: float | None = LONGEST_S
    least_sample_s: float = 0.01


@dataclass(frozen=True, kw_only=True)
class MeasuredAttention:
    """One implementation at one length; if skipped, the reason instead of times."""

    kind: str
    length: int
    forward_s: tuple[float, ...] = ()  # without gradients
    training_s: tuple[float, ...] = ()  # forward and backward
    forward_bytes: int | None = None  # peak, without queries, keys and values
    training_bytes: int | None = None
    error: float | None = None  # against float64: norm of the difference over the norm
    right: bool = True
    left_out: str = ""
    forward_only: str = ""  # why there is no backward, if there is none


@dataclass(frozen=True, kw_only=True)
class AttentionAnswer:
    """What the process found."""

    device: str
    device_name: str
    number_type: str
    threads: int
    missing: Mapping[str, str]  # unavailable implementations, and why
    measured: tuple[MeasuredAttention, ...]
    compile_s: float | None = None  # of flex_attention, all lengths together


def measure_attention(
    request: AttentionRequest, *, device: Literal["cpu", "gpu"], say: Callable[[str], None]
) -> AttentionAnswer:
    """Measure in a separate process."""
    (answer,) = run_probe(
        PROGRAM,
        request,
        AttentionAnswer,
        device=device,
        doing="computing attention",
        say=say,
    )
    return answer


# Among implementations of nearly the same speed, the one without configuration is chosen.
_EQUAL = 1.05
_NEEDS_NOTHING = "sdpa"
_NOISY = 0.1


def best_at(measured: Sequence[MeasuredAttention], length: int) -> MeasuredAttention | None:
    """Return the fastest implementation in training at a length; None if nothing was measured."""
    there = [
        (estimate(one.training_s), one)
        for one in measured
        if one.length == length and one.training_s and one.right
    ]
    if not there:
        return None
    fastest, best = min(there, key=lambda one: one[0].median)
    for found, one in there:
        near = found.median <= _EQUAL * fastest.median or found.low <= fastest.high
        if one.kind == _NEEDS_NOTHING and near:
            return one
    return best


def choose_attention(answer: AttentionAnswer) -> Decision[str]:
    """Choose the best implementation of the longest sequence.

    The reason lists the others by length.
    """
    lengths = sorted({one.length for one in answer.measured})
    best = [(length, one) for length in lengths if (one := best_at(answer.measured, length))]
    if not best:
        return Decision(value="none", reason="no attention was measured with a backward pass")
    last = best[-1][1]
    ranges: list[tuple[int, int, str]] = []
    for length, one in best:
        if ranges and ranges[-1][2] == one.kind:
            ranges[-1] = (ranges[-1][0], length, one.kind)
        else:
            ranges.append((length, length, one.kind))
    words = "; ".join(
        f"{kind} {f'at {low}' if low == high else f'from {low} to {high}'}"
        for low, high, kind in ranges
    )
    return Decision(value=last.kind, reason=f"fastest: {words}{_beside_plain(answer, last)}")


def _beside_plain(answer: AttentionAnswer, best: MeasuredAttention) -> str:
    """Return the gain of the best over plain attention, at its length or the longest with both."""
    plain = {one.length: one for one in answer.measured if one.kind == "plain" and one.training_s}
    mine = {one.length: one for one in answer.measured if one.kind == best.kind and one.training_s}
    both = sorted(set(plain) & set(mine))
    if best.kind == "plain" or not both:
        return ""
    length = both[-1]
    gain = estimate(plain[length].training_s).median / estimate(mine[length].training_s).median
    text = f"; at {length} {gain:.2g} times as fast as plain attention"
    most, least = plain[length].training_bytes, mine[length].training_bytes
    if most and least is not None:
        text += f", with {format_bytes(least)} of memory beyond the inputs, instead of {format_bytes(most)}"
    return text


def attention_report(
    request: AttentionRequest,
    answer: AttentionAnswer,
    *,
    where: Decision[str],
    environment: Environment,
    settings: Mapping[str, Json],
    date: str,
    took_s: float,
) -> Report:
    """Return the report of the measurement."""
    name = environment.cpu if answer.device == "cpu" else answer.device_name
    chosen = choose_attention(answer)
    shape = f"{request.batch} x {request.heads} heads of {request.head_size}"
    mask = "causal" if request.causal else "no mask"
    return Report(
        bench="attention",
        question=f"which attention is fastest on {name}: {shape}, {mask}, {answer.number_type}?",
        findings=tuple(_attention_findings(answer)),
        choices=(Decision(value=f"measured on {name}", reason=where.reason), chosen),
        tables=(
            _attention_table(answer, "forward and backward", _training_cell),
            _attention_table(answer, "forward only", _forward_cell),
            _attention_table(
                answer, "memory of forward and backward, without the inputs", _memory_cell
            ),
        ),
        pictures=tuple(_attention_pictures(answer, name)),
        record=BenchRecord(
            bench="attention",
            date=date,
            settings=settings,
            environment=environment,
            series=tuple(series for one in answer.measured for series in _attention_series(one)),
            facts={
                "device": answer.device_name,
                "number_type": answer.number_type,
                "threads": answer.threads,
                "chosen": chosen.value,
                "why": chosen.reason,
                "largest_error": _errors(answer),
                "missing": dict(answer.missing),
                "compile_s": answer.compile_s,
            },
        ),
        took_s=took_s,
    )


def _errors(answer: AttentionAnswer) -> dict[str, float]:
    errors: dict[str, float] = {}
    for one in answer.measured:
        if one.error is not None:
            errors[one.kind] = max(errors.get(one.kind, 0.0), one.error)
    return errors


def _attention_series(one: MeasuredAttention) -> Iterator[Series]:
    labels: dict[str, str | int | float] = {"kind": one.kind, "length": one.length}
    for name, samples in (
        ("forward", one.forward_s),
        ("forward and backward", one.training_s),
    ):
        if samples:
            yield Series(name=name, unit="s", better="lower", samples=samples, labels=labels)
    for name, taken in (
        ("memory of forward", one.forward_bytes),
        ("memory of forward and backward", one.training_bytes),
    ):
        if taken is not None:
            yield Series(
                name=name, unit="B", better="lower", samples=(float(taken),), labels=labels
            )


def _attention_findings(answer: AttentionAnswer) -> Iterator[Finding]:
    wrong = [one for one in answer.measured if not one.right]
    if wrong:
        kinds = ", ".join(dict.fromkeys(one.kind for one in wrong))
        yield Finding(
            name="attention-wrong-output",
            status=Status.FAILURE,
            what=f"these attention implementations give wrong results here: {kinds}",
            why=f"the difference from float64 is larger than rounding to {answer.number_type} "
            "explains",
            fix="do not use them: with torch.nn.attention.sdpa_kernel(SDPBackend.MATH): …; "
            "or try another torch or driver version",
            evidence="\n".join(
                f"{one.kind} at {one.length}: off by {one.error:.2g}" for one in wrong
            ),
        )
    noise = sorted(estimate(one.forward_s).noise for one in answer.measured if one.forward_s)
    if noise and noise[len(noise) // 2] > _NOISY:
        yield Finding(
            name="attention-noisy",
            status=Status.WARNING,
            what=f"the median noise of these times is ±{noise[len(noise) // 2]:.0%}",
            why="other processes use the host, or its clock frequency changes",
            fix="measure again on an idle host",
        )
    right = [kind for kind in _errors(answer) if kind not in {one.kind for one in wrong}]
    if right:
        worst = max(_errors(answer)[kind] for kind in right)
        yield Finding(
            name="attention-same-output",
            status=Status.OK,
            what=f"outputs agree within {worst:.1e}: {', '.join(right)}",
            why="compared with float64, relative to the norm; for short sequences also the "
            "gradients",
        )
    if answer.missing:
        yield Finding(
            name="attention-missing",
            status=Status.NOTE,
            what=f"not available here: {', '.join(answer.missing)}",
            why="\n".join(
                f"{', '.join(kinds)}: {why}" for why, kinds in _by_value(answer.missing).items()
            ),
        )
    only = {one.kind: one.forward_only for one in answer.measured if one.forward_only}
    for kind, reason in only.items():
        yield Finding(
            name="attention-forward-only",
            status=Status.NOTE,
            what=f"{kind}: inference only",
            why=reason,
        )
    left_out = [one for one in answer.measured if one.left_out]
    if left_out:
        lengths = sorted({one.length for one in left_out})
        yield Finding(
            name="attention-left-out",
            status=Status.NOTE,
            what=f"skipped: {_left_out(left_out)}",
            why=left_out[0].left_out,
            fix=f"muster bench attention --lengths {' '.join(map(str, lengths))}",
        )


def _by_value(mapping: Mapping[str, str]) -> dict[str, list[str]]:
    """Return which keys have the same value."""
    found: dict[str, list[str]] = {}
    for key, value in mapping.items():
        found.setdefault(value, []).append(key)
    return found


def _left_out(left_out: Sequence[MeasuredAttention]) -> str:
    """Return which implementations were skipped at which lengths."""
    lengths: dict[str, list[str]] = {}
    for one in left_out:
        lengths.setdefault(one.kind, []).append(str(one.length))
    words = {kind: ", ".join(some) for kind, some in lengths.items()}
    return "; ".join(f"{', '.join(kinds)} at {some}" for some, kinds in _by_value(words).items())


def _training_cell(one: MeasuredAttention) -> str:
    return _time(one.training_s) if one.training_s else "-"


def _forward_cell(one: MeasuredAttention) -> str:
    return _time(one.forward_s) if one.forward_s else "-"


def _memory_cell(one: MeasuredAttention) -> str:
    return "-" if one.training_bytes is None else format_bytes(one.training_bytes)


def _time(samples: Sequence[float]) -> str:
    found = estimate(samples)
    return f"{amount_text(found.median, 's')} ±{found.noise:.0%}"


def _kinds(answer: AttentionAnswer) -> list[str]:
    return list(dict.fromkeys(one.kind for one in answer.measured))


def _attention_table(
    answer: AttentionAnswer, title: str, cell: Callable[[MeasuredAttention], str]
) -> Table:
    by_key = {(one.length, one.kind): one for one in answer.measured}
    kinds = _kinds(answer)
    rows = []
    for length in sorted({one.length for one in answer.measured}):
        found = [by_key.get((length, kind)) for kind in kinds]
        cells = ["-" if one is None else cell(one) for one in found]
        if set(cells) != {"-"}:
            rows.append((str(length), *cells))
    return Table(title=title, head=("length", *kinds), rows=tuple(rows))


def _attention_pictures(answer: AttentionAnswer, name: str) -> Iterator[Picture]:
    times = [_attention_curve(answer, kind) for kind in _kinds(answer)]
    yield Picture(
        title="time by length",
        svg=line_chart(
            f"Forward and backward of attention on {name}",
            Axis(title="length of the sequence", log=True),
            Axis(title="time", unit="s", log=True),
            [one for one in times if one.points],
        ),
        caption="For long sequences the time of every implementation grows with the square of the "
        "length.",
    )
    memory = [
        Curve(
            name=kind,
            points=[
                (float(one.length), float(one.training_bytes))
                for one in answer.measured
                if one.kind == kind and one.training_bytes
            ],
        )
        for kind in _kinds(answer)
    ]
    yield Picture(
        title="memory by length",
        svg=line_chart(
            "Memory of forward and backward, without queries, keys and values",
            Axis(title="length of the sequence", log=True),
            Axis(title="memory", unit="B", log=True),
            [one for one in memory if one.points],
        ),
        caption="The memory of implementations that store the whole score matrix grows with the "
        "square of the length; that of the others grows linearly.",
    )


def _attention_curve(answer: AttentionAnswer, kind: str) -> Curve:
    mine = [one for one in answer.measured if one.kind == kind and one.training_s]
    found = [estimate(one.training_s) for one in mine]
    return Curve(
        name=kind,
        points=[(float(one.length), it.median) for one, it in zip(mine, found, strict=True)],
        low=[it.low for it in found],
        high=[it.high for it in found],
    )
