"""The memory report: stages of a step, two precisions, savings and cost of recomputation."""

from collections.abc import Iterator, Mapping

from torchmuster.bench import memory
from torchmuster.bench.environment import Environment
from torchmuster.bench.memory import (
    MeasuredMemory,
    MemoryAnswer,
    OfPrecision,
    RecomputeMode,
    best_recompute,
)
from torchmuster.bench.record import BenchRecord, Json
from torchmuster.bench.report.report import Report
from torchmuster.decision import Decision
from torchmuster.finding import Finding, Status
from torchmuster.plan.proof.comparison import MEMORY_BAND, signed_percent
from torchmuster.units import format_bytes


def memory_report(
    measured: MeasuredMemory,
    *,
    where: Decision[str],
    environment: Environment,
    settings: Mapping[str, Json],
    date: str,
    took_s: float,
) -> Report:
    """Return the report of the measurement."""
    answer = measured.answer
    chosen = best_recompute(answer.ways, limit_bytes=measured.limit_bytes)
    choices: list[Decision[str]] = [
        Decision(value=f"measured on {answer.device}", reason=where.reason)
    ]
    if chosen is not None and answer.blocks:
        choices.append(Decision(value=_setting(chosen.value), reason=chosen.reason))
    return Report(
        bench="memory",
        question=f"what uses the memory in a training step of {measured.model}, and how much does "
        "recomputation save?",
        findings=tuple(_memory_report_findings(measured, chosen)),
        choices=tuple(choices),
        tables=tuple(memory.memory_tables(measured)),
        pictures=tuple(memory.memory_pictures(measured)),
        record=BenchRecord(
            bench="memory",
            date=date,
            settings=settings,
            environment=environment,
            series=tuple(memory.memory_series(measured)),
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


def _setting(way: RecomputeMode) -> str:
    return f"recompute: {way.name} (train.activation_checkpointing: {way.recompute})"


def _memory_report_findings(
    measured: MeasuredMemory, chosen: Decision[RecomputeMode] | None
) -> Iterator[Finding]:
    answer = measured.answer
    yield _highest(answer.stages[0])
    yield from _precisions(answer)
    if chosen is None:
        yield _nothing_fits(measured)
    if not answer.blocks:
        yield Finding(
            name="memory-no-blocks",
            status=Status.NOTE,
            what="recomputation was not tried: the model has no repeated layers",
            why="it has no ModuleList or Sequential with two or more layers of one class",
            fix="call torch.utils.checkpoint.checkpoint in the model",
        )
    yield from _plans(measured)


def _highest(of: OfPrecision) -> Finding:
    highest = of.highest
    if highest is None:
        return Finding(
            name="memory-peak",
            status=Status.WARNING,
            what=f"a step in {of.precision} with the current settings runs out of memory here",
            fix="recompute more blocks or reduce the micro-batch: the table shows what fits",
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
        why=f"after this stage, {named} remain, so at least {format_bytes(rest)} of the peak are "
        f"activations "
        "and temporary buffers. A smaller micro-batch or recomputation reduces these",
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
            f"{format_bytes(full.peak_bytes)} in fp32 ({signed_percent(ratio)})",
            why="weights, gradients and optimizer states stay fp32; activations have half "
            f"the bytes, plus {name} copies of the weights",
        )


def _nothing_fits(measured: MeasuredMemory) -> Finding:
    ran = [one for one in measured.answer.ways if one.needed_bytes is not None]
    limit = measured.limit_bytes
    fix = (
        f"a smaller micro-batch (--set train.micro_batch_size={max(1, measured.micro_batch_size // 2)}), "
        "bf16, or a sharded model: muster plan shows what fits"
    )
    if not ran or limit is None:
        return Finding(
            name="memory-limit",
            status=Status.FAILURE,
            what="no recompute mode fits on this device",
            fix=fix,
        )
    least = min(ran, key=lambda one: one.needed_bytes or 0)
    missing = (least.needed_bytes or 0) - limit
    return Finding(
        name="memory-limit",
        status=Status.FAILURE,
        what=f"nothing fits within {format_bytes(limit)}: {format_bytes(missing)} are missing with "
        f"{least.name} recomputed",
        fix=fix,
    )


def _plans(measured: MeasuredMemory) -> Iterator[Finding]:
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
    many = f"{len(pairs)} modes were" if len(pairs) > 1 else "1 mode was"
    yield Finding(
        name="memory-plan",
        status=Status.OK if good else Status.WARNING,
        what=f"{many} forecast with the method of muster plan; largest error: {worst.name}: "
        f"forecast "
        f"{format_bytes(planned)}, measured {format_bytes(worst.peak_bytes or 0)} ({signed_percent(ratio)})",
        why=""
        if good
        else f"plans may be off by {MEMORY_BAND * 100:.0f} %: a plan that fits may run out of "
        "memory",
        fix="" if good else "find the micro-batch by trial runs: muster plan --find-batch-size",
    )
