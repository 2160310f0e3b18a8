"""Verify a plan with a few real steps on this machine: predicted against measured."""

import statistics
from collections.abc import Callable, Iterator, Sequence

from torchmuster.errors import MusterError
from torchmuster.finding import Finding, Status
from torchmuster.plan import estimate
from torchmuster.plan.answer import Answer, Forecast
from torchmuster.plan.estimate import StepTime
from torchmuster.plan.hardware.catalogue import Hardware
from torchmuster.plan.proof.real_ranks import RankSteps, ran_out, run_real_steps
from torchmuster.units import format_bytes

_MEMORY_BAND = 0.05  # of tensors


def verify_plan(answer: Answer, *, say: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Compare the chosen candidate of a plan for this machine with real steps."""
    best, request = answer.chosen.value, answer.request
    on_cpu = request.hardware.card.kind == "cpu"
    ranks = run_real_steps(request.work, best.candidate, device="cpu" if on_cpu else "gpu", say=say)
    if ran_out(ranks):
        raise MusterError(
            "the planned configuration ran out of memory in its real steps",
            why="; ".join(rank.ran_out for rank in ranks),
            fix="find the micro-batch by trials: muster plan --find-batch-size",
        )
    return list(findings_of(best, request.hardware, ranks))


def findings_of(
    planned: Forecast, hardware: Hardware, measured: Sequence[RankSteps]
) -> Iterator[Finding]:
    """Yield a finding for each figure: memory more than its band above the plan is a failure."""
    tensor_bytes = planned.memory.tensor_bytes
    most = max(measured, key=lambda rank: rank.peak_bytes)
    figure = f"tensor memory (rank {most.rank} of {len(measured)})"
    yield _judged_memory(figure, tensor_bytes, most.peak_bytes, _MEMORY_BAND)
    reserved = [rank.reserved_bytes for rank in measured if rank.reserved_bytes is not None]
    if reserved:
        expected, _, _ = estimate.device_bytes(tensor_bytes, hardware)
        figure = "memory reserved by the allocator"
        yield _judged_memory(figure, expected, max(reserved), estimate.BAND - 1)
    # A step takes as long as on its slowest rank.
    slowest = [max(times) for times in zip(*(rank.step_s for rank in measured), strict=True)]
    yield _judged_time(planned.time, statistics.median(slowest))


def _judged_memory(figure: str, planned: int, measured: int, band: float) -> Finding:
    ratio = measured / planned
    what = (
        f"{figure}: predicted {format_bytes(planned)}, measured {format_bytes(measured)} "
        f"({_signed_percent(ratio)})"
    )
    if ratio <= 1 + band:
        status = Status.OK if ratio >= 1 - band else Status.NOTE
        return Finding(name="plan-memory", status=status, what=what)
    return Finding(
        name="plan-memory",
        status=Status.FAILURE,
        what=f"{what}, more than {band * 100:.0f} % above the prediction",
        why="a configuration that fits according to the plan may run out of memory",
        fix="find the micro-batch by trials: muster plan --find-batch-size",
    )


def _judged_time(planned: StepTime | None, measured_s: float) -> Finding:
    measured = f"step time: measured {_seconds(measured_s)}"
    if planned is None:
        return Finding(name="plan-time", status=Status.NOTE, what=f"{measured}, not predicted")
    ratio = measured_s / planned.step_s
    what = f"{measured}, roughly predicted {_seconds(planned.step_s)} ({_signed_percent(ratio)})"
    if 1 / estimate.TIME_BAND <= ratio <= estimate.TIME_BAND:
        return Finding(name="plan-time", status=Status.OK, what=what)
    return Finding(
        name="plan-time",
        status=Status.WARNING if ratio > 1 else Status.NOTE,
        what=f"{what}, outside of the band",
        fix="find out what a step waits for: muster profile",
    )


def _signed_percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"


def _seconds(amount: float) -> str:
    return f"{amount * 1000:.3g} ms" if amount < 1 else f"{amount:.3g} s"
